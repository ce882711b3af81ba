"""benchmarks/noise.py, track.py, budgets.py and overhead.py at tiny size: what their figures mean."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from repository_scripts import load_script

from lowtide.app.bench.timing import Times
from lowtide.app.shared.specs import UsageError
from lowtide.controllers.budget import Budget


def options(bench: ModuleType, *arguments: str, out: Any = "-") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*arguments, "--tiny", "--device", "cpu", "--precision", "fp32", "--out", str(out)])


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_noise_is_measured_on_the_batch_that_it_was_predicted_for(tmp_path, capsys):
    """A GPT, whose attention needs a second set of rules. Four draws of weights with at least 1024 entries."""
    bench, out = load_script("benchmarks/noise.py"), tmp_path / "noise.csv"
    settings = ("gpt", "--batch", "8", "--warm", "10", "--updates", "4", "--noise", "0.01,0.05")
    rows = bench.run(options(bench, *settings, out=out))
    assert [row["noise"] for row in rows] == [0.01] * 8 + [0.05] * 8, "the head shares its weight with the embedding"
    assert all(0.8 < row["ratio"] < 1.25 for row in rows), [row["ratio"] for row in rows]
    assert all(row["floor"] == 0 and row["total_min"] < row["total"] < row["total_max"] for row in rows)
    assert {row["bound"] for row in rows[:8]} != {row["bound"] for row in rows[8:]}, "bounds follow the noise"
    assert rows[0]["total"] < rows[8]["total"] and 1 < rows[0]["held_x_less"] < rows[8]["held_x_less"]
    assert sum(row["energy"] for row in rows[:8]) < 1
    written = read(out)
    assert tuple(written[0]) == bench.COLUMNS and len(written) == len(rows)
    assert "s] noise 0.05: bounds are set" in capsys.readouterr().err
    assert len(bench.show(rows)) == 1 + 2 + 2


def test_texts_follow_one_circle_in_seven_of_ten_cases():
    """4096 pairs: the share has a standard deviation of 0.7 %. A jump may hit the right token by chance."""
    source = load_script("benchmarks/noise.py").Texts(torch.zeros(1, 64, dtype=torch.int64), 97, 3)
    tokens, target = source.batch(64)
    assert torch.equal(tokens[:, 1:], target[:, :-1])
    after = torch.empty(97, dtype=torch.int64)
    after[source._circle] = source._circle.roll(-1)
    assert 0.67 < float((after[tokens] == target).double().mean()) < 0.74
    assert not torch.equal(source.batch(64)[0], tokens)


def test_measuring_leaves_no_trace_in_a_run(tmp_path):
    """Losses at the end are bit-equal whether there were measurements before or not."""
    bench = load_script("benchmarks/track.py")
    settings = ("--batch", "64", "--steps", "6", "--draws", "2", "--set", "width=4")
    sites = tmp_path / "sites.csv"
    often = bench.run(options(bench, *settings, "--every", "2", "--sites", str(sites), out=tmp_path / "track.csv"))
    once = bench.run(options(bench, *settings, "--every", "6", "--sites", "-"))
    assert [row["step"] for row in often] == [2, 4, 6] and [row["step"] for row in once] == [6]
    same = ("loss", "lr", "raw", "held", "ratio", "noise", "noise_min", "noise_max", "floor", "events")
    assert {name: often[-1][name] for name in same} == {name: once[-1][name] for name in same}
    assert 0 < often[-1]["noise_min"] < often[-1]["noise_max"] and often[-1]["floor"] == 0
    rows = [row for row in read(sites) if row["step"] == "6"]
    assert tuple(rows[0]) == bench.SITE_COLUMNS and tuple(read(tmp_path / "track.csv")[0]) == bench.COLUMNS
    assert sum(int(row["held"]) for row in rows) == often[-1]["held"], "the sites are those of the last step, once"
    assert len(bench.show(often)) == 2 + 3 + 1


def test_a_text_is_followed_and_its_noisiest_weight_named(tmp_path):
    """Dropout draws the same masks for the exact gradient and for each draw of the dither."""
    bench, text = load_script("benchmarks/track.py"), tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 96)) * 40)
    settings = ("gpt", "--data", f"text:{text}", "--data-set", "length=16", "--set", "context=16", "--batch", "16")
    run = ("--steps", "4", "--every", "4", "--draws", "2", "--sites", "-", "--set", "dropout=0.1")
    (row,) = bench.run(options(bench, *settings, *run, "--budget-set", "flow=false", "--noise", "0.02"))
    assert row["floor"] == 0 < row["noise_min"] < row["noise_max"] < 0.1
    assert row["weight"].endswith("weight") and row["weight_mean"] < row["weight_most"]
    assert row["settings"] == "length=16 flow=false"
    assert abs(row["bias"]) < 0.2 and 0 < row["scale_mean"] <= row["scale_most"]


def test_what_errors_have_in_common():
    bench = load_script("benchmarks/track.py")
    assert bench.common(4 * 0.03, 0.03, 4) == pytest.approx(0), "independent errors: energies add up"
    assert bench.common(16 * 0.03, 0.03, 4) == pytest.approx(1), "equal ones: amplitudes do"
    assert bench.common(0.03, 0.03, 1) is None and bench.common(0.0, 0.0, 4) is None


def test_budgets_met_and_one_that_cannot_be(tmp_path):
    bench, out = load_script("benchmarks/budgets.py"), tmp_path / "budgets.csv"
    rows = bench.run(options(bench, "gpt", "--batch", "16", "--steps", "20", "--budgets", "0.15", out=out))
    plain, seventh, impossible = rows
    assert plain["budget"] is None and plain["ok"] and "ledger_off" not in plain
    assert seventh["ledger_asked"] == round(0.15 * seventh["ledger_raw"])
    assert seventh["ledger_off"] == seventh["ledger_held"] / seventh["ledger_asked"] - 1
    assert abs(seventh["ledger_off"]) < 0.05 and 0 < seventh["met_step"] <= 20 and seventh["noise"] > 0
    assert 0.12 < seventh["least"] <= seventh["most"] < 0.18
    assert not impossible["ok"] and 0 < impossible["smallest"] < seventh["ledger_held"]
    assert tuple(read(out)[0]) == bench.COLUMNS
    table = bench.show(rows)
    assert len(table) == 2 + 3 + 1 and "cannot be met" in table[-1]


def test_a_budget_is_compared_with_what_plain_training_holds():
    bench = load_script("benchmarks/budgets.py")
    plain = {"ok": True, "budget": None, "held": 1000}
    row = {"ok": True, "budget": 0.25, "held": 255, "ledger_raw": 800, "ledger_held": 196}
    bench.relate(row, plain)
    assert row["held_asked"] == 250 and row["held_off"] == pytest.approx(0.02)
    assert row["ledger_asked"] == 200 and row["ledger_off"] == pytest.approx(-0.02)


def test_overhead_of_a_period_by_hand():
    """Two windows of eight steps. Ordinary steps take 100 ms, the others 50, 10, 20 and 5 ms more: 85 of 40,000."""
    bench = load_script("benchmarks/overhead.py")
    median = [150.0, 110.0, 120.0, 105.0, 100.0, 100.0, 100.0, 100.0]
    found = bench.summarise([Times((time - 1, time + 1)) for time in median])
    assert (found["ordinary_ms"], found["statistics_ms"], found["update_ms"], found["new_bounds_ms"]) == (
        100, 150, 110, 120,
    )  # fmt: skip
    assert found["extra_ms"] == found["extra_mean_ms"] == 85
    assert found["tables_ms"] == pytest.approx((105 + 100 + 100) / 3)
    assert found["overhead"] == pytest.approx(0.002125) and bench.PERIOD == 400


def test_windows_begin_with_a_measurement(tmp_path, monkeypatch):
    bench, asked, wants = load_script("benchmarks/overhead.py"), [], Budget.wants

    def watch(self: Budget, step: int) -> Any:
        wish = wants(self, step)
        if wish is not None:
            asked.append(step)
        return wish

    monkeypatch.setattr(Budget, "wants", watch)
    settings = ("gpt", "--batch", "16", "--window", "8", "--windows", "2", "--warm", "2", "--batches", "2")
    out = tmp_path / "overhead.csv"
    (row,) = bench.run(options(bench, *settings, out=out))
    assert row["ok"] and [step for step in asked if step >= 16] == [16, 24, 32], "32 is the step after the last window"
    assert len(row["places"].split()) == 8 and 0 <= row["moved"] <= row["sites"]
    assert tuple(read(out)[0]) == bench.COLUMNS
    assert len(bench.show([row])) == 1 + 2 + 1


def test_overhead_is_that_of_method_budget():
    bench = load_script("benchmarks/overhead.py")
    for method in ("bold", "budget(period=10)"):
        with pytest.raises(UsageError, match="sets its period itself; got"):
            bench.run(options(bench, "gpt", "--methods", method))
    with pytest.raises(UsageError, match="--window has to be at least 8, got 4"):
        bench.run(options(bench, "gpt", "--window", "4"))
    with pytest.raises(UsageError, match=r"--warm has to be at least 2.*; got 1"):
        bench.run(options(bench, "gpt", "--warm", "1"))
