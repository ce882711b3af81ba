"""What the twin of ``sz`` is tried on, in Triton's interpreter and on a device, and what must be equal.

The interpreter costs per program, so there are few cases and each is rich: one tensor goes through every path of a
chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lowtide import codecs, kernels
from lowtide.coding import blocks, dither
from lowtide.records import Bound, Encoded

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIONS = [(rounding, keep_zeros) for rounding in ("dither", "nearest") for keep_zeros in (False, True)]
EXACT_BOUND = 0.0625  # a power of two: steps and many values lie on its grid, so errors equal to the bound are common
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

    def __str__(self) -> str:
        zeros = "zeros" if self.keep_zeros else "no zeros"
        return f"{self.name}: {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()}, {self.rounding}, {zeros}"


def make_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All cases of a dtype, on the CPU; the same every time."""
    random = torch.Generator().manual_seed(dtype.itemsize)
    yield from _every_path(dtype, random)
    yield from _borders(dtype, random)
    yield from _extremes(dtype, random)
    yield from _sizes(dtype, random)
    yield from _bounds_by_axes(dtype, random)
    yield from _keys(dtype, random)


def check(case: Case, device: torch.device, *, against_cpu: bool = False) -> Encoded:
    """The twin writes what the codec writes, each reads what the other wrote; gives the payload."""
    x = _copy(case.x, device)
    codec = codecs.create("sz", rounding=case.rounding, keep_zeros=case.keep_zeros)
    twin = kernels.twin(codec, device, x.dtype)
    assert twin is not codec, f"{case}: there is no twin at work"
    before = bits(x)
    expected = codec.encode(x, case.bound, seed=case.seed)
    got = twin.encode(x, case.bound, seed=case.seed)
    assert torch.equal(bits(x), before), f"{case}: encode changed its input"
    assert_same_payload(got, expected, str(case))
    if against_cpu:
        there = codec.encode(_copy(case.x, torch.device("cpu")), case.bound, seed=case.seed)
        assert_same_payload(got, there, f"{case}, on the CPU")
    reads = ("decode", "nonzero") if expected.meta.get("zero_code") else ("decode",)
    for read in reads:
        plain = getattr(codec, read)(expected)
        for reader, payload in ((twin, expected), (twin, got), (codec, got)):
            assert_same_values(getattr(reader, read)(payload), plain, f"{case}, {read} of {type(reader).__name__}")
    if case.name == "every path":
        wide = replace(got, tensors={**got.tensors, "offsets": got.tensors["offsets"].long()})
        assert_same_values(twin.decode(wide), codec.decode(expected), f"{case}, offsets of 64 bits")
    assert_within_bound(x, codec.decode(expected), case)
    return got


def bits(x: Tensor) -> Tensor:
    """The bits of a dense tensor in memory order; a copy."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return flat.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32).clone()


def assert_same_payload(got: Encoded, expected: Encoded, what: str) -> None:
    assert got.meta == expected.meta, f"{what}: meta {got.meta}, not {expected.meta}"
    assert (got.codec, got.version) == (expected.codec, expected.version), what
    assert got.tensors.keys() == expected.tensors.keys(), f"{what}: parts {list(got.tensors)}"
    for name, part in expected.tensors.items():
        found = got.tensors[name]
        assert found.dtype == part.dtype and found.shape == part.shape, (
            f"{what}: part {name} is {found.dtype} {tuple(found.shape)}, not {part.dtype} {tuple(part.shape)}"
        )
        unequal = (found.to(part.device) != part).nonzero().flatten()  # steps are finite: no NaN here
        assert not unequal.numel(), f"{what}: part {name} differs in {unequal.numel()}, first at {int(unequal[0])}"


def assert_same_values(got: Tensor, expected: Tensor, what: str) -> None:
    assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), what
    unequal = (bits(got) != bits(expected)).nonzero().flatten()
    if unequal.numel():
        at = int(unequal[0])
        first = [float(t.as_strided((t.numel(),), (1,))[at]) for t in (got, expected)]
        raise AssertionError(f"{what}: {unequal.numel()} values differ, first at {at}: {first[0]!r}, not {first[1]!r}")


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


def _copy(x: Tensor, device: torch.device) -> Tensor:
    """The same values at the same strides and the same offset into their storage, so that alignment is kept too."""
    copy = torch.zeros(x.storage_offset() + x.numel(), dtype=x.dtype, device=device)
    return copy.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)


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
    for rounding, keep_zeros in OPTIONS:
        yield Case("every path", x, Bound.absolute(EXACT_BOUND), rounding, keep_zeros)
    yield Case("bound that is not exact", x, Bound.absolute(0.3), keep_zeros=False)
    yield Case("wide codes", x, Bound.absolute(3e-3), "nearest")
    yield Case("few zeros", x[: blocks.CHUNK + 7], Bound.absolute(EXACT_BOUND), keep_zeros=False)
    yield Case("odd offset into the storage", x[1:4000], Bound.absolute(EXACT_BOUND))


def _borders(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    """Around the last code, and errors that round to the bound but are larger."""
    step, bound = 2 * EXACT_BOUND, Bound.absolute(EXACT_BOUND)
    steps = torch.randint(-24, 25, (1024,), generator=random) / 8
    steps = torch.where(steps < 0, steps - 2045, steps + 2045)
    for rounding in ("dither", "nearest"):
        yield Case("around the last code", (steps * step).to(dtype), bound, rounding)
    # x / step + u is a tie that goes to zero, and x a little further away than it should be for that.
    u = dither.offsets(77, 0, 2048, dtype=torch.float32, device=torch.device("cpu"))
    x = ((u.sign() / 2 - u) * step).to(dtype)
    beyond = torch.nextafter(x, x.sign() * torch.inf) if dtype == torch.float32 else x
    yield Case("a little over the bound", beyond, bound, seed=77)


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
    for size in (1, 2, 31, 33, 1023, 1024, 2049):
        x = _normals(random, size).to(dtype)
        yield Case(f"size {size}", x, Bound.absolute(0.1), keep_zeros=bool(size % 2))
    for size in (1, 2, 1025):
        yield Case(f"size {size}, raw", _normals(random, size).to(dtype), Bound.absolute(1e-9), "nearest")
    yield Case("empty", torch.empty(0, 3, dtype=dtype), Bound.absolute(0.1))


def _bounds_by_axes(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    """Along every kind of axes that a need has; some bounds are zero or NaN, as a statistic may be."""
    channels_last = partial(torch.Tensor.to, memory_format=torch.channels_last)
    kinds = [
        ("channel", (2, 17, 7, 9), (1,), None),
        ("channel, channels_last", (2, 17, 7, 9), (1,), channels_last),
        ("row", (33, 65), (0,), None),
        ("row of a sequence", (4, 9, 33), (0, 1), None),
        ("row of one sequence", (1, 33, 37), (0, 1), None),
        ("row of a picture", (2, 3, 5, 33), (0, 1, 2), None),
        ("sample and channel", (2, 17, 7, 9), (0, 1), None),
        ("sample and channel, channels_last", (2, 17, 7, 9), (0, 1), channels_last),
    ]
    for name, shape, axes, lay_out in kinds:
        value = torch.rand([shape[axis] for axis in axes], generator=random, dtype=torch.float64) / 4
        value.view(-1)[::3] = EXACT_BOUND
        value.view(-1)[1], value.view(-1)[4] = 0, torch.nan
        x = _normals(random, *shape).relu().to(dtype)
        for rounding in ("dither", "nearest"):
            yield Case(name, x if lay_out is None else lay_out(x), Bound(value, axes), rounding)


def _keys(dtype: torch.dtype, random: torch.Generator) -> Iterator[Case]:
    """Numbers that Triton would make constants of."""
    for low, high in KEYS:
        x = _normals(random, 1500).to(dtype)
        yield Case(f"keys {low} and {high}", x, Bound.absolute(0.05), seed=seed_of(low, high))
