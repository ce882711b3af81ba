"""Triton twin of the codec ``bitmask``: the bytes and values of ``lowtide.codecs.bitmask``, one pass each way.

Only the last program masks what it reads and writes; the others move 16 bytes at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.bitmask import BitMask
from lowtide.coding import bitpack, layout, membership
from lowtide.kernels._base import Twin
from lowtide.records import Bound, Encoded

__all__ = ["BitMaskKernel"]

_BLOCK, _WARPS = 4096, 4
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "v0", "v1", "v2", "v3"]
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# Tests that compare 16-bit values in float32, where the threshold keeps what the dtype would round away.
_WIDE = ("not_le", "not_saturated")


@dataclass(frozen=True, slots=True)
class BitMaskKernel(Twin):
    """The twin of one ``BitMask``; float64 is left to the codec."""

    codec: BitMask

    carries_values: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (*_FLOATS, torch.bool) and self.codec.accepts(dtype)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, ticket: Tensor | None = None) -> Encoded:
        codec, count = self.codec, x.numel()
        if not count or not self.accepts(x.dtype):
            return codec.encode(x)
        spec = layout.spec_of(x)
        width = bitpack.width_for(len(codec.values))
        codes = torch.empty(bitpack.packed_nbytes(count, width), dtype=torch.uint8, device=x.device)
        a, b = _thresholds(codec.test, codec.params, x.dtype, x.is_cuda)
        _encode[(-(-count // _BLOCK),)](
            x.view(torch.uint8) if x.dtype == torch.bool else x, codes, count, a, b,
            TEST=codec.test, WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return Encoded(codec.name, codec.version, spec, {"width": width, "values": codec.values}, {"codes": codes})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, width, values = encoded.spec, encoded.meta["width"], encoded.meta["values"]
        known = spec.dtype in _FLOATS or (spec.dtype == torch.bool and width == 1)
        if not spec.numel or not known or width not in (1, 2) or len(values) != 1 << width:
            return self.codec.decode(encoded)
        nbytes = bitpack.packed_nbytes(spec.numel, width)
        codes = encoded.tensor("codes", dtype=torch.uint8, numel=nbytes)
        flat = torch.empty(spec.numel, dtype=_INTEGERS[spec.dtype.itemsize], device=spec.device)
        _decode[(-(-spec.numel // _BLOCK),)](
            flat, codes, spec.numel, *_stand_ins(values, spec.dtype), WIDTH=width, BLOCK=_BLOCK, num_warps=_WARPS
        )
        return layout.restore(flat.view(spec.dtype), spec)

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        """As ``BitMask.gate``, with no mask in between."""
        encoded.require(self.codec.name, self.codec.version)
        spec, width = encoded.spec, encoded.meta["width"]
        is_dense = layout.is_dense(gradient.shape, gradient.stride())
        if not spec.numel or width != 1 or gradient.dtype not in _FLOATS or not is_dense:
            return membership.gated(gradient, self.decode(encoded))
        codes = encoded.tensor("codes", dtype=torch.uint8, numel=bitpack.packed_nbytes(spec.numel, width))
        gated = torch.empty_like(gradient)
        bits = _INTEGERS[gradient.dtype.itemsize]
        _gate[(-(-spec.numel // _BLOCK),)](
            layout.memory_view(gated).view(bits), codes, layout.memory_view(gradient).view(bits), spec.numel,
            BLOCK=_BLOCK, num_warps=_WARPS,
        )  # fmt: skip
        return gated


@lru_cache(maxsize=256)
def _thresholds(test: str, params: tuple[float, ...], dtype: torch.dtype, on_cuda: bool) -> tuple[float, float]:
    """The thresholds as the codec compares with them (``lowtide.coding.membership``), exact in float32."""
    wide = dtype == torch.bool or (test in _WIDE and not (test == "not_le" and on_cuda))
    rounded = torch.tensor([*params, 0.0, 0.0], dtype=torch.float64).to(torch.float32 if wide else dtype)
    a, b = rounded[:2].tolist()
    return a, b


@lru_cache(maxsize=256)
def _stand_ins(values: tuple[float, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The bits of four stand-ins: as integers they pass through a kernel unchanged, NaN too."""
    if dtype == torch.bool:
        return 0, 1, 0, 0
    floats = torch.tensor((*values, 0.0, 0.0)[:4], dtype=torch.float64).to(dtype)
    return tuple(floats.view(_INTEGERS[dtype.itemsize]).tolist())


@triton.jit
def _widen(x):
    """To float32; bfloat16 by its bits, because Triton's interpreter loses its subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _classify(x, a, b, TEST: tl.constexpr):
    """The tests of ``lowtide.coding.membership``, comparison for comparison; classes as int32."""
    if TEST == "truth":
        klass = x != 0
    elif TEST == "not_le":
        klass = (x <= a) == 0
    elif TEST == "gt":
        klass = x > a
    elif TEST == "inside_closed":
        klass = (x >= a) & (x <= b)
    elif TEST == "inside_open":
        klass = (x > a) & (x < b)
    elif TEST == "not_saturated":
        klass = ((x <= a) | (x >= b)) == 0
    elif TEST == "not_shrunk":
        klass = ((x >= a) & (x <= b)) == 0
    elif TEST == "sign":
        klass = tl.where(x > 0, 1, tl.where(x < 0, 2, tl.where(x == x, 0, 3)))
    else:
        tl.static_assert(TEST == "two_valued", "a membership test that the kernel does not know")
        klass = x == a
    return klass.to(tl.int32)


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(x_ptr, codes_ptr, count, a, b, TEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        _encode_block(x_ptr, codes_ptr, start, count, a, b, TEST, WIDTH, BLOCK, WHOLE=True)
    else:
        _encode_block(x_ptr, codes_ptr, start, count, a, b, TEST, WIDTH, BLOCK, WHOLE=False)


@triton.jit
def _encode_block(
    x_ptr, codes_ptr, start, count, a, b, TEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // WIDTH
    row = tl.arange(0, BLOCK // PER_BYTE)
    lane = tl.arange(0, PER_BYTE)[None, :]
    at = row[:, None] * PER_BYTE + lane
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    if WHOLE:
        x = tl.load(x_ptr + start + at)
    else:
        x = tl.load(x_ptr + start + at, mask=at < left, other=0)
    klass = _classify(x if TEST == "truth" else _widen(x), a, b, TEST)
    if not WHOLE:
        klass = tl.where(at < left, klass, 0)
    packed = tl.sum(klass << (lane * WIDTH), 1).to(tl.uint8)
    byte = tl.max_contiguous(row, 1)  # one a thread, so that it stays where it was made
    if WHOLE:
        tl.store(codes_ptr + start // PER_BYTE + byte, packed)
    else:
        tl.store(codes_ptr + start // PER_BYTE + byte, packed, mask=row * PER_BYTE < left)


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(y_ptr, codes_ptr, count, v0, v1, v2, v3, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        _decode_block(y_ptr, codes_ptr, start, count, v0, v1, v2, v3, WIDTH, BLOCK, WHOLE=True)
    else:
        _decode_block(y_ptr, codes_ptr, start, count, v0, v1, v2, v3, WIDTH, BLOCK, WHOLE=False)


@triton.jit
def _decode_block(
    y_ptr, codes_ptr, start, count, v0, v1, v2, v3, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr
):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    at = tl.arange(0, BLOCK)
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    source = codes_ptr + start // PER_BYTE + at // PER_BYTE
    if WHOLE:
        byte = tl.load(source).to(tl.int32)
    else:
        byte = tl.load(source, mask=at < left, other=0).to(tl.int32)
    klass = (byte >> (at % PER_BYTE * WIDTH)) & ((1 << WIDTH) - 1)
    value = tl.where(klass == 0, v0, v1)
    if WIDTH == 2:
        value = tl.where(klass < 2, value, tl.where(klass == 2, v2, v3))
    value = value.to(y_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(y_ptr + start + at, value)
    else:
        tl.store(y_ptr + start + at, value, mask=at < left)


@triton.jit(do_not_specialize=_RUNTIME)
def _gate(y_ptr, codes_ptr, gradient_ptr, count, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start + BLOCK <= count:
        _gate_block(y_ptr, codes_ptr, gradient_ptr, start, count, BLOCK, WHOLE=True)
    else:
        _gate_block(y_ptr, codes_ptr, gradient_ptr, start, count, BLOCK, WHOLE=False)


@triton.jit
def _gate_block(y_ptr, codes_ptr, gradient_ptr, start, count, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    source = codes_ptr + start // 8 + at // 8
    if WHOLE:
        byte = tl.load(source).to(tl.int32)
        gradient = tl.load(gradient_ptr + start + at)
    else:
        byte = tl.load(source, mask=at < left, other=0).to(tl.int32)
        gradient = tl.load(gradient_ptr + start + at, mask=at < left, other=0)
    gated = tl.where((byte >> (at % 8)) & 1 != 0, gradient, 0).to(y_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(y_ptr + start + at, gated)
    else:
        tl.store(y_ptr + start + at, gated, mask=at < left)
