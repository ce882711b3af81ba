"""benchmarks/growth.py from end to end, at tiny size, with memory counted on the CPU."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from live_memory import LiveMeter
from repository_scripts import load_script

MIB = 1 << 20


@pytest.fixture(scope="module")
def growth() -> ModuleType:
    return load_script("benchmarks/growth.py")


def options(growth: ModuleType, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    growth.configure(parser)
    shared = ["--tiny", "--device", "cpu", "--warm", "1", "--repeats", "2", "--steps", "2", "--cap", "10MiB"]
    return parser.parse_args(["resnet18", *shared, *arguments])


def test_methods_side_by_side(growth: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "growth.csv"
    settings = ("--methods", "plain,checkpoint,exact", "--start", "8", "--granularity", "4", "--out", str(out))
    rows = growth.run(options(growth, *settings), LiveMeter(64 * MIB))
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == growth.COLUMNS
    assert [row["method"] for row in written] == ["plain", "checkpoint", "exact"]
    for row in rows:
        assert row["ok"] and 0 < row["peak"] <= row["allowed"] == int(0.95 * 10 * MIB)
        assert row["units_per_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["batch_x_plain"] == row["batch"] / rows[0]["batch"]
        assert f"{row['batch']} fits {row['peak']}" in row["tried"]
    plain, checkpointed, _ = rows
    assert checkpointed["batch"] > plain["batch"], "recomputing blocks makes room even at this size"
    assert "[2/3] resnet18, tf32, checkpoint: batch " in capsys.readouterr().err
    assert len(growth.show(rows)) == 2 + len(rows)


def test_a_cap_that_nothing_fits_is_a_row_and_so_is_a_failure(growth: ModuleType) -> None:
    settings = ("--methods", "plain", "--out", "-", "--start", "2", "--cap", "1KiB")
    (row,) = growth.run(options(growth, *settings), LiveMeter(64 * MIB))
    assert row["ok"] and row["batch"] == 0 and "units_per_s" not in row
    (row,) = growth.run(options(growth, *settings, "--maximum", "1"), LiveMeter(64 * MIB))
    assert not row["ok"] and row["error"].startswith("SizeError: start is at least 1 and at most maximum")
    assert "SizeError" in growth.show([row])[-1]


@pytest.mark.parametrize("part", ["warm", "repeats"])
def test_what_the_search_found_outlives_the_steps_after_it(
    growth: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory runs out in a warm-up step, or in a timed one, of the first method; the second is not affected."""
    search, searched = growth.find_batch_size, []

    def find(*args: Any, **settings: Any) -> Any:
        searched.append(search(*args, **settings))
        return searched[-1]

    def run_out(*args: Any, **settings: Any) -> Any:
        if len(searched) == 1 and not failures:
            failures.append(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.91 GiB."))
            raise failures[0]
        return original(*args, **settings)

    owner, name = (growth, "_step") if part == "warm" else (growth.timing, "interleave")
    original, failures = getattr(owner, name), list[Exception]()
    monkeypatch.setattr(growth, "find_batch_size", find)
    monkeypatch.setattr(owner, name, run_out)
    out = tmp_path / "growth.csv"
    settings = ("--methods", "plain,checkpoint", "--start", "4", "--maximum", "4", "--out", str(out))
    failed, fine = growth.run(options(growth, *settings, "--traceback"), LiveMeter(64 * MIB))
    assert not failed["ok"] and failed["error"].startswith("OutOfMemoryError: CUDA out of memory")
    assert failed["batch"] == 4 and failed["peak"] > 0 and "4 fits" in failed["tried"] and failed["why"]
    assert "units_per_s" not in failed and "batch_x_plain" not in failed, "a batch that failed is no gain"
    assert fine["ok"] and fine["units_per_s"] > 0 and "batch_x_plain" not in fine
    assert "plain: FAILED with the batch found, 4, OutOfMemoryError" in capsys.readouterr().err
    with out.open(newline="") as file:
        assert [row["batch"] for row in csv.DictReader(file)] == ["4", "4"]
    assert "OutOfMemoryError" in growth.show([failed])[-1] and " 4 " in growth.show([failed])[-1]
