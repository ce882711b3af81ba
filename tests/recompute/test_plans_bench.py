"""benchmarks/plans.py from end to end at tiny size: budgets are met, and one that cannot be is a row."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType

import pytest
from repository_scripts import load_script

from lowtide.planner.clock import Clock


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/plans.py")


@pytest.mark.usefixtures("_timed")
def test_budgets_are_met_and_plans_printed(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are made for times as they are told: those of a busy machine tell nothing."""
    monkeypatch.setattr(Clock, "total_ms", lambda clock: 1.0)
    parser, out = argparse.ArgumentParser(), tmp_path / "plans.csv"
    bench.configure(parser)
    shared = ["--tiny", "--device", "cpu", "--batch", "16", "--precision", "fp32", "--out", str(out)]
    short = ["--steps", "2", "--warm", "1", "--repeats", "1", "--budgets", "64KiB,6MiB"]
    bench.run(parser.parse_args(["resnet18", *shared, *short]))
    with out.open(newline="") as file:
        refused, met = csv.DictReader(file)
    assert refused["ok"] == "False" and "The smallest budget is" in refused["error"]
    assert met["ok"] == "True" and -0.2 < float(met["deviation"]) <= 0.02, "blocks are coarse at this size"
    assert int(met["ledger_held"]) == pytest.approx(int(met["planned"]), rel=0.03)
    assert float(met["step_x_plain"]) > 0 and met["choices"].count("=") == 8
    printed = capsys.readouterr().out
    assert "held of 6.00 MiB; step " in printed and "layer4.1 " in printed
