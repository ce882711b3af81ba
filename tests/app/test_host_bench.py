"""benchmarks/host.py: what it counts, and that it leaves no trace."""

from __future__ import annotations

import argparse
import csv
from types import ModuleType

import pytest
import torch
from repository_scripts import load_script

from lowtide import kernels
from lowtide.app.shared.specs import UsageError
from lowtide.kernels import _sz_cuda


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/host.py")


def options(bench: ModuleType, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*given])


def test_a_row_for_each_model(bench, tmp_path):
    out, threads, before = tmp_path / "host.csv", torch.get_num_threads(), (kernels.twin, _sz_cuda._function)
    rows = bench.run(options(bench, "gpt,resnet50", "--repeats", "3", "--out", str(out)))
    torch.set_num_threads(threads)
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == bench.COLUMNS and [row["model"] for row in written] == ["gpt", "resnet50"]
    assert written[1]["saves"] == "106", "the inputs of 53 convolutions, less the first, and of as many norms, and fc's"
    for row in rows:
        ours, plain = row["forward_ms"] + row["backward_ms"], row["plain_forward_ms"] + row["plain_backward_ms"]
        a_save = row["us_a_save_forward"] + row["us_a_save_backward"]
        assert a_save == pytest.approx(1e3 * (ours - plain) / row["saves"])
    assert (kernels.twin, _sz_cuda._function) == before, "what stood in for the device is gone"
    assert len(bench.show(rows)) == 4


def test_an_encoder_reports_where_kernels_do(bench):
    """The place of the report in what kernels are given, by the struct that they are given it in."""
    fields = list(range(24))
    packed = _sz_cuda._FIRST.pack(*fields)
    assert packed[bench._TICKET : bench._TICKET + 8] == (10).to_bytes(8, "little")


def test_models_that_are_not_known_are_named(bench):
    with pytest.raises(UsageError, match=r"vgg: not a model .* known: resnet50, vit_b_16, gpt"):
        bench.run(options(bench, "gpt,vgg", "--out", "-"))
