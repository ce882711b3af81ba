"""What the twin of ``groups`` is tried on, in Triton's interpreter and on a device, and what must be equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from same_payload import assert_same_payload, assert_same_values, bits, copy_to
from torch import Tensor

from lowtide import codecs, kernels
from lowtide.coding import dither
from lowtide.records import Encoded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
BITS = (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class Case:
    """One tensor and how it is coded; ``keys`` replace those of the seed."""

    name: str
    x: Tensor
    bits: int = 2
    group: int = 256
    rounding: str = "stochastic"
    seed: int = 77
    keys: tuple[int, int] | None = None

    def __str__(self) -> str:
        how = f"{self.bits} bits, groups of {self.group}, {self.rounding}"
        return f"{self.name}: {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()}, {how}"


def make_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All cases of a dtype, on the CPU; the same every time."""
    random = torch.Generator().manual_seed(dtype.itemsize)
    x = mixture(dtype, random)
    for width in BITS:
        yield Case("a group of each kind", x, width)
    yield Case("a group of each kind", x, 2 * dtype.itemsize, rounding="nearest")
    for length, width in ((0, 2), (1, 1), (31, 8), (129, 4), (255, 1), (200, 8), (1000, 2)):
        yield Case(f"length {length}", x[:length], width)
    for group, width in ((32, 1), (32, 8), (64, 2), (512, 4), (1024, 8)):
        yield Case("other groups", x[: group + 77], width, group)
    yield Case("groups that are left to the codec", x[:2000], 4, 96)
    yield Case("odd offset into the storage", x[1:2500])
    picture = torch.randn(2, 17, 7, 9, generator=random).relu().to(dtype)
    yield Case("channels_last", picture.to(memory_format=torch.channels_last), 4)
    if dtype == torch.float32:
        for keys in ((0, 0), (0, 1), (1, 0), (1, 1)):  # numbers that Triton would make constants of
            yield Case(f"keys {keys}", x[:600], keys=keys)


def mixture(dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Groups of 256 of every kind; the last one is short and of odd length."""
    info = torch.finfo(dtype)
    unit = info.smallest_normal * info.eps

    def part() -> Tensor:
        return torch.randn(256, generator=random, dtype=torch.float64)

    def with_one(value: float, at: int) -> Tensor:
        x = part()
        x[at] = value
        return x

    zeros = torch.zeros(256, dtype=torch.float64)
    signed = zeros.clone()
    signed[::3] *= -1
    grid = torch.randint(0, 256, (256,), generator=random).double()
    grid[:2] = torch.tensor([0.0, 255.0])
    kinds = [
        part(), part().relu(), zeros, signed, torch.full_like(zeros, 0.1), with_one(torch.nan, 7),
        with_one(torch.inf, 100), with_one(-torch.inf, 255), torch.full_like(zeros, torch.inf), part() + 1000,
        part() * 400 * unit, part() * 3 * info.smallest_normal, part().abs() * info.max / 8, part().sign() * info.max,
        (1 - part().abs() / 512) * info.max, with_one(info.max / 3, 0), with_one(-unit, 9), grid, grid - 128,
        part().relu() + signed, part()[:77],
    ]  # fmt: skip
    return torch.cat(kinds).to(dtype)


def check(case: Case, device: torch.device, *, against_cpu: bool = False) -> Encoded:
    """The twin writes what the codec writes, each reads what the other wrote; gives the payload."""
    given = nullcontext() if case.keys is None else patch.object(dither, "keys", lambda seed: case.keys)
    with given:
        return _check(case, device, against_cpu)


def _check(case: Case, device: torch.device, against_cpu: bool) -> Encoded:
    x = copy_to(case.x, device)
    codec = codecs.create("groups", bits=case.bits, group=case.group, rounding=case.rounding)
    twin: Any = kernels.twin(codec, device, x.dtype)
    assert twin is not codec, f"{case}: there is no twin at work"
    before = bits(x)
    expected = codec.encode(x, seed=case.seed)
    got = twin.encode(x, seed=case.seed)
    assert torch.equal(bits(x), before), f"{case}: encode changed its input"
    assert_same_payload(got, expected, str(case))
    if against_cpu:
        there = codec.encode(copy_to(case.x, torch.device("cpu")), seed=case.seed)
        assert_same_payload(got, there, f"{case}, on the CPU")
    plain = codec.decode(expected)
    for reader, payload in ((twin, expected), (twin, got), (codec, got)):
        what = f"{case}, decode of {type(reader).__name__}"
        assert_same_values(reader.decode(payload), plain, what, any_nan=True)
    return got
