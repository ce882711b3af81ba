"""benchmarks/compiled.py: what it measures of a process, and what it says of one that failed."""

from __future__ import annotations

import argparse
import csv
from types import ModuleType

import pytest
import torch
from repository_scripts import load_script

from lowtide.app.shared.specs import UsageError
from lowtide.errors import LowtideError


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/compiled.py")


def options(bench: ModuleType, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*given])


def test_four_ways_each_with_a_row(bench, tmp_path, monkeypatch):
    asked = []

    def stand_in(what, steps):
        asked.append((what["method"], what["compiled"], steps))
        return {"held": 100, "peak": 200, "ledger_raw": None, "ledger_held": None, "step_ms": 1.0}

    monkeypatch.setattr(bench, "_in_a_process", stand_in)
    out = tmp_path / "compiled.csv"
    rows = bench.run(options(bench, "gpt", "--method", "budget", "--steps", "2", "--out", str(out)))
    assert asked == [("plain", False, 2), ("budget", False, 2), ("plain", True, 2), ("budget", True, 2)]
    with out.open(newline="") as file:
        assert tuple(next(csv.reader(file))) == bench.COLUMNS
    assert len(bench.show(rows)) == 6


def test_a_process_grows_by_less_with_lowtide(bench, monkeypatch):
    """A model whose tensors outweigh what codecs need meanwhile; eagerly, so that nothing is compiled for long."""
    monkeypatch.setitem(
        bench.MODELS, "gpt", ({"vocab_size": 64, "context": 128, "depth": 6, "width": 128, "heads": 4}, 8)
    )
    torch.set_num_threads(1)
    row = bench.measure("gpt", "fixed", compiled=False, steps=1)
    assert row["ledger_raw"] > 4 * row["ledger_held"] > 0
    assert row["peak"] > 0 and row["step_ms"] > 0


def test_what_failed_is_said(bench):
    with pytest.raises(LowtideError, match="unknown method"):
        bench._in_a_process({"name": "gpt", "method": "fixt", "compiled": False}, 1)
    with pytest.raises(UsageError, match="vgg: not a model that is measured here"):
        bench.run(options(bench, "vgg", "--out", "-"))
