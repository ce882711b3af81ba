"""The kernel that measures rows, under the emulator against torch and float64; what it leaves to others; its code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import requires_nvrtc, usage
from row_cases import ROW, SAMPLE_CHANNEL, STD, Rows, check_rows, make_rows
from same_payload import bits
from simt import Emulated, EmulatedFunction, requires_compiler
from torch import Tensor

from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Sz
from lowtide.coding.grid import Grid
from lowtide.kernels import _nvrtc, _rows
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound, Kind, Need, Per, Site
from lowtide.sites import Sites

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


def emulated(dtype: str, lanes: int, device: int) -> EmulatedFunction:
    return Emulated(_rows.PROGRAM).function(_rows.expression(dtype, lanes))


@pytest.fixture(autouse=True)
def _on_the_cpu(emulate: Callable[..., Any]) -> None:
    emulate(_rows, emulated)


@requires_compiler
@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_measured_as_torch_does(dtype: str, rounding: str) -> None:
    twin = SzCuda(Sz(rounding=rounding))
    for rows in make_rows(DTYPES[dtype]):
        before = bits(rows.x)
        check_rows(rows, twin.measure, rounding, CPU)
        assert torch.equal(bits(rows.x), before), f"{rows.name}: its input was changed"


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("lanes", [8, 32, 256])
def test_rows_of_every_length_with_every_number_of_lanes(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that would get another number: loads past the end of a row would meet the next row's values."""
    monkeypatch.setattr(_rows, "_lanes", lambda length: lanes)
    twin = SzCuda(Sz())
    for length in (1, 3, 4, 8, 31, 33, 256, 300, 2048, 2049, 4100):
        x = torch.randn(5, length) * torch.tensor([1.0, 1e4, 1.0, 1e-4, 1.0]).unsqueeze(1)
        check_rows(Rows(f"{length} values, {lanes} lanes", x), twin.measure, "dither", CPU)


@requires_compiler
def test_equal_values_have_no_spread() -> None:
    """Exactly none: a little of it would code a constant row instead of storing it."""
    for length in (3, 100, 768, 9001):
        x = torch.randn(50, 1).expand(50, length).contiguous()
        bound, grid = SzCuda(Sz()).measure(x, STD, ROW) or pytest.fail("not reached")
        assert not bool(bound.value.any()) and not bool(grid.step.any())


class Other:
    """A source of bounds that is no rule."""

    def resolve(self, x: Tensor, need: Need) -> Bound:
        return STD.resolve(x, need)


def test_what_the_kernel_does_not_reach() -> None:
    measure = SzCuda(Sz()).measure
    x = torch.randn(4, 6, 8, 10)
    assert measure(x, STD, Need(Kind.VALUES, "")) is None, "one bound for all"
    assert measure(x, STD, Need(Kind.VALUES, "", per=Per.CHANNEL)) is None, "bounds of channels"
    assert measure(x, BoundRule(0.5, "range"), ROW) is None
    assert measure(x, Other(), ROW) is None
    assert measure(x.double(), STD, ROW) is None
    assert measure(x.to(memory_format=torch.channels_last), STD, SAMPLE_CHANNEL) is None
    assert measure(x.transpose(0, 1), STD, ROW) is None
    for shape in ((0, 5), (5, 0), (7,)):
        assert measure(torch.randn(shape), STD, ROW) is None, shape


@requires_compiler
def test_a_site_is_measured_by_the_kernel_at_every_save_but_the_first() -> None:
    """And what is coded by its plan keeps the bound that the site remembers."""
    calls: list[tuple[Bound, Grid] | None] = []

    class Counted(SzCuda):
        def measure(self, x: Tensor, source: Any, need: Need) -> tuple[Bound, Grid] | None:
            calls.append(SzCuda.measure(self, x, source, need))
            return calls[-1]

    sites, site, codec = Sites(refresh=8), Site("norm", "layer_norm", "input"), Counted(Sz(coder="blocks"))
    for number in range(4):
        x = torch.randn(6 + number, 96) * (1 + number)
        memo = sites.recall(x, STD, site, ROW)
        sites.prepare(memo, x, codec, site, ROW)
        assert len(calls) == number
        if number:
            found = calls[-1]
            assert found is not None and (memo.bound, memo.plan.grid) == found
        assert memo.bound.value.shape == (6 + number,) == memo.plan.grid.step.shape
        decoded = codec.codec.decode(codec.codec.encode(x, plan=memo.plan))
        assert bool(((decoded - x).abs() <= memo.bound.value.unsqueeze(1)).all())


@requires_compiler
def test_a_site_whose_codec_cannot_measure_resolves_its_rule() -> None:
    sites, site, codec = Sites(refresh=8), Site("norm", "layer_norm", "input"), SzCuda(Sz(coder="blocks"))
    rule = BoundRule(0.25, "range")
    for _ in range(2):
        x = torch.randn(6, 96)
        memo = sites.recall(x, rule, site, ROW)
        sites.prepare(memo, x, codec, site, ROW)
        assert torch.equal(memo.bound.value, rule.resolve(x, ROW).value)


@requires_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("lanes", [8, 32, 256])
def test_registers_suffice(arch: str, lanes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    cubin, _ = _nvrtc.compile(_rows.PROGRAM.source, _rows.expression("Bfloat", lanes), arch, "rows")
    used = usage(cubin, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 48, used
