"""Codes of a sample: those of the quantiser, up to dither, in few launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.coding import layout, rans, rans_fit
from lowtide.coding.grid import Grid
from lowtide.coding.survey import PIECES, survey
from lowtide.records import Bound, TensorSpec

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def grid_of(x: Tensor, axes: tuple[int, ...], share: float, rounding: str) -> Grid:
    over = [axis for axis in range(x.dim()) if axis not in axes]
    value = torch.nan_to_num(x.double(), 0, 0, 0).std(over) * share
    mean = torch.nan_to_num(x.float(), 0, 0, 0).mean(over) if axes == (1,) else None
    return Grid.of(Bound(value, axes), x.dtype, CPU, rounding, mean)


def sampled(x: Tensor) -> Tensor:
    """The places in memory order that a survey looks at."""
    pieces = min(PIECES, x.numel() // rans_fit.PIECE)
    if pieces < 4:
        return torch.arange(4 * rans_fit.PIECE) % x.numel()
    start = torch.arange(pieces) * (x.numel() // pieces // rans.ROW * rans.ROW)
    return (start.unsqueeze(1) + torch.arange(rans_fit.PIECE)).flatten() % x.numel()


def make(shape: tuple[int, ...], dtype: torch.dtype, *, last: bool = False) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) * 3 + 1
    x.view(-1)[::7] = 0
    x.view(-1)[3], x.view(-1)[100], x.view(-1)[160] = math.nan, math.inf, -6e4
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (4, 6, 5, 7), (8, 6, 20, 21), (16, 24, 28, 28)], ids=str)
@pytest.mark.parametrize(("axes", "last"), [((), False), ((1,), False), ((1,), True), ((0, 1), False), ((0,), True)])
def test_codes_are_those_of_the_quantiser(
    shape: tuple[int, ...], axes: tuple[int, ...], last: bool, dtype: torch.dtype
) -> None:
    """Without dither one for one, but for values at the edge of two codes; what has no code counts as code 0."""
    x = make(shape, dtype, last=last)
    spec, flat = TensorSpec.of(x), layout.memory_view(x)
    grid, index = grid_of(x, axes, 0.1, "nearest"), sampled(x)
    q, lost = grid.quantise(flat[index], index, spec, 0)
    wanted = torch.where(flat[index] == 0, rans.ZERO_CODE, q * ~lost)
    found = survey(flat, spec, grid)
    assert found.dtype == torch.int16 and found.shape == wanted.shape
    assert int((found != wanted).sum()) <= 1e-3 * found.numel()
    assert int(lost.sum()) > 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dither_has_the_shares_of_the_quantiser(dtype: torch.dtype) -> None:
    """294912 values: the share of each code within five standard deviations of a count, and their mean within five."""
    x = torch.randn(PIECES * rans_fit.PIECE, generator=torch.Generator().manual_seed(2)).to(dtype)
    grid, spec = grid_of(x, (), 0.4, "dither"), TensorSpec.of(x)
    found = survey(x, spec, grid)
    codes = grid.quantise(x, range(x.numel()), spec, 5)[0]
    for code in range(-4, 5):
        counts = [int((part == code).sum()) for part in (found, codes)]
        assert abs(counts[0] - counts[1]) <= 5 * math.sqrt(sum(counts) + 1)
    present = found != rans.ZERO_CODE
    assert abs(float(found[present].double().mean() - codes[present].double().mean())) <= 5 * 0.5 / math.sqrt(x.numel())


def test_what_is_empty_has_no_codes() -> None:
    x = torch.empty(0, 3)
    assert survey(layout.memory_view(x), TensorSpec.of(x), Grid.uniform(0.1, x.dtype, CPU, "dither")).numel() == 0


class _Calls(TorchDispatchMode):
    """Counts what a device would be told to do, or an interpreter would let go of its lock for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@contextmanager
def at_most(calls: int) -> Iterator[None]:
    with _Calls() as counted:
        yield
    assert counted.count <= calls


def test_a_step_is_not_held_up_by_many_calls() -> None:
    """On a GPU each is a launch in the middle of a step; in the thread that fits, each is a change of threads."""
    x = make((16, 24, 28, 28), torch.bfloat16)
    spec, flat, grid = TensorSpec.of(x), layout.memory_view(x), grid_of(x, (1,), 0.4, "dither")
    sample = survey(flat, spec, grid)
    with at_most(32):
        survey(flat, spec, grid)
    with at_most(24):
        grid_of(x, (), 0.4, "dither")
    with at_most(60):
        model = rans_fit.fit(sample, x.numel(), zero_code=True)
    with at_most(16):
        rans_fit.fit(sample, x.numel(), model, zero_code=True)
