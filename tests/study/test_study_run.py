"""The runner of the study: rows that are right, runs that are not repeated, and what a kill leaves behind."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from outcomes import COLUMNS, read_rows

from lowtide.app.train.trainer import Trainer

STUDY = Path(__file__).parents[2] / "study"


def _rows() -> list[dict[str, str]]:
    return read_rows(Path("results/digits.csv"))


def _lines(path: str | Path) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_curves_and_layers(study, calls, capsys):
    assert study() == 0
    assert calls == ["plain 0", "budget 0", "exact 0", "plain 1", "budget 1"]
    rows = _rows()
    assert tuple(rows[0]) == COLUMNS and [row["method"] for row in rows] == [call.split()[0] for call in calls]
    plain, budget, exact = rows[:3]
    assert exact["accuracy"] == plain["accuracy"], "the same weights, the same batches, the same bits"
    # In float32 the dry run and the ledger count the same storages.
    assert plain["raw"] == plain["raw_fp32"] == budget["raw"] == budget["raw_fp32"] == plain["held"]
    assert float(plain["ratio_fp32_mean"]) == 1 and not plain["conv_raw"]
    # The second convolution alone: the input of the first is the model's own.
    assert int(budget["conv_raw_fp32"]) == int(budget["conv_raw"]) == 64 * 8 * 6 * 6 * 4
    assert float(exact["conv_ratio_mean"]) == 1 and float(budget["conv_ratio_mean"]) > 2

    curve = _lines(Path("results") / budget["curve"])
    assert [line["epoch"] for line in curve] == ["1", "2"] and curve[-1]["accuracy"] == budget["accuracy"]
    held = [int(line["conv_held"]) for line in curve]
    assert held[-1] == int(budget["conv_held"]) and sum(held) / 2 == pytest.approx(int(budget["conv_held_mean"]), abs=1)
    assert float(budget["conv_ratio_mean"]) == pytest.approx(int(budget["conv_raw"]) / (sum(held) / 2), rel=1e-5)

    layers = {line["site"]: line for line in _lines(Path("results/layers/digits") / Path(budget["curve"]).name)}
    assert layers["2:convolution.input"]["held"] == budget["conv_held"]
    assert layers["2:convolution.input"]["held_by_epoch"] == " ".join(map(str, held))
    layered = sorted(path.name.rpartition("-")[0] for path in Path("results/layers/digits").iterdir())
    assert layered == ["budget-0", "exact-0"], "one seed is enough"
    assert not list(Path("runs/study").glob("*/checkpoints/*")), "they cost time, and nobody wants them"
    shown = capsys.readouterr()
    assert "[5/5] nets.py:net digits budget, seed 1: accuracy" in shown.err.replace(str(Path.cwd()) + "/", "")
    assert "epoch 2/2  test accuracy" in shown.err and "budget - plain:" in shown.out


def test_in_16_bits_ratios_are_given_in_float32_terms_too(study, table, calls):
    table.write_text(table.read_text().replace("batch = 64", "batch = 64\nprecision = 'bf16'"))
    assert study("--only", "budget") == 0
    row = _rows()[0]
    values = 64 * 8 * 6 * 6
    assert (int(row["conv_raw"]), int(row["conv_raw_fp32"])) == (2 * values, 4 * values)
    assert float(row["conv_ratio_fp32"]) == pytest.approx(2 * float(row["conv_ratio"]), rel=1e-5)
    assert float(row["ratio_fp32_mean"]) > 1.5 * float(row["ratio_mean"])


def test_a_run_that_is_there_is_not_repeated(study, table, calls, capsys):
    assert study("--only", "plain") == 0
    assert study() == 0
    assert calls == ["plain 0", "plain 1", "budget 0", "exact 0", "budget 1"]
    assert study() == 0 and len(calls) == 5
    assert "digits: 5 runs are there, 0 are to be done" in capsys.readouterr().err
    table.write_text(table.read_text().replace("exact = 1", "exact = 2"))
    assert study() == 0 and calls[5:] == ["exact 1"]
    table.write_text(table.read_text().replace("lr = 0.05", "lr = 0.04"))
    assert study("--only", "exact") == 0 and len(calls) == 8, "other settings are other runs"
    assert len(_rows()) == 8


def test_half_a_row_is_none(study, calls):
    assert study("--only", "exact") == 0
    path = Path("results/digits.csv")
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert read_rows(path) == []
    assert study("--only", "exact") == 0
    assert len(calls) == 2 and len(_rows()) == 1
    assert path.read_text().startswith(whole[:-40] + "\n"), "and the next one begins on a line of its own"


def test_a_failure_has_a_row_and_is_tried_again(study, calls, monkeypatch, capsys):
    original = Trainer.step

    def step(self: Trainer, number: int, timeline: Any = None) -> torch.Tensor:
        if self.config.method.name == "exact":
            raise RuntimeError("the tide is out")
        return original(self, number, timeline)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        assert study("--only", "plain", "exact") == 1
    assert "exact, seed 0: failed: RuntimeError: the tide is out" in capsys.readouterr().err
    assert [row["error"] for row in _rows()] == ["", "RuntimeError: the tide is out", ""]
    assert study("--only", "plain", "exact") == 0
    assert calls[3:] == ["exact 0"]


def test_when_time_is_up_nothing_is_begun(study, calls):
    assert study("--minutes", "0") == 3
    assert not calls and not _rows()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parallel", "0"), "--parallel has to be at least 1, got 0"),
        (("--only", "plian"), "unknown method of digits 'plian'"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(study, calls, capsys, arguments, message):
    assert study(*arguments) == 2
    assert message in capsys.readouterr().err and not calls


def test_a_table_that_is_not_there_is_named(runner, capsys):
    assert runner.main(["nowhere.toml"]) == 2
    assert "cannot read the configuration nowhere.toml" in capsys.readouterr().err


def test_a_file_of_something_else_is_refused(study, calls, capsys):
    Path("results").mkdir()
    Path("results/digits.csv").write_text("a,b\n1,2\n")
    assert study() == 2
    assert "digits.csv has other columns" in capsys.readouterr().err and not calls


@pytest.mark.slow
def test_a_kill_loses_no_row_and_a_stopped_run_is_continued(table):
    """The real thing, in three sittings: killed after its first row, out of time, to its end."""
    table.write_text(table.read_text().replace("epochs = 2", "epochs = 40").replace("exact = 1", ""))
    command = [sys.executable, str(STUDY / "run.py"), str(table), "--results", "results", "--device", "cpu"]
    command += ["--parallel", "2"]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(os.environ))
    while not _rows():
        assert first.poll() is None, "it ended before it had a row"
        time.sleep(0.05)
    runs = _children(first.pid)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = _rows()
    assert kept and all(row["accuracy"] for row in kept)
    deadline = time.monotonic() + 300
    while any(map(_is_alive, runs)):
        assert time.monotonic() < deadline, "with nobody to talk to, runs end"
        time.sleep(0.05)

    second = subprocess.run([*command, "--minutes", "0.15"], capture_output=True, text=True, timeout=900)
    assert second.returncode in (0, 3) and _rows()[: len(kept)] == kept
    third = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert third.returncode == 0, third.stderr
    rows = _rows()
    assert sorted((row["method"], row["seed"]) for row in rows) == [(m, s) for m in ("budget", "plain") for s in "01"]
    assert all(len(_lines(Path("results") / row["curve"])) == 40 for row in rows)


def _children(process: int) -> list[int]:
    """Of all its threads; none where there is no /proc."""
    found = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def _is_alive(process: int) -> bool:
    """Whether it has not ended; one that has may be listed until somebody asks how."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
