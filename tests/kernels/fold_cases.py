"""Batch norms with ReLU for the kernels that fold and unfold: layouts, channels, bounds; and what equal means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from same_payload import bits
from torch import Tensor

from lowtide.coding import fold as plain
from lowtide.coding.fold import Norm
from lowtide.kernels import _fold
from lowtide.records import Bound

LAST = torch.channels_last
SHAPES: list[tuple[tuple[int, ...], torch.memory_format]] = [
    ((4, 6, 5, 8), torch.contiguous_format),  # runs of a multiple of four
    ((3, 6, 5, 5), torch.contiguous_format),  # of 25
    ((3, 8, 5, 7), LAST),  # innermost, a multiple of four
    ((3, 6, 5, 7), LAST),
    ((37, 12), torch.contiguous_format),
    ((9, 5, 11), torch.contiguous_format),
    ((5, 1, 3, 3), torch.contiguous_format),
    ((2, 3, 2, 4, 5), torch.channels_last_3d),
    ((1, 2, 1, 1), torch.contiguous_format),
    ((6, 260, 3, 8), LAST),  # more than one block, and more channels than its threads
    ((7, 3, 24, 25), torch.contiguous_format),
]


@dataclass(frozen=True)
class Case:
    name: str
    x: Tensor
    y: Tensor
    norm: Norm
    source: Bound
    made: Bound | None

    def table(self) -> Tensor:
        return plain.table(self.norm, self.source, self.made, self.x.dtype)


def make_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Norm, Tensor]:
    """What torch's batch norm computes, and what ReLU makes of it."""
    work = plain.working(x.dtype)
    made, mean, inverse_std = torch.native_batch_norm(x, weight.to(work), bias.to(work), None, None, True, 0.1, 1e-5)
    return Norm(mean, inverse_std, weight.to(work), bias.to(work)), F.relu(made)


def make_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """Channels with scales of either sign, some always on, some never, one without a scale."""
    source = torch.Generator().manual_seed(dtype.itemsize)
    for shape, order in SHAPES:
        channels = shape[1]
        x = (3 * torch.randn(shape, generator=source) + 5 * torch.randn(1, channels, *[1] * (len(shape) - 2))).to(dtype)
        x = x.contiguous(memory_format=order).to(device)
        weight, bias = torch.randn(2, channels, generator=source)
        bias[::4] *= 30
        weight[channels // 2] = 0
        norm, y = make_norm(x, weight.to(device), bias.to(device))
        spread = 1 / norm.inverse_std.double()
        for ratio, made in ((0.5, 0.2), (1.5, None), (0.02, 1e-3)):
            bound = None if made is None else Bound(torch.tensor(made, dtype=torch.float64, device=device))
            yield Case(f"{tuple(shape)} {order}, {ratio} std, {made}", x, y, norm, Bound(ratio * spread, (1,)), bound)
        one = Bound(torch.tensor(0.7, dtype=torch.float64, device=device))
        yield Case(f"{tuple(shape)} {order}, one bound for all", x, y, norm, one, one)


def check(case: Case) -> None:
    """Every function gives what its plain twin gives, bit for bit and laid out alike."""
    dtype = case.x.dtype
    table = _fold.table(case.norm, case.source, case.made, dtype)
    _equal(table, case.table(), f"{case.name}: table")
    t = _fold.fold(case.x, case.y, table)
    _equal(t, plain.fold(case.x, case.y, table), f"{case.name}: folded")
    errors = 0.9 * torch.rand(t.shape, generator=torch.Generator().manual_seed(1)).to(t)
    stored = (t + errors * t.sign()).nan_to_num(3.5)
    _equal(_fold.source(stored, table, dtype), plain.source(stored, table, dtype), f"{case.name}: the norm's input")
    _equal(_fold.made(stored, table, dtype), plain.made(stored, table, dtype), f"{case.name}: what ReLU made")
    gradient, made = torch.empty_like(case.x).copy_(errors - 0.3), torch.empty_like(case.x).copy_(case.y)
    _equal(_fold.gate(stored, gradient, table), plain.gate(stored, gradient), f"{case.name}: what passes ReLU")
    _equal(plain.gate(t, gradient), torch.where(made > 0, gradient, 0), f"{case.name}: ReLU's own branches")


def _equal(got: Tensor, expected: Tensor, what: str) -> None:
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), what
    assert torch.equal(bits(got), bits(expected)), what
