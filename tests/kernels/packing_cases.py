"""Views for the kernel that packs them: what it must copy, what it must leave to torch, and what equal means."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    x: Tensor
    is_reached: bool = True  # by the kernel

    def __str__(self) -> str:
        return f"{self.name}: {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()} from {self.x.storage_offset()}"


class Source:
    """Tensors of random bytes, NaN of every kind among them; the same ones every time."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._random = torch.Generator().manual_seed(dtype.itemsize)
        self.unit = 16 // dtype.itemsize  # values in 16 bytes

    def of(self, *shape: int) -> Tensor:
        count = torch.Size(shape).numel() * self._dtype.itemsize
        values = torch.randint(0, 2 if self._dtype == torch.bool else 256, (count,), generator=self._random)
        return values.to(torch.uint8).to(self._device).view(self._dtype).view(shape)


def make_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    source = Source(dtype, device)
    yield from _attention(source)
    yield from _rows(source)
    yield from _blocks(source)
    yield from _beyond(source)


def _attention(source: Source) -> Iterator[Case]:
    """Parts of one projection, as models cut them."""
    u = source.unit
    for samples, tokens, heads in ((2, 5, 3), (3, 70, 2), (1, 16, 12)):
        projected = source.of(samples, tokens, 3 * heads * 2 * u)
        for name, part in zip("qkv", projected.chunk(3, -1), strict=True):
            x = part.unflatten(-1, (heads, 2 * u)).transpose(1, 2)
            yield Case(f"{name} of {samples} samples", x)
            yield Case(f"{name} of {samples} samples, transposed", x.transpose(-2, -1))
        for part in projected.view(samples, tokens, 3, heads, 2 * u).permute(2, 0, 3, 1, 4).unbind():
            yield Case("unbound", part)
    yield Case("tokens first", source.of(7, 2, 9 * u)[..., 3 * u : 6 * u].unflatten(-1, (3, u)).transpose(0, 1))


def _rows(source: Source) -> Iterator[Case]:
    """One distance between rows."""
    u = source.unit
    wide = source.of(131, 24 * u)
    for first, last in ((0, 1), (5, 6), (0, 23), (1, 24), (3, 20), (8, 16)):
        yield Case(f"units {first} to {last} of rows", wide[:, first * u : last * u])
    yield Case("two rows", wide[::130, : 3 * u])
    yield Case("every other row", wide[::2])
    yield Case("few units of long rows", source.of(3, 3000 * u)[:, : 2100 * u])
    yield Case("exactly one tile", source.of(64, 17 * u)[:, : 16 * u])
    yield Case("channels of channels_last", source.of(2, 3, 5, 9 * u).permute(0, 3, 1, 2)[:, 2 * u : 6 * u])
    yield Case("a later start", source.of(100 * u)[4 * u : 94 * u].view(9, 10 * u)[:, : 7 * u])
    yield Case("axes of one value", source.of(6, 1, 4, 1, 5 * u)[..., : 3 * u].transpose(0, 3))
    yield Case("equal rows", source.of(1, 6 * u).expand(40, 6 * u))
    yield Case("rows that overlap", source.of(60 * u).unfold(0, 5 * u, 2 * u))


def _blocks(source: Source) -> Iterator[Case]:
    """Two distances: between rows, and between blocks of them."""
    u = source.unit
    whole = source.of(5, 11, 6 * u)
    yield Case("blocks of rows", whole[:, 2:9, u : 4 * u])
    yield Case("blocks of rows of one unit", whole[:, :10, 5 * u :])
    yield Case("blocks in another order", whole.transpose(0, 1)[:9, :, : 2 * u])
    yield Case("some tokens of q", source.of(3, 9, 3, 4, 2 * u)[:, 1:6, 0].transpose(1, 2))
    yield Case("some heads of v", source.of(3, 9, 3, 4, 2 * u)[:, :, 2, 1:3].transpose(1, 2))
    yield Case("equal blocks", source.of(1, 7, 6 * u)[..., : 4 * u].expand(5, 7, 4 * u))
    yield Case("rows that are used twice", source.of(5, 1, 6 * u)[..., : 4 * u].expand(5, 3, 4 * u))


def _beyond(source: Source) -> Iterator[Case]:
    """What is left to torch: parts of units (where a value is no unit), other steps, three distances, nothing to do."""
    u = source.unit
    is_whole = u == 1
    yield Case("rows of part of a unit", source.of(9, 8 * u)[:, : 3 * u + u // 2], is_whole)
    yield Case("distances of part of a unit", source.of(9, 8 * u + u // 2)[:, : 2 * u], is_whole)
    yield Case(
        "blocks a part of a unit apart",
        source.of(4, 30 * u + u // 2)[:, : 28 * u].unflatten(1, (4, 7 * u))[..., :u],
        is_whole,
    )
    yield Case("a start in a unit", source.of(9, 8 * u)[:, u // 2 : u // 2 + 2 * u], is_whole)
    yield Case("every other value", source.of(9, 16 * u)[:, ::2], is_whole)
    yield Case("equal values", source.of(9, 1).expand(9, 4 * u), is_whole)
    yield Case("three distances", source.of(3, 4, 5, 6 * u)[:, :3, :4, : 5 * u], False)
    yield Case("dense", source.of(9, 8 * u), False)
    yield Case("dense, another order", source.of(9, 8 * u).t(), False)
    yield Case("one row", source.of(9, 8 * u)[4:5, : 3 * u], False)
    yield Case("one value", source.of(1).view(()), False)
    yield Case("no value", source.of(4, 8 * u)[:0, : 3 * u], False)
    yield Case("rows of no value", source.of(4, 8 * u)[:, :0], False)


def check(case: Case, found: Tensor) -> None:
    """The same bits, shape and strides as a clone has, in memory of its own."""
    expected = case.x.clone()
    assert (found.dtype, found.device) == (expected.dtype, expected.device), case
    assert (found.shape, found.stride()) == (expected.shape, expected.stride()), case
    assert torch.equal(_bytes(found), _bytes(expected)), f"{case}: other bits"
    assert not found.numel() or found.untyped_storage().data_ptr() != case.x.untyped_storage().data_ptr(), case


def _bytes(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)
