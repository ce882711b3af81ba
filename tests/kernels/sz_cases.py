"""What the twins of ``sz`` are tried on, in Triton's interpreter and on a device, and what must be equal.

The interpreter costs per program, so there are few cases and each is rich: one tensor goes through every path of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from same_payload import assert_same_payload, assert_same_values, bits, copy_to
from torch import Tensor

from lowtide.codecs.sz import Sz
from lowtide.coding import blocks, dither
from lowtide.records import Bound, Encoded, TensorSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIONS = [(rounding, keep_zeros) for rounding in ("dither", "nearest") for keep_zeros in (False, True)]
EXACT_BOUND = 0.0625  # a power of two: many values of 16 bits lie on its grid, so errors equal to the bound are common
KEYS = [(0, 0), (0, 1), (1, 0), (1, 1)]
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, eq=False)
class Case:
    """One tensor, its bound, and how it is coded."""

    name: str
    x: Tensor
    bound: Bound
    rounding: str = "dither"
    keep_zeros: bool = True
    seed: int = 77
    coder: str = "blocks"

    def __str__(self) -> str:
        zeros = "zeros" if self.keep_zeros else "no zeros"
        return f"{self.name}: {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()}, {self.rounding}, {zeros}"

    @property
    def codec(self) -> Sz:
        return Sz(rounding=self.rounding, coder=self.coder, keep_zeros=self.keep_zeros)


def make_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All cases of a dtype, on the CPU; the same every time."""
    random = torch.Generator().manual_seed(dtype.itemsize)
    yield from _every_path(dtype, random)
    yield from _borders(dtype, random)
    yield from _extremes(dtype, random)
    if dtype == torch.float16:  # in all else it is like bfloat16
        return
    yield from _sizes(dtype, random)
    yield from _bounds_by_axes(dtype, random)
    yield from _keys(dtype, random)


def check(case: Case, device: torch.device, make: Callable[[Sz], Any], *, against_cpu: bool = False) -> Encoded:
    """The twin writes what the codec writes, and reads the same in it; gives the payload."""
    x = copy_to(case.x, device)
    codec, twin = case.codec, make(case.codec)
    before = bits(x)
    expected = codec.encode(x, case.bound, seed=case.seed)
    got = twin.encode(x, case.bound, seed=case.seed)
    assert torch.equal(bits(x), before), f"{case}: encode changed its input"
    assert_same_payload(got, expected, str(case))
    if against_cpu:
        there = codec.encode(copy_to(case.x, torch.device("cpu")), case.bound, seed=case.seed)
        assert_same_payload(got, there, f"{case}, on the CPU")
    reads = ("decode", "nonzero") if expected.meta.get("zero_code") else ("decode",)
    for read in reads:
        assert_same_values(getattr(twin, read)(got), getattr(codec, read)(expected), f"{case}, {read}")
    if expected.meta.get("zero_code"):
        gradient = torch.empty_like(x).copy_(torch.arange(x.numel(), device=device).view(x.shape) % 97 - 48.5)
        assert_same_values(twin.gate(got, gradient), codec.gate(expected, gradient), f"{case}, gate")
    assert_within_bound(x, codec.decode(expected), case)
    return got


def check_other_uses(twin: Any, device: torch.device) -> None:
    """Plans made beforehand, offsets of 64 bits, and what ``Sz`` itself offers."""
    x = mixture(torch.float32, torch.Generator().manual_seed(1)).to(device)
    codec, bound = twin.codec, Bound.absolute(EXACT_BOUND)
    plan = codec.plan(x, bound, True)
    assert twin.plan(x, bound, True) is not None and twin.name == "sz" and twin.accepts(x.dtype)
    expected = codec.encode(x, seed=3, plan=plan)
    got = twin.encode(x, seed=3, plan=plan, ticket=None, capacity=None)
    assert_same_payload(got, expected, "a plan made beforehand")
    wide = replace(got, tensors={**got.tensors, "offsets": got.tensors["offsets"].long()})
    assert_same_values(twin.decode(wide), codec.decode(expected), "offsets of 64 bits")
    assert torch.equal(twin.codes(x, seed=3, plan=plan), codec.codes(x, seed=3, plan=plan))
    sample = twin.survey(x, twin.grid(x, bound))
    fitted = [one.fit(plan.grid, sample.cpu(), x.numel()) for one in (twin, codec)]
    assert fitted[0].zero_code == fitted[1].zero_code


def assert_within_bound(x: Tensor, decoded: Tensor, case: Case) -> None:
    """In exact arithmetic (the difference of two values of 32 bits may round in float64, but not to below a bound)."""
    shape = [x.shape[axis] if axis in case.bound.axes else 1 for axis in range(x.dim())]
    bound = case.bound.value.to(x.device).nan_to_num(0.0).reshape(shape)
    same = (decoded == x) | (x.isnan() & decoded.isnan())
    error = torch.where(same, 0, (decoded.double() - x.double()).abs())
    assert bool((error <= bound).all()), f"{case}: error {float(error.max())!r}"


def seed_of(low: int, high: int) -> int:
    """The seed whose keys are these two: ``dither.mix64`` backwards."""
    state = high << 32 | low
    state = _unshift(state, 31)
    state = _unshift(state * pow(0x94D049BB133111EB, -1, 1 << 64) & _MASK64, 27)
    state = _unshift(state * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _MASK64, 30)
    seed = state - 0x9E3779B97F4A7C15 & _MASK64
    assert dither.keys(seed) == (low, high), "mix64 is not what it was: seed_of must follow"
    return seed


def _unshift(value: int, by: int) -> int:
    """The w for which w ^ w >> by is ``value``."""
    result, part = value, value >> by
    while part:
        result ^= part
        part >>= by
    return result


def _normals(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)


def mixture(dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """8921 values, a chunk of each kind; the last one is raw, short and of odd length."""
    part = partial(_normals, random, blocks.CHUNK)
    halves, escapes, huge, specials = part(), part(), part() * 1e4, part()
    halves[::2] = 0
    escapes[::29] *= 3e4 if dtype == torch.float16 else 1e30
    specials[::97], specials[1::101], specials[2::103], specials[3::107] = torch.nan, torch.inf, -torch.inf, -0.0
    largest = torch.full((blocks.CHUNK,), torch.finfo(dtype).max / 8).to(dtype).float() * part().sign()
    largest[::3] = 0.5
    # Odd multiples of the bound and of its 512th part: errors that equal the bound, with either rounding.
    ties = torch.randint(-255, 256, (blocks.CHUNK,), generator=random) * EXACT_BOUND
    ties[::2] /= 256
    chunks = [part(), halves, escapes, specials, huge, largest, ties, torch.zeros(blocks.CHUNK)]
    return torch.cat([*chunks, huge[:729]]).to(dtype)


def _every_path(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    x = mixture(dtype, random)
    for rounding, keep_zeros in OPTIONS if dtype == torch.float32 else OPTIONS[1:3]:
        yield Case("every path", x, Bound.absolute(EXACT_BOUND), rounding, keep_zeros)
    if dtype == torch.float32:
        yield Case("every path", x, Bound.absolute(EXACT_BOUND), "stochastic", False)
    yield Case("bound that is not exact", x, Bound.absolute(0.3), keep_zeros=False)
    yield Case("wide codes", x, Bound.absolute(3e-3), "nearest")
    yield Case("few zeros", x[: blocks.CHUNK + 7], Bound.absolute(EXACT_BOUND), keep_zeros=False)
    yield Case("odd offset into the storage", x[1:4000], Bound.absolute(EXACT_BOUND))


def edges(dtype: torch.dtype, random: torch.Generator, bound: Bound, rounding: str, *, count: int = 2048) -> Tensor:
    """Values for elements of stream 77 where x / s is half a unit from the next, at both ends and in the middle of the
    intervals of codes up to the last one and beyond."""
    step = float(Sz(rounding=rounding).step(bound, TensorSpec.of(torch.empty(1, dtype=dtype))))
    byte = 128.0 if rounding == "nearest" else dither.bytes_at(77, torch.arange(count)).double()
    code = torch.randint(-9, 10, (count,), generator=random)
    code = torch.where(torch.rand(count, generator=random) < 0.1, code.sign() * 2042 + code // 2, code)
    places = torch.tensor([-0.5, 0.0, 0.5, 127.5, 254.5, 255.0, 255.5]).double()
    place = places[torch.randint(0, 7, (count,), generator=random)]
    return ((256.0 * code + place - byte) * (step / 256)).to(dtype)


def _borders(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    for rounding in ("dither", "nearest", "stochastic")[: 3 if dtype == torch.float32 else 2]:
        for size in (EXACT_BOUND, 0.37):
            bound = Bound.absolute(size)
            yield Case("ends of intervals", edges(dtype, random, bound, rounding), bound, rounding, False)


def _extremes(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    finfo = torch.finfo(dtype)
    subnormals = torch.randint(-400, 401, (1500,), generator=random).double() * finfo.smallest_normal * finfo.eps
    near_largest = (finfo.max * (1 - torch.rand(1500, generator=random).double() / 64)).to(dtype)
    near_largest[::2] *= -1
    unit = finfo.smallest_normal * finfo.eps
    for rounding in ("dither", "nearest"):
        yield Case("subnormals", subnormals.to(dtype), Bound.absolute(4 * unit), rounding, False)
        yield Case("near the largest value", near_largest, Bound.absolute(finfo.max / 1024), rounding)
    yield Case("bound beyond the largest value", near_largest[:500], Bound.absolute(1e300))
    yield Case("bound below all values", subnormals[:500].to(dtype), Bound.absolute(1e-60))


def _sizes(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    for size in (1, 2, 31, 33, 1023, 1024, 2049) if dtype == torch.float32 else (1, 1023, 2050):
        x = _normals(random, size).to(dtype)
        yield Case(f"size {size}", x, Bound.absolute(0.1), keep_zeros=bool(size % 2))
    for size in (1, 1025):
        yield Case(f"size {size}, raw", _normals(random, size).to(dtype), Bound.absolute(1e-9), "nearest")
    yield Case("empty", torch.empty(0, 3, dtype=dtype), Bound.absolute(0.1))
    yield Case("left to the codec", _normals(random, 1500).to(dtype), Bound.absolute(0.5), coder="rans")


def _bounds_by_axes(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    """Along every kind of axes that a need has; some bounds are zero or NaN, as a statistic may be. Channels have means
    of their own, some far from zero."""
    channels_last = partial(torch.Tensor.to, memory_format=torch.channels_last)
    kinds = [
        ("channel", (2, 17, 7, 9), (1,), None),
        ("channel, runs of four", (2, 17, 4, 9), (1,), None),
        ("channel, channels_last", (2, 17, 7, 9), (1,), channels_last),
        ("channel, channels_last by four", (2, 20, 7, 9), (1,), channels_last),
        ("row", (33, 65), (0,), None),
        ("row of a sequence", (4, 9, 33), (0, 1), None),
        ("row of one sequence", (1, 33, 37), (0, 1), None),
        ("row of a picture", (2, 3, 5, 33), (0, 1, 2), None),
        ("sample and channel", (2, 17, 7, 9), (0, 1), None),
        ("sample and channel, channels_last", (2, 17, 7, 9), (0, 1), channels_last),
        ("two terms, runs of four", (4, 5, 3, 24), (0, 2), None),
        ("three terms", (3, 2, 4, 3, 20), (0, 2, 4), None),
    ]
    for number, (name, shape, axes, lay_out) in enumerate(kinds):
        value = torch.rand([shape[axis] for axis in axes], generator=random, dtype=torch.float64) / 4
        value.view(-1)[::3] = EXACT_BOUND
        value.view(-1)[1], value.view(-1)[4] = 0, torch.nan
        x = _normals(random, *shape).relu()
        if axes == (1,):
            x[:, 5:8] += torch.tensor([1.0, -3.0, 300.0]).view(3, 1, 1)
        x = x.to(dtype)
        rounding = ("dither", "nearest")[(number + dtype.itemsize // 4) % 2]  # both, among the dtypes
        yield Case(name, x if lay_out is None else lay_out(x), Bound(value, axes), rounding)


def _keys(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    """Numbers that Triton would make constants of."""
    for low, high in KEYS if dtype == torch.float32 else KEYS[1:3]:
        x = _normals(random, 1500).to(dtype)
        yield Case(f"keys {low} and {high}", x, Bound.absolute(0.05), seed=seed_of(low, high))
