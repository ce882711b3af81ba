"""Triton twin of the codec ``sz`` with coder ``blocks``: the bytes and values of ``lowtide.codecs.sz``.

One program handles a few chunks. The encoder reads the raw tensor once and writes each chunk into a slot of its own, as
long as the raw chunk; the lengths are then summed and a second, small kernel moves the chunks together (it touches
compressed bytes only). Floating point is not contracted: bounds and bytes rest on every rounding being where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.sz import Sz
from lowtide.coding import blocks, dither, layout
from lowtide.errors import PayloadError
from lowtide.kernels import interpreted
from lowtide.records import Bound, Encoded

__all__ = ["SzKernel"]

# A chunk and a warp to a program: first or close to it in most of the cases tried on an H200, not in all of them.
_CHUNKS = 1
_WARPS = 1
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "chunks", "low", "high", "d0", "m0", "t0", "d1", "m1", "t1"]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class SzKernel:
    """The twin of one ``Sz``."""

    codec: Sz

    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def keep_zeros(self) -> bool:
        return self.codec.keep_zeros

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        prepared = self.codec.prepare(x, bound, seed)
        if prepared is None or len(prepared[2].terms) > 2:
            return self.codec.encode(x, bound, seed=seed)
        spec, flat, grid, zero_code = prepared
        assert grid.promised is not None, "only the decoder works without a bound"
        chunks = -(-spec.numel // blocks.CHUNK)
        slot = blocks.raw_words(spec.dtype)
        scratch = torch.empty(chunks * slot, dtype=torch.int32, device=x.device)
        headers = torch.empty(chunks * blocks.HEADER_NBYTES, dtype=torch.uint8, device=x.device)
        counts = torch.empty(chunks, dtype=torch.int32, device=x.device)
        step = grid.step.float()
        _encode[(triton.cdiv(chunks, _CHUNKS),)](
            flat, step, 1 / step, grid.promised.float(), scratch, _short(scratch), headers, counts, spec.numel, chunks,
            *dither.keys(grid.seed or 0), *_terms(grid.terms),
            TERMS=len(grid.terms), DITHER=grid.seed is not None, ZERO=int(zero_code), HALF=spec.dtype.itemsize == 2,
            SOFT=_soft(spec.dtype), CHUNKS=_CHUNKS, num_warps=_WARPS, **_EXACT,
        )  # fmt: skip
        offsets = torch.zeros(chunks + 1, dtype=torch.int64, device=x.device)
        torch.cumsum(counts, 0, out=offsets[1:])
        words = torch.empty(int(offsets[-1]), dtype=torch.int32, device=x.device)
        offsets = offsets.to(torch.int32 if words.numel() < 1 << 31 else torch.int64)
        _compact[(chunks,)](scratch, counts, offsets, words, slot, SPAN=min(slot, 1024), num_warps=_WARPS)
        tensors = {"headers": headers, "offsets": offsets, "words": words, "step": step.to(torch.bfloat16)}
        return self.codec.payload(spec, zero_code, grid, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        return self._decode(encoded, mask=False)

    def nonzero(self, encoded: Encoded) -> Tensor:
        if encoded.meta["kind"] != "empty" and not encoded.meta["zero_code"]:
            raise PayloadError("sz payload has no code for zero: encode with keep_zeros=True to ask for non-zeros")
        return self._decode(encoded, mask=True)

    def _decode(self, encoded: Encoded, *, mask: bool) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec = encoded.spec
        terms = layout.index_terms(spec, encoded.meta.get("axes", ()))
        if encoded.meta["kind"] == "empty" or len(terms) > 2:
            return self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)
        chunks = -(-spec.numel // blocks.CHUNK)
        headers = encoded.tensor("headers", dtype=torch.uint8, numel=chunks * blocks.HEADER_NBYTES)
        words, offsets = encoded.tensor("words", dtype=torch.int32), encoded.tensors["offsets"]
        if offsets.numel() != chunks + 1:
            raise PayloadError(f"sz payload: {offsets.numel()} chunk offsets for {spec.numel} values: truncated")
        seed = encoded.meta["seed"]
        step = encoded.tensors["step"].float()
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        _decode[(triton.cdiv(chunks, _CHUNKS),)](
            flat, _bits(flat), step, words, _short(words), headers, offsets, spec.numel, chunks,
            *dither.keys(seed or 0), *_terms(terms),
            TERMS=len(terms), DITHER=seed is not None, ZERO=int(encoded.meta["zero_code"]), MASK=mask,
            HALF=spec.dtype.itemsize == 2, SOFT=_soft(spec.dtype), CHUNKS=_CHUNKS, num_warps=_WARPS, **_EXACT,
        )  # fmt: skip
        return layout.restore(flat, spec)


def _soft(dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and interpreted()


def _short(words: Tensor) -> Tensor:
    return words.view(torch.int16)


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.int32)


def _terms(terms: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """The numbers of at most two terms; bounds that need more are left to the codec."""
    flat = [number for term in terms for number in term]
    return tuple(flat + [1] * (6 - len(flat)))


@triton.jit
def _entry(index, d0, m0, t0, d1, m1, t1, TERMS: tl.constexpr):
    entry = (index // d0 % m0) * t0
    if TERMS == 2:
        entry += (index // d1 % m1) * t1
    return entry


@triton.jit
def _dither(index, low, high):
    word = (index >> 2).to(tl.uint32)
    word = word + low.to(tl.uint32)
    word = word ^ (word >> 16)
    word = word * 0x7FEB352D
    word = word ^ high.to(tl.uint32)
    word = word ^ (word >> 15)
    word = word * 0x846CA68B
    word = word ^ (word >> 16)
    byte = (word >> ((index & 3) * 8).to(tl.uint32)) & 0xFF
    return (byte.to(tl.float32) - 127.5) * 0.00390625


@triton.jit
def _round_bf16(value):
    """Nearest bfloat16, ties to even, for finite values (Triton's interpreter rounds its casts otherwise)."""
    bits = value.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _width_of(klass):
    return tl.where(klass == 6, 7, tl.where(klass == 7, 11, klass))


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(
    x_ptr, step_ptr, inverse_ptr, bound_ptr, words_ptr, short_ptr, headers_ptr, counts_ptr, count, chunks,
    low, high, d0, m0, t0, d1, m1, t1,
    TERMS: tl.constexpr, DITHER: tl.constexpr, ZERO: tl.constexpr, HALF: tl.constexpr, SOFT: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = CHUNKS * 32
    SLOT: tl.constexpr = 512 if HALF else 1024
    ESCAPE: tl.constexpr = 1 if HALF else 2
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 32)
    index = row[:, None] * 32 + lane[None, :]
    here = index < count
    raw = tl.load(x_ptr + index, mask=here, other=0.0)
    x = raw.to(tl.float32)
    if TERMS == 0:
        step, inverse, bound = tl.load(step_ptr), tl.load(inverse_ptr), tl.load(bound_ptr)
    else:
        entry = _entry(index, d0, m0, t0, d1, m1, t1, TERMS)
        step = tl.load(step_ptr + entry, mask=here, other=1.0)
        inverse = tl.load(inverse_ptr + entry, mask=here, other=1.0)
        bound = tl.load(bound_ptr + entry, mask=here, other=0.0)
    # The selects around the two products change no value: they keep ptxas from fusing each with the addition after it
    # (sm_100 has a paired multiply-add that it forms even where Triton forbids contraction).
    scaled = tl.where(x == x, x * inverse, x)
    offset = 0.0
    if DITHER:
        offset = _dither(index, low, high)
        scaled = scaled + offset
    in_range = tl.abs(scaled) <= 2046.5
    # Adding and taking away 1.5 * 2**23 rounds to the nearest integer, ties to even.
    q = tl.where(in_range, (scaled + 12582912.0) - 12582912.0, 0.0)
    restored = tl.where(in_range, (q - offset) * step, 0.0)
    if SOFT:
        restored = _round_bf16(restored)
    restored = restored.to(raw.dtype).to(tl.float32)
    zero = x == 0
    # |restored - x| <= bound, exactly: ``error`` is the rounded difference, ``rest`` what rounding took away (Knuth).
    error = restored - x
    lower = error - restored
    rest = (restored - (error - lower)) + (-x - lower)
    size = tl.abs(error)
    over = tl.where(error > 0, rest > 0, rest < 0)
    kept = in_range & ((size < bound) | ((size == bound) & (over == 0)))
    if ZERO:
        kept = kept | zero
    else:
        kept = kept & ((x != 0) | (restored == 0))
    magnitude = tl.abs(q).to(tl.int32)
    if ZERO:
        magnitude = tl.where(zero, 0, magnitude + 1)
    code = tl.where(kept & here, magnitude, 0)
    negative = ((q < 0) & (code > 0)).to(tl.int32)
    lost = (here & (kept == 0)).to(tl.int32)

    largest = tl.max(code, 1)
    length = tl.where(largest > 0, (largest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
    klass = tl.where(length <= 5, length, tl.where(length <= 7, 6, 7))
    width = _width_of(klass)
    signed = tl.max(negative, 1)
    planes = tl.reshape(width + signed, (CHUNKS, 32))
    before = tl.cumsum(planes, 1) - planes
    total = tl.sum(planes, 1)
    lost_in_chunk = tl.reshape(lost, (CHUNKS, 1024))
    coded_words = total + tl.sum(lost_in_chunk, 1) * ESCAPE
    valid = tl.minimum(tl.maximum(count - chunk * 1024, 0), 1024).to(tl.int32)
    raw_words = (valid + 1) // 2 if HALF else valid
    as_raw = coded_words >= raw_words
    tl.store(counts_ptr + chunk, tl.where(as_raw, raw_words, coded_words), mask=chunk < chunks)

    slot = chunk * SLOT
    chunk_raw = tl.broadcast_to(as_raw[:, None], (CHUNKS, 32))
    row_raw = tl.reshape(chunk_raw.to(tl.int32), (ROWS,))
    row_slot = tl.reshape(tl.broadcast_to(slot[:, None], (CHUNKS, 32)), (ROWS,))
    first = row_slot + tl.reshape(before, (ROWS,))
    writes = (row_raw == 0) & (row < chunks * 32)
    plane, most = 0, tl.max(width, 0)
    while plane < most:
        word = tl.sum(((code >> plane) & 1) << lane[None, :], 1)
        tl.store(words_ptr + first + plane, word, mask=writes & (width > plane))
        plane += 1
    tl.store(words_ptr + first + width, tl.sum(negative << lane[None, :], 1), mask=writes & (signed > 0))

    nibble = klass + 8 * signed
    nibble = tl.where(row_raw > 0, tl.where(row % 32 == 0, 8, 0), nibble)
    pairs = tl.reshape(nibble, (ROWS // 2, 2)) << (tl.arange(0, 2) * 4)[None, :]
    half_row = tl.program_id(0).to(tl.int64) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(headers_ptr + half_row, tl.sum(pairs, 1).to(tl.uint8), mask=half_row < chunks * 16)

    grid_raw = tl.broadcast_to(row_raw[:, None], (ROWS, 32)) > 0
    if tl.sum(lost_in_chunk) > 0:
        rank = tl.cumsum(lost_in_chunk, 1) - lost_in_chunk
        at = tl.reshape((slot + total)[:, None] + rank * ESCAPE, (ROWS, 32))
        position = (index % 1024).to(tl.int32)
        escapes = (lost > 0) & (grid_raw == 0)
        if HALF:
            bits = raw.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            tl.store(words_ptr + at, (position << 16) | bits, mask=escapes)
        else:
            tl.store(words_ptr + at, position, mask=escapes)
            tl.store(words_ptr + at + 1, raw.to(tl.int32, bitcast=True), mask=escapes)
    if tl.max(row_raw, 0) > 0:
        inside = index % 1024
        if HALF:
            at = row_slot[:, None] * 2 + inside
            padded = grid_raw & (inside < tl.reshape(
                tl.broadcast_to((raw_words * 2)[:, None], (CHUNKS, 32)), (ROWS,))[:, None])  # fmt: skip
            tl.store(short_ptr + at, raw.to(tl.int16, bitcast=True), mask=padded)
        else:
            tl.store(words_ptr + row_slot[:, None] + inside, raw.to(tl.int32, bitcast=True), mask=grid_raw & here)


@triton.jit
def _compact(scratch_ptr, counts_ptr, offsets_ptr, words_ptr, slot, SPAN: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    count = tl.load(counts_ptr + chunk)
    target = tl.load(offsets_ptr + chunk).to(tl.int64)
    start = 0
    while start < count:
        at = start + tl.arange(0, SPAN)
        word = tl.load(scratch_ptr + chunk * slot + at, mask=at < count)
        tl.store(words_ptr + target + at, word, mask=at < count)
        start += SPAN


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(
    y_ptr, bits_ptr, step_ptr, words_ptr, short_ptr, headers_ptr, offsets_ptr, count, chunks,
    low, high, d0, m0, t0, d1, m1, t1,
    TERMS: tl.constexpr, DITHER: tl.constexpr, ZERO: tl.constexpr, MASK: tl.constexpr, HALF: tl.constexpr,
    SOFT: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = CHUNKS * 32
    ESCAPE: tl.constexpr = 1 if HALF else 2
    chunk = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, 32)
    index = row[:, None] * 32 + lane[None, :]
    here = index < count
    exists = chunk < chunks
    nibble = (
        tl.load(headers_ptr + row // 2, mask=row < chunks * 32, other=0).to(tl.int32) >> (row % 2 * 4).to(tl.int32)
    ) & 15
    chunk_raw = (tl.load(headers_ptr + chunk * 16, mask=exists, other=0).to(tl.int32) & 15) == 8
    row_raw = tl.reshape(tl.broadcast_to(chunk_raw[:, None], (CHUNKS, 32)).to(tl.int32), (ROWS,))
    width = tl.where(row_raw > 0, 0, _width_of(nibble & 7))
    signed = tl.where(row_raw > 0, 0, nibble >> 3)
    planes = tl.reshape(width + signed, (CHUNKS, 32))
    base = tl.load(offsets_ptr + chunk, mask=exists, other=0).to(tl.int64)
    after = tl.load(offsets_ptr + chunk + 1, mask=exists, other=0).to(tl.int64)
    total = tl.sum(planes, 1)
    first = tl.reshape(base[:, None] + tl.cumsum(planes, 1) - planes, (ROWS,))
    code = tl.zeros((ROWS, 32), tl.int32)
    plane, most = 0, tl.max(width, 0)
    while plane < most:
        word = tl.load(words_ptr + first + plane, mask=width > plane, other=0)
        code |= ((word[:, None] >> lane[None, :]) & 1) << plane
        plane += 1
    sign = tl.load(words_ptr + first + width, mask=signed > 0, other=0)
    grid_raw = tl.broadcast_to(row_raw[:, None], (ROWS, 32)) > 0
    if MASK:
        tl.store(y_ptr + index, (code > 0).to(tl.float32).to(y_ptr.dtype.element_ty), mask=here & (grid_raw == 0))
    else:
        magnitude = (code - ZERO).to(tl.float32)
        q = tl.where((sign[:, None] >> lane[None, :]) & 1 > 0, -magnitude, magnitude)
        if TERMS == 0:
            step = tl.load(step_ptr)
        else:
            step = tl.load(step_ptr + _entry(index, d0, m0, t0, d1, m1, t1, TERMS), mask=here, other=1.0)
        if DITHER:
            q = q - _dither(index, low, high)
        value = q * step
        if SOFT:
            value = _round_bf16(value)
        if ZERO:
            value = tl.where(code == 0, 0.0, value)
        tl.store(y_ptr + index, value.to(y_ptr.dtype.element_ty), mask=here & (grid_raw == 0))

    escaped = tl.where(chunk_raw, 0, (after - base).to(tl.int32) - total) // ESCAPE
    escaped = tl.where(exists, escaped, 0)
    worst = tl.max(escaped, 0)
    if worst > 0:
        tl.debug_barrier()  # the escapes overwrite what other threads have just stored
        rank = 0
        while rank < worst:
            has = rank < escaped
            at = base + total + rank * ESCAPE
            word = tl.load(words_ptr + at, mask=has, other=0)
            if HALF:
                bits = (word & 0xFFFF).to(tl.int16)
                position = (word >> 16) & 0xFFFF
            else:
                bits = tl.load(words_ptr + at + 1, mask=has, other=0)
                position = word
            target = chunk * 1024 + position
            if MASK:
                nonzero = (bits & (0x7FFF if HALF else 0x7FFFFFFF)) != 0
                tl.store(y_ptr + target, nonzero.to(tl.float32).to(y_ptr.dtype.element_ty), mask=has)
            else:
                tl.store(bits_ptr + target, bits, mask=has)
            rank += 1
    if tl.max(row_raw, 0) > 0:
        row_base = tl.reshape(tl.broadcast_to(base[:, None], (CHUNKS, 32)), (ROWS,))
        if HALF:
            bits = tl.load(short_ptr + row_base[:, None] * 2 + index % 1024, mask=grid_raw & here, other=0)
        else:
            bits = tl.load(words_ptr + row_base[:, None] + index % 1024, mask=grid_raw & here, other=0)
        if MASK:
            nonzero = (bits & (0x7FFF if HALF else 0x7FFFFFFF)) != 0
            tl.store(y_ptr + index, nonzero.to(tl.float32).to(y_ptr.dtype.element_ty), mask=grid_raw & here)
        else:
            tl.store(bits_ptr + index, bits, mask=grid_raw & here)
