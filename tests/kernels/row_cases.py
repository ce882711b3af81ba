"""Rows of every length and of every kind of values, for the kernel that measures them: what it must give, and how near
to float64 its standard deviations are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from same_payload import bits
from torch import Tensor

from lowtide.bounds import BoundRule
from lowtide.coding.grid import Grid
from lowtide.records import Bound, Kind, Need, Per

ROW, ROW_OF_TWO = Need(Kind.VALUES, "", per=Per.ROW), Need(Kind.VALUES, "", per=Per.ROW, row_dims=2)
SAMPLE_CHANNEL = Need(Kind.VALUES, "", per=Per.SAMPLE_CHANNEL)
STD = BoundRule.parse("0.4 std")
Measure = Callable[[Tensor, BoundRule, Need], tuple[Bound, Grid] | None]


@dataclass(frozen=True)
class Rows:
    name: str
    x: Tensor
    need: Need = ROW
    rule: BoundRule = STD


def make_rows(dtype: torch.dtype) -> Iterator[Rows]:
    """Lengths around what a lane, a warp and a block take at once; means far from zero; all that has no bound."""
    for length in (1, 2, 7, 8, 64, 100, 255, 256, 257, 768, 1001, 8192, 8200, 9001):
        yield Rows(f"{length} values", torch.randn(13, length).to(dtype))
    yield Rows("far from zero", (torch.randn(40, 768) + torch.arange(40.0).unsqueeze(1) * 4).to(dtype))
    yield Rows("an outlier first", torch.cat([torch.full((5, 1), 1000.0), torch.randn(5, 767)], 1).to(dtype))
    yield Rows("three axes", torch.randn(3, 5, 96).to(dtype))
    yield Rows("rows of two axes", torch.randn(3, 5, 12, 10).to(dtype), ROW_OF_TWO)
    yield Rows("samples and channels", torch.randn(3, 5, 12, 10).to(dtype), SAMPLE_CHANNEL)
    yield Rows("an odd start", torch.randn(20 * 64 + 1).to(dtype)[1:].view(20, 64))
    yield Rows("an absolute bound", torch.randn(9, 50).to(dtype), rule=BoundRule(0.37))
    yield Rows("a bound beyond every step", torch.randn(9, 50).to(dtype), rule=BoundRule(1e300))
    yield Rows("a bound that is not finite", torch.randn(9, 50).to(dtype), rule=BoundRule(1.5e308, "std"))
    yield Rows("a bound below every step", torch.randn(9, 50).to(dtype), rule=BoundRule(1e-40, "std"))
    special = torch.randn(12, 768)
    special[1, 5], special[2, 0], special[3, -1] = torch.nan, torch.inf, -torch.inf
    special[4], special[5], special[6] = 0.1, 0, torch.finfo(dtype).max
    special[7], special[8, ::2], special[9, 1:] = 1e-30, 0, 0
    yield Rows("special", special.to(dtype))


def check_rows(rows: Rows, measure: Measure, rounding: str, device: torch.device) -> None:
    """Deviations within roundings of float32 of those in float64, then as torch has them; all else bit for bit."""
    x = rows.x.to(device) if device.type != "cpu" else rows.x
    found = measure(x, rows.rule, rows.need)
    assert found is not None, f"{rows.name}: not reached"
    bound, grid = found
    plain = rows.rule.resolve(x, rows.need)
    what = f"{rows.name}, {x.dtype}, {rounding}"
    assert bound.axes == grid.axes == plain.axes and bound.value.shape == plain.value.shape, what
    assert (bound.value.dtype, bound.value.device) == (plain.value.dtype, plain.value.device), what
    _check_deviations(bound.value, x, rows, what)
    expected = Grid.of(bound, x.dtype, x.device, rounding)
    assert grid.rounding == rounding and grid.centre is None
    for name in ("step", "inverse", "promised"):
        got, wanted = getattr(grid, name), getattr(expected, name)
        assert got.dtype == wanted.dtype and torch.equal(bits(got), bits(wanted)), f"{what}: {name}"


def _check_deviations(value: Tensor, x: Tensor, rows: Rows, what: str) -> None:
    """Exactly zero where torch's is, or is not finite: such rows are stored as they are."""
    plain = rows.rule.resolve(x, rows.need).value
    assert torch.equal(value == 0, plain == 0), what
    if rows.rule.unit == "absolute":
        assert torch.equal(value, plain), what
        return
    exact = x.double().flatten(value.dim()).std(-1, correction=0) * rows.rule.value
    exact = torch.where(plain == 0, 0, exact)
    eps = torch.finfo(x.dtype).eps if x.dtype.itemsize == 2 else 0.0
    allowed = exact * (eps / 2 + 2.0**-18)  # means of up to 160 deviations are rounded to float32
    assert bool(((value - exact).abs() <= allowed).all()), f"{what}: off by {float((value - exact).abs().max())}"
