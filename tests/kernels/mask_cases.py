"""What the twins of ``bitmask`` and ``window_index`` are tried on, and what must be equal."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from same_payload import assert_same_payload, assert_same_values, bits, copy_to
from torch import Tensor

from lowtide import codecs, kernels

FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Test, its thresholds, stand-ins: those of torch's ops, and thresholds that 16-bit dtypes round.
QUESTIONS: list[tuple[str, tuple[float, ...], tuple[float, ...]]] = [
    ("not_le", (0.0,), (0.0, 1.0)),
    ("not_le", (0.1,), (0.0, 1.0)),
    ("gt", (0.0,), (-1.0, 1.0)),
    ("gt", (-0.3,), (-1.0, 1.0)),
    ("inside_closed", (-0.5, 0.75), (2.0, 0.0)),
    ("inside_closed", (-0.1, 0.7), (2.0, 0.0)),
    ("inside_closed", (-math.inf, math.inf), (math.nan, 0.0)),
    ("inside_open", (-3.0, 3.0), (4.0, 0.0)),
    ("not_saturated", (0.0, 6.0), (-1.0, 3.0)),
    ("not_saturated", (-0.1, 0.7), (-1.0, 0.5)),
    ("not_shrunk", (-0.5, 0.5), (0.0, 1.0)),
    ("not_shrunk", (-0.1, 0.1), (0.0, 1.0)),
    ("sign", (), (0.0, 1.0, -1.0, math.nan)),
    ("two_valued", (2.0,), (0.0, 2.0)),
    ("two_valued", (1.1,), (0.0, 1.1)),
]
LENGTHS = (0, 1, 7, 8, 31, 1000, 4096, 5000)
# kernel, stride, padding, dilation, ceil_mode, plane, shape before the plane, bits
POOLS: list[tuple[Any, ...]] = [
    ((2,), (2,), (0,), (1,), False, (16,), (2, 3), 1),
    ((5,), (1,), (2,), (2,), False, (423,), (3, 2), 4),
    ((2, 2), (2, 2), (0, 0), (1, 1), False, (36, 40), (2, 5), 2),
    ((3, 3), (2, 2), (1, 1), (1, 1), False, (15, 9), (2, 3), 4),
    ((3, 3), (2, 2), (1, 1), (1, 1), True, (14, 16), (3,), 4),
    ((3, 2), (2, 1), (1, 0), (2, 3), False, (13, 11), (2, 3), 4),
    ((1, 3), (1, 2), (0, 1), (1, 1), False, (6, 13), (1, 5), 2),
    ((3, 3), (3, 3), (0, 0), (1, 1), False, (3, 18), (4, 3), 4),
    ((3, 3), (3, 3), (0, 0), (1, 1), False, (18, 3), (4, 3), 4),
    ((5, 5), (3, 3), (2, 2), (1, 1), False, (32, 30), (2, 4), 8),
    ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), False, (4, 6, 8), (2, 3), 4),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, (7, 8, 9), (2, 3), 8),
    ((2, 3, 1), (1, 2, 1), (1, 1, 0), (2, 1, 1), False, (6, 7, 5), (2, 2), 4),
]
WINDOW = ("kernel", "stride", "padding", "dilation", "plane")


@dataclass(frozen=True, eq=False)
class Case:
    """One tensor and how it is coded; ``strange`` of its elements do not come from the window.

    ``planned`` says that the kernels of ``window_index`` take it on.
    """

    name: str
    x: Tensor
    codec: str
    options: dict[str, Any]
    strange: int = 0
    planned: bool = True

    def __str__(self) -> str:
        return f"{self.codec} {self.options}: {self.name}, {self.x.dtype} {tuple(self.x.shape)} {self.x.stride()}"


def make_mask_cases(dtype: torch.dtype) -> Iterator[Case]:
    """All questions at values on both sides of their thresholds, in one tensor; lengths and layouts for some."""
    random = torch.Generator().manual_seed(dtype.itemsize)
    for test, params, values in QUESTIONS:
        options = {"test": test, "params": params, "values": values}
        x = points_near(params, dtype)
        repeated = x.repeat(-(-4999 // x.numel()))[torch.randperm(4999, generator=random)]
        yield Case("on and next to thresholds", repeated, "bitmask", options)
    for (test, params, values), length in product((QUESTIONS[0], QUESTIONS[12]), LENGTHS):
        options = {"test": test, "params": params, "values": values}
        yield Case(f"length {length}", torch.randn(length, generator=random).to(dtype), "bitmask", options)
    x = torch.randn(2, 17, 7, 9, generator=random).to(dtype)
    options = {"test": "not_le", "params": (0.0,)}
    yield Case("channels_last", x.to(memory_format=torch.channels_last), "bitmask", options)
    yield Case("odd offset into the storage", x.flatten()[1:999], "bitmask", options)


def make_truth_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(1)
    for length in LENGTHS:
        yield Case(f"length {length}", torch.rand(length, generator=random) < 0.5, "bitmask", {})
    x = torch.rand(2, 17, 7, 9, generator=random) < 0.5
    yield Case("channels_last", x.to(memory_format=torch.channels_last), "bitmask", {})


def make_window_cases() -> Iterator[Case]:
    random = torch.Generator().manual_seed(2)
    for pool in POOLS:
        for channels_last in (False, True) if len(pool[6]) == 2 and len(pool[0]) > 1 else (False,):
            indices = pool_indices(pool, random, channels_last=channels_last)
            name = "channels_last" if channels_last else "contiguous"
            yield Case(name, indices, "window_index", window_of(pool))
    yield Case("empty", indices[:0], "window_index", window_of(pool))
    for pool in (POOLS[2], POOLS[3], POOLS[11]):
        indices = pool_indices(pool, random)
        for name, count in (("one", 1), ("many", indices.numel() // 3)):
            yield Case(f"{name} strange", _make_strange(indices, count, pool), "window_index", window_of(pool), count)
    transposed = pool_indices(POOLS[3], random).transpose(2, 3).contiguous().transpose(2, 3)
    yield Case("axes that are not neighbours in order", transposed, "window_index", window_of(POOLS[3]), planned=False)
    column = pool_indices(POOLS[8], random)
    column = column.as_strided(column.shape, (*column.stride()[:-1], 7))
    yield Case("an axis of one element has any stride", column, "window_index", window_of(POOLS[8]))
    yield Case("no window", indices, "window_index", {}, planned=False)
    yield Case("no window, beyond int32", indices + (1 << 40), "window_index", {}, indices.numel(), planned=False)
    wide = ((17, 17), (4, 4), (0, 0), (1, 1), False, (40, 40), (2, 3), 0)
    yield Case("more than 256 places", pool_indices(wide, random), "window_index", window_of(wide), planned=False)


def points_near(thresholds: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """The thresholds rounded to ``dtype``, their neighbours, zeros, extremes, infinities and every kind of NaN."""
    at = torch.tensor([t for t in (*thresholds, 0.0, 2.0) if math.isfinite(t)], dtype=torch.float64).to(dtype)
    info, top = torch.finfo(dtype), torch.tensor(math.inf, dtype=dtype)
    least = info.smallest_normal * info.eps
    ends = [0.0, -0.0, info.max, info.min, info.smallest_normal, -info.smallest_normal, least, -least]
    ends += [math.inf, -math.inf, math.nan]
    quiet = torch.tensor([math.nan], dtype=dtype)
    odd_nan = (bits(quiet) | 1).view(dtype)
    near = [at, -at, torch.nextafter(at, top), torch.nextafter(at, -top), torch.tensor(ends, dtype=dtype)]
    return torch.cat([*near, odd_nan, -odd_nan])


def pool_indices(pool: tuple[Any, ...], random: torch.Generator, *, channels_last: bool = False) -> Tensor:
    kernel, stride, padding, dilation, ceil_mode, plane, before, _ = pool
    x = torch.randn(*before, *plane, generator=random)
    if channels_last:
        x = x.to(memory_format=torch.channels_last if len(plane) == 2 else torch.channels_last_3d)
    run = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[len(kernel)]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    indices: Tensor = run(x, kernel, return_indices=True, **options)[1]
    if channels_last:
        assert not indices.is_contiguous() or 1 in indices.shape
    return indices


def window_of(pool: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
    return dict(zip(WINDOW, (*pool[:4], pool[5]), strict=True))


def _make_strange(indices: Tensor, count: int, pool: tuple[Any, ...]) -> Tensor:
    """Indices that no window gives: outside of the plane on either side, by little and by 2**32."""
    strange = indices.clone()
    flat, size = strange.view(-1), math.prod(pool[5])
    where = torch.arange(count) * (flat.numel() // count)
    flat[where] += torch.tensor([size, -size, 1 << 32, -(1 << 40)])[torch.arange(count) % 4]
    return strange


def check(case: Case, device: torch.device) -> None:
    """The twin writes what the codec writes, each reads what the other wrote, and the ticket says what it must."""
    x = copy_to(case.x, device)
    codec = codecs.create(case.codec, **case.options)
    twin: Any = kernels.twin(codec, device, x.dtype)
    assert twin is not codec, f"{case}: there is no twin at work"
    before = bits(x)
    expected = codec.encode(x)
    got = twin.encode(x)
    assert torch.equal(bits(x), before), f"{case}: encode changed its input"
    assert_same_payload(got, expected, str(case))
    plain = codec.decode(expected)
    for reader, payload in ((twin, expected), (twin, got), (codec, got)):
        assert_same_values(reader.decode(payload), plain, f"{case}, decode of {type(reader).__name__}")
    if case.options.get("test") == "not_le":
        gradient = torch.empty_like(x).copy_(torch.arange(x.numel()).view(x.shape) - 0.25)
        for reader, payload in ((twin, expected), (twin, got), (codec, got)):
            passed = torch.where(plain > 0, gradient, 0)
            assert_same_values(reader.gate(payload, gradient), passed, f"{case}, gate of {type(reader).__name__}")
    if twin.ticketed:
        _check_ticket(case, x, twin)


def _check_ticket(case: Case, x: Tensor, twin: Any) -> None:
    window = tuple(case.options.get(name, ()) for name in WINDOW)
    plan = sys.modules[type(twin).__module__]._plan(window, tuple(x.shape), tuple(x.stride()))
    assert (plan is not None) == case.planned, f"{case}: {plan}"
    ticket = torch.full((1,), -1, pin_memory=x.is_cuda)
    provisional = twin.encode(x, ticket=ticket)
    if x.is_cuda:
        torch.cuda.synchronize()
    assert int(ticket) == case.strange, f"{case}: {int(ticket)} misfits, not {case.strange}"
    final = twin.settle(provisional, x, int(ticket))
    assert (final is provisional) == (case.strange == 0), case
    assert_same_payload(final, twin.codec.encode(x), f"{case}, settled")
