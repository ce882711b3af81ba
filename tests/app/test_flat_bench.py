"""benchmarks/flat.py at tiny size: what its figures mean."""

from __future__ import annotations

import argparse
import csv
from types import ModuleType

import pytest
from repository_scripts import load_script

from lowtide.app.shared.specs import UsageError


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/flat.py")


def options(bench: ModuleType, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args(["resnet18", "--tiny", "--device", "cpu", "--batch", "4", "--precision", "fp32", *given])


def test_every_look_has_a_row(bench, tmp_path):
    out = tmp_path / "flat.csv"
    given = ("--steps", "8", "--warm", "2", "--every", "2", "--methods", "fixed", "--out", str(out))
    rows = bench.run(options(bench, *given))
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert [row["reserved_growth"] is None for row in rows] == [True, True, False, False]
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == bench.COLUMNS and len(written) == 4
    assert len(bench.show(rows)) == 3


def test_growth_is_that_of_the_second_half(bench):
    looks = [{"step": step, "allocated": step, "reserved": 100} for step in (2, 4, 6, 8, 10)]
    given = options(bench, "--steps", "10", "--warm", "2")
    assert bench.growth(looks[:3], given) == {"allocated_growth": None, "reserved_growth": None}
    assert bench.growth(looks, given) == {"allocated_growth": pytest.approx(10 / 6 - 1), "reserved_growth": 0}


def test_too_few_looks_are_refused(bench):
    with pytest.raises(UsageError, match="two looks at least"):
        bench.run(options(bench, "--steps", "10", "--warm", "5", "--every", "5", "--out", "-"))
