"""Cases on which the twins of ``division`` have to give the bytes and values of the codec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from same_payload import assert_same_payload, assert_same_values, copy_to
from torch import Tensor

from lowtide import kernels
from lowtide.codecs.division import Division
from lowtide.records import Encoded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BITS = (1, 2, 4, 8)
# Maps that are, and are not, multiples of a block; rows shorter and longer than one, and than a program's columns.
MAPS = [(2, 3, 8, 8), (2, 3, 14, 14), (2, 35, 7, 7), (1, 2, 9, 40), (1, 3, 2, 3)]
ROWS = [(5, 64), (3, 200), (1, 2500), (7, 3), (130, 2)]


@dataclass(frozen=True)
class Case:
    name: str
    x: Tensor
    codec: Division = Division()  # noqa: RUF009
    seed: int = 7

    def __str__(self) -> str:
        shape = "x".join(map(str, self.x.shape))
        return f"{self.name}: {self.codec.bits} bits, {self.codec.rounding}, {shape} {self.x.dtype}, {self.x.stride()}"


def make_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All of them for float32; for the others what has to do with the dtype."""
    torch.manual_seed(3)
    few = dtype != torch.float32
    for shape in (MAPS[1], ROWS[1]) if few else (*MAPS, *ROWS):
        yield Case("shape", (torch.randn(shape) + 0.5).to(dtype))
    for shape in MAPS[1:2] if few else MAPS:
        x = torch.randn(shape).relu().to(dtype)
        yield Case("channels_last", x.contiguous(memory_format=torch.channels_last), seed=1 << 63)
    maps, rows = torch.randn(2, 3, 9, 13).to(dtype), torch.randn(9, 150).to(dtype)
    for bits in (8,) if few else BITS:
        yield Case("bits", maps, Division(bits))
        yield Case("bits", rows, Division(bits, rounding="nearest"))
    for block in () if few else (2, 4, 16):
        yield Case("block", maps, Division(block=block))
    specials = maps.clone()
    specials[0, 0, 0, 0], specials[0, 2, 8, 12], specials[1, 0] = math.nan, math.inf, 0.0
    specials[1, 1, 4, 4], specials[1, 2] = -0.0, torch.finfo(dtype).max
    yield Case("specials", specials)
    yield Case("specials, channels_last", specials.contiguous(memory_format=torch.channels_last))
    yield Case("tiny values", (torch.randn(2, 3, 10, 10) * 1e-7).to(dtype))
    if few:
        return
    yield Case("constant", torch.full((3, 2, 9, 9), 1.25, dtype=dtype))
    storage = torch.randn(1 + 2 * 3 * 8 * 9).to(dtype)
    yield Case("odd offset", storage[1:].view(2, 3, 8, 9))
    yield Case("five axes", torch.randn(2, 3, 2, 9, 10).to(dtype))
    yield Case("permuted", torch.randn(4, 3, 9, 8).to(dtype).permute(3, 1, 0, 2))  # copied first
    # Left to the codec.
    yield Case("empty", torch.zeros(2, 0, 8, 8, dtype=dtype))
    yield Case("faithful", maps, Division(faithful=True))


def make_tile_cases(dtype: torch.dtype) -> Iterator[Case]:
    """What the twin in CUDA C++ does by the size of planes: how many a block has, how they are loaded and stored."""
    random = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=random) * 3 + 0.5).to(dtype)

    storage = draw(1 + 3 * 5 * 28 * 28)
    storage[800] = torch.finfo(dtype).max / 2  # too much for float32, though nothing becomes infinite
    yield Case("odd offset, four columns at a time", storage[1:].view(3, 5, 28, 28))
    lost = draw(1, 90, 7, 7)
    lost[0, 3, 6, 6], lost[0, 81, 0, 3], lost[0, 82], lost[0, 7, 1, 1] = math.nan, math.inf, -0.0, -math.inf
    lost[0, 9, 2, 3] = torch.finfo(dtype).max / 2
    yield Case("planes of a tile that have no scale", lost)
    if dtype != torch.float32:
        return
    yield Case("tile of one plane", draw(2, 2, 56, 56))
    yield Case("tile of eighty planes, and a part of one", draw(3, 55, 7, 7))
    yield Case("tile of five planes, and a part of one", draw(2, 7, 28, 28))
    yield Case("tile of twenty planes, and a part of one", draw(1, 43, 14, 14), seed=9)
    yield Case("four times a tile's values", draw(1, 1, 112, 112))
    yield Case("odd rows", draw(1, 5, 57, 55))
    yield Case("small odd maps", draw(3, 3, 3, 5))
    yield Case("pairs of columns, four places", draw(2, 3, 8, 14))
    yield Case("single values", draw(4, 3, 1, 1))
    yield Case("a single value", draw(1))
    yield Case("sequences", draw(3, 4, 1000))
    yield Case("large blocks of a row", draw(6, 700), Division(block=16))
    yield Case("zeros of both signs", torch.tensor([0.0, -0.0] * 392).view(1, 1, 28, 28))
    alone = draw(1, 2, 57, 57)
    alone[0, 0, 56, 56] = math.nan  # a block of one value, which is its own mean
    yield Case("a block of one NaN", alone)


def check(case: Case, device: torch.device, *, against_cpu: bool = False, kind: Any = None) -> Encoded:
    """Twin against codec on ``device``, both ways; with ``against_cpu`` also against the codec there.

    ``kind`` is the class of the twin, where it shall not be the one that is chosen for the device.
    """
    x = copy_to(case.x, device)
    twin: Any = kernels.twin(case.codec, device, x.dtype) if kind is None else kind(case.codec)
    assert case.codec.faithful or twin is not case.codec, f"{case}: no twin"
    got, expected = twin.encode(x, seed=case.seed), case.codec.encode(x, seed=case.seed)
    assert_same_payload(got, expected, str(case))
    plain = case.codec.decode(expected)
    assert_same_values(twin.decode(expected), plain, str(case), any_nan=True)
    if against_cpu:
        assert_same_payload(got, case.codec.encode(case.x, seed=case.seed), f"{case}, CPU")
    return got
