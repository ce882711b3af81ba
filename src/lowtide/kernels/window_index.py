"""Triton twin of the codec ``window_index``: the bytes and values of ``lowtide.codecs.window_index``.

The encoder decodes every code by the decoder's own function and counts on the device what does not come back: nobody
has to wait for the answer before the payload can be used. Until it is known to be zero the payload is provisional.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.window_index import WindowIndex
from lowtide.coding import bitpack, layout
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["WindowIndexKernel"]

_BLOCK, _WARPS = 1024, 4
_AXES = 3
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "inner", "s0", "s1", "s2", "p0", "p1"]
_Window = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class WindowIndexKernel:
    """The twin of one ``WindowIndex``, for windows of 1, 2 or 3 axes that are neighbours in memory.

    Other layouts, and planes or tensors of about 2**31 elements, are left to the codec. With a ``ticket`` (one int64 in
    memory that host and device share, -1 until the device has written it) ``encode`` waits for nothing: it lets the
    device store the number of misfits there, and ``settle`` makes the payload final once that number is known.
    """

    codec: WindowIndex

    carries_values: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = False
    ticketed: ClassVar[bool] = True
    replays: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.codec.name

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.codec.accepts(dtype)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, ticket: Tensor | None = None) -> Encoded:
        codec = self.codec
        spec = layout.spec_of(x) if codec.accepts(x.dtype) else None
        window: _Window = (codec.kernel, codec.stride, codec.padding, codec.dilation, codec.plane)
        plan = _plan(window, spec.shape, spec.stride) if spec is not None else None
        if spec is None or plan is None:
            return self._encode_plainly(x, spec, ticket)
        misfits = torch.zeros(1, dtype=torch.int64, device=x.device)
        codes = torch.empty(bitpack.packed_nbytes(spec.numel, plan.width), dtype=torch.uint8, device=x.device)
        if spec.numel:
            _encode[(-(-spec.numel // _BLOCK),)](
                x, codes, misfits, spec.numel, *plan.runtime, WINDOW=plan.window, INNER=plan.inner, WIDTH=plan.width,
                BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
        encoded = Encoded(codec.name, codec.version, spec, {"width": plan.width, "window": window}, {"codes": codes})
        if ticket is None:
            return self.settle(encoded, x, int(misfits))
        ticket.copy_(misfits, non_blocking=True)
        return encoded

    def settle(self, encoded: Encoded, x: Tensor, status: int, plan: object = None) -> Encoded:
        """``encoded`` if all of ``x`` came back, else ``x`` encoded anew; ``status`` is the number of misfits."""
        assert status >= 0, "the device has not counted the misfits yet"
        return encoded if status == 0 else self.codec.encode(x)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, width = encoded.spec, encoded.meta["width"]
        plan = _plan(encoded.meta["window"], spec.shape, spec.stride) if width else None
        if plan is None or plan.width != width or not spec.numel:
            return self.codec.decode(encoded)
        codes = encoded.tensor("codes", dtype=torch.uint8, numel=bitpack.packed_nbytes(spec.numel, width))
        flat = torch.empty(spec.numel, dtype=torch.int64, device=spec.device)
        _decode[(-(-spec.numel // _BLOCK),)](
            flat, codes, spec.numel, *plan.runtime, WINDOW=plan.window, INNER=plan.inner, WIDTH=width, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
        return layout.restore(flat, spec)

    def _encode_plainly(self, x: Tensor, spec: TensorSpec | None, ticket: Tensor | None) -> Encoded:
        """Without a window, int32 is tried, and whether it holds all indices is counted in the same way."""
        if ticket is None or spec is None or self.codec.kernel:
            encoded = self.codec.encode(x)
            if ticket is not None:
                ticket.fill_(0)
            return encoded
        flat = layout.memory_view(x)
        narrow = flat.to(torch.int32)
        ticket.copy_(torch.count_nonzero(narrow != flat), non_blocking=True)
        return Encoded(self.codec.name, self.codec.version, spec, {"width": 0}, {"index": narrow})


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the kernels ask of a window and a layout; ``window`` holds, innermost axis first, what becomes constant."""

    width: int
    window: tuple[tuple[int, int, int, int], ...]
    inner: bool
    runtime: tuple[int, ...]


@lru_cache(maxsize=1024)
def _plan(window: _Window, shape: tuple[int, ...], stride: tuple[int, ...]) -> _Plan | None:
    """None where the kernels do not apply."""
    kernel, plane = window[0], window[4]
    axes = len(kernel)
    width = bitpack.width_for(prod(kernel))
    if not 0 < axes <= min(_AXES, len(shape)) or not width or max(prod(shape) + _BLOCK, prod(plane)) >= 1 << 31:
        return None
    inner = expected = next((stride[-n] for n in range(1, axes + 1) if shape[-n] > 1), 1)
    for n in range(1, axes + 1):
        if shape[-n] > 1 and stride[-n] != expected:
            return None
        expected *= shape[-n]
    sizes = [shape[-n] for n in range(1, axes + 1)] + [1] * (_AXES - axes)
    planes = [*reversed(plane), 1, 1][:2]
    steps = tuple(zip(*(tuple(reversed(part)) for part in window[:4]), strict=True))
    return _Plan(width, steps, inner > 1, (inner, *sizes, *planes))


@triton.jit
def _coordinate(index, inner, s0, s1, s2, AXIS: tl.constexpr, INNER: tl.constexpr):
    """Where the element at ``index`` in memory order lies along an axis (0: the innermost)."""
    rest = index // inner if INNER else index
    if AXIS > 0:
        rest = rest // s0
    if AXIS > 1:
        rest = rest // s1
    return rest % (s0 if AXIS == 0 else (s1 if AXIS == 1 else s2))


@triton.jit
def _to_plane(code, index, inner, s0, s1, s2, p0, p1, WINDOW: tl.constexpr, INNER: tl.constexpr):
    """The index into the plane that a code stands for, at the element ``index`` in memory order."""
    AXES: tl.constexpr = len(WINDOW)
    found = tl.zeros_like(code)
    rest = code
    for axis in tl.static_range(AXES):
        place = rest if axis == AXES - 1 else rest % WINDOW[axis][0]
        rest = rest // WINDOW[axis][0]
        origin = _coordinate(index, inner, s0, s1, s2, axis, INNER).to(tl.int32) * WINDOW[axis][1] - WINDOW[axis][2]
        places = 1 if axis == 0 else (p0 if axis == 1 else p0 * p1)
        found += (origin + place * WINDOW[axis][3]) * places
    return found


@triton.jit
def _to_window(found, index, inner, s0, s1, s2, p0, p1, WINDOW: tl.constexpr, INNER: tl.constexpr):
    """The code of an index into the plane; nonsense where it is not in the window."""
    AXES: tl.constexpr = len(WINDOW)
    code = tl.zeros_like(index).to(tl.int32)
    rest = found.to(tl.uint32)
    places = 1
    for axis in tl.static_range(AXES):
        if axis == AXES - 1:
            here = rest
        else:
            size = (p0 if axis == 0 else p1).to(tl.uint32)
            here = rest % size
            rest = rest // size
        origin = _coordinate(index, inner, s0, s1, s2, axis, INNER).to(tl.int32) * WINDOW[axis][1] - WINDOW[axis][2]
        code += (here.to(tl.int32) - origin) // WINDOW[axis][3] * places
        places *= WINDOW[axis][0]
    return code


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(
    x_ptr, codes_ptr, misfits_ptr, count, inner, s0, s1, s2, p0, p1,
    WINDOW: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // WIDTH
    start = tl.program_id(0) * BLOCK
    row = tl.arange(0, BLOCK // PER_BYTE)
    lane = tl.arange(0, PER_BYTE)[None, :]
    at = start + (row[:, None] * PER_BYTE + lane)
    if start + BLOCK <= count:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < count, other=0)
    index = at.to(tl.uint32)
    inner, s0, s1, s2 = inner.to(tl.uint32), s0.to(tl.uint32), s1.to(tl.uint32), s2.to(tl.uint32)
    code = _to_window(x, index, inner, s0, s1, s2, p0, p1, WINDOW, INNER)
    PLACES: tl.constexpr = _places(WINDOW)
    fits = (code >= 0) & (code < PLACES)
    fits = fits & (_to_plane(code, index, inner, s0, s1, s2, p0, p1, WINDOW, INNER).to(tl.int64) == x)
    here = at < count
    misfits = tl.sum((here & (fits == 0)).to(tl.int32))
    if misfits > 0:
        tl.atomic_add(misfits_ptr, misfits.to(tl.int64))
    packed = tl.sum(tl.where(here & fits, code, 0) << (lane * WIDTH), 1).to(tl.uint8)
    byte = tl.max_contiguous(row, 1)  # one a thread, so that it stays where it was made
    tl.store(codes_ptr + start // PER_BYTE + byte, packed, mask=start + row * PER_BYTE < count)


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(
    y_ptr, codes_ptr, count, inner, s0, s1, s2, p0, p1,
    WINDOW: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // WIDTH
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    byte = tl.load(codes_ptr + at // PER_BYTE, mask=at < count, other=0).to(tl.int32)
    code = (byte >> (at % PER_BYTE * WIDTH)) & ((1 << WIDTH) - 1)
    inner, s0, s1, s2 = inner.to(tl.uint32), s0.to(tl.uint32), s1.to(tl.uint32), s2.to(tl.uint32)
    found = _to_plane(code, at.to(tl.uint32), inner, s0, s1, s2, p0, p1, WINDOW, INNER).to(tl.int64)
    if start + BLOCK <= count:
        tl.store(y_ptr + at, found)
    else:
        tl.store(y_ptr + at, found, mask=at < count)


@triton.constexpr_function
def _places(window):
    count = 1
    for axis in window:
        count *= axis[0]
    return count
