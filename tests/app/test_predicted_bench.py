"""benchmarks/predicted.py: a run from end to end at tiny size, and what it says of maps whose neighbours are alike."""

from __future__ import annotations

import argparse
import csv
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from repository_scripts import ROOT, load_script
from torch import nn

from lowtide.app.shared.specs import UsageError
from lowtide.bounds import BoundRule


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))  # where it finds prediction.py
    yield load_script("benchmarks/predicted.py")
    sys.path.remove(str(ROOT / "benchmarks"))


def options(bench: ModuleType, *arguments: str, out: Any = "-") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*arguments, "--tiny", "--device", "cpu", "--out", str(out)])


def test_a_net_in_training_from_end_to_end(bench, tmp_path):
    out = tmp_path / "predicted.csv"
    rows = bench.run(options(bench, "--batch", "32", "--steps", "2", "--bounds", "0.4", out=out))
    assert {row["family"] for row in rows} == {"linear", "norm"} and {row["step"] for row in rows} == {2}
    assert all(row["payload_row"] == row["payload"] and not row["predicted"] for row in rows), "the maps are tiny"
    with out.open(newline="") as file:
        assert tuple(next(csv.reader(file))) == bench.COLUMNS
    assert len(bench.show(rows)) == 2 + 3


def test_smooth_maps_take_less_as_was_expected(bench):
    coarse = torch.randn(8, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    x = nn.functional.interpolate(coarse, size=64, mode="bicubic")
    read = bench.Read("here", x, *sys.modules["prediction"].find_need(nn.BatchNorm2d(4)))
    rules = [BoundRule.parse("0.2 std")]
    (found,) = sys.modules["prediction"].look_at(read, ["contiguous"], ["dither"], rules, 8, bench.measure)
    assert found["predicted"] == 1 and found["payload_row"] < 0.75 * found["payload"]
    assert found["payload"] == pytest.approx(found["coded_plain"], rel=0.03)
    assert found["coded_row"] < found["payload_row"] < 1.15 * found["coded_row"], (
        "an alphabet spans all codes, not differences"
    )
    (line,) = {line for line in bench.show([{**found, "step": 1}])[2:] if "norm" in line}
    assert line.endswith("1 of 1") and f"{found['payload_row']:.3f}" in line


@pytest.mark.parametrize("steps", ["", "0,3", "3.5"])
def test_steps_are_whole_numbers(bench, steps):
    with pytest.raises(UsageError, match="--steps are numbers of 1 or more, as 300,900; got"):
        bench.run(options(bench, "--steps", steps))
