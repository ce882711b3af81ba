"""Triton twin of the codec ``sz`` with coder ``blocks``: the bytes and values of ``lowtide.codecs.sz``.

A program, one warp, handles a chunk, and a lane a block: a tile (32, chunks, 4, 2, 4) has number 8 i + 4 h + k of
block b at [b, :, i, h, k], so that sums over i, h and k stay in the lane. The encoder reads the raw tensor once and
writes each chunk into a slot of its own, as long as the raw chunk; the lengths are then summed and a second, small
kernel moves the chunks together (it touches compressed bytes only). Whole chunks are loaded and stored without masks,
four values at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.sz import Plan, stored_grid
from lowtide.coding import blocks, dither, exact, layout
from lowtide.coding.grid import Grid
from lowtide.errors import PayloadError
from lowtide.kernels import interpreted
from lowtide.kernels._pieces import hash_word
from lowtide.kernels._sz_twin import SzTwin
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["SzKernel"]

_CHUNKS, _WARPS = 1, 1  # to a program
# Multiply-adds are not fused but where the kernels say so: bounds and bytes rest on every rounding being where it is.
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "chunks", "low", "high", "d0", "m0", "t0", "d1", "m1", "t1"]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# How elements find their steps: one for all; one for each group of four; the innermost axis, its size a multiple of
# four; anything.
_TENSOR, _RUNS, _INNER, _ANY = range(4)


@dataclass(frozen=True, slots=True)
class SzKernel(SzTwin):
    """The twin of one ``Sz``; what its kernels do not reach is left to the codec."""

    ticketed: ClassVar[bool] = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES and self.codec.accepts(dtype)

    def encode(
        self,
        x: Tensor,
        bound: Bound | None = None,
        *,
        seed: int = 0,
        plan: Plan | None = None,
        ticket: Tensor | None = None,
        capacity: int | None = None,
    ) -> Encoded:
        plan = plan if plan is not None else self.plan(x, bound)
        spec, grid = layout.spec_of(x), plan.grid
        terms = layout.index_terms(spec, grid.axes)
        if plan.model is not None or not spec.numel or len(terms) > 2 or not self.accepts(x.dtype):
            return self.codec.encode(x, seed=seed, plan=plan)
        assert grid.inverse is not None and grid.promised is not None, "only the decoder works without a bound"
        flat = layout.memory_view(x)
        chunks = -(-spec.numel // blocks.CHUNK)
        slot = exact.raw_words(spec.dtype, blocks.CHUNK)
        scratch = torch.empty(chunks * slot, dtype=torch.int32, device=x.device)
        headers = torch.empty(chunks * blocks.HEADER_NBYTES, dtype=torch.uint8, device=x.device)
        counts = torch.empty(chunks, dtype=torch.int32, device=x.device)
        _encode[(triton.cdiv(chunks, _CHUNKS),)](
            flat, _bits(flat), grid.inverse, grid.promised, grid.step, grid.centre,
            scratch, _short(scratch), headers, counts, spec.numel, chunks, *dither.keys(seed), *_numbers(terms),
            ZERO=int(plan.zero_code), DITHER=grid.rounding != "nearest", **_switches(spec, grid, terms),
        )  # fmt: skip
        offsets = torch.zeros(chunks + 1, dtype=torch.int64, device=x.device)
        torch.cumsum(counts, 0, out=offsets[1:])
        words = torch.empty(int(offsets[-1]), dtype=torch.int32, device=x.device)
        offsets = offsets.to(torch.int32 if words.numel() < 1 << 31 else torch.int64)
        _compact[(chunks,)](scratch, counts, offsets, words, slot, SPAN=min(slot, 1024), num_warps=_WARPS)
        return self.codec.payload(spec, plan, seed, {"headers": headers, "offsets": offsets, "words": words})

    def _decode(self, encoded: Encoded, *, mask: bool) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec = encoded.spec
        terms = layout.index_terms(spec, encoded.meta.get("axes", ()))
        if encoded.meta["kind"] != "blocks" or len(terms) > 2 or not self.accepts(spec.dtype):
            return self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)
        chunks = -(-spec.numel // blocks.CHUNK)
        headers = encoded.tensor("headers", dtype=torch.uint8, numel=chunks * blocks.HEADER_NBYTES)
        words, offsets = encoded.tensor("words", dtype=torch.int32), encoded.tensors.get("offsets")
        if offsets is None or offsets.numel() != chunks + 1:
            raise PayloadError(f"sz payload lacks offsets for {chunks} chunks of {spec.numel} values: truncated")
        grid = stored_grid(encoded)
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        _decode[(triton.cdiv(chunks, _CHUNKS),)](
            flat, _bits(flat), grid.step, grid.centre, words, _short(words), headers, offsets,
            spec.numel, chunks, *dither.keys(encoded.meta["seed"]), *_numbers(terms),
            ZERO=int(encoded.meta["zero_code"]), MASK=mask, DITHER=grid.rounding == "dither",
            **_switches(spec, grid, terms),
        )  # fmt: skip
        return layout.restore(flat, spec)


def _switches(spec: TensorSpec, grid: Grid, terms: tuple[tuple[int, int, int], ...]) -> dict[str, Any]:
    """What kernels differ by, and how they are launched."""
    if not terms:
        kind = _TENSOR
    elif all(divide % 4 == 0 for divide, _, _ in terms):
        kind = _RUNS
    elif len(terms) == 1 and terms[0][0] == 1 and terms[0][1] % 4 == 0:
        kind = _INNER
    else:
        kind = _ANY
    return {
        "KIND": kind, "TERMS": len(terms), "WIDE": spec.numel > (1 << 31) - (1 << 16),
        "CENTRED": grid.centre is not None, "HALF": spec.dtype.itemsize == 2, "INTERPRETED": interpreted(),
        "CHUNKS": _CHUNKS, "num_warps": _WARPS, **_EXACT,
    }  # fmt: skip


def _short(words: Tensor) -> Tensor:
    return words.view(torch.int16)


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.int16 if flat.dtype.itemsize == 2 else torch.int32)


def _numbers(terms: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """The numbers of at most two terms; bounds that need more are left to the codec."""
    flat = [number for term in terms for number in term]
    return tuple(flat + [1] * (6 - len(flat)))


@triton.jit
def _groups(chunk):
    """Which group of four, of all, stands at [b, chunk, i, h, 0]."""
    b = tl.arange(0, 32)[:, None, None, None, None]
    i = tl.arange(0, 4)[None, None, :, None, None]
    h = tl.arange(0, 2)[None, None, None, :, None]
    return chunk[None, :, None, None, None] * 256 + (i * 64 + h * 32 + b)


@triton.jit
def _fours():
    return tl.arange(0, 4)[None, None, None, None, :]


@triton.jit
def _nibbles():
    """Where number 8 i + 4 h + k of a block stands in word i of its nibbles."""
    return tl.arange(0, 2)[None, None, None, :, None] * 16 + _fours() * 4


@triton.jit
def _rows():
    return tl.arange(0, 4)[None, None, :]


@triton.jit
def _in_word(tile):
    """Sum over h and k."""
    return tl.sum(tl.sum(tile, 4), 3)


@triton.jit
def _entry(group, terms, KIND: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr):
    """Where elements find their steps: a number for each, for each group, or for all. Exists past the end as well."""
    if KIND == 0:
        entry = 0
    else:
        index = group * 4 if WIDE else group.to(tl.uint32) * 4
        if KIND == 3:
            index = index + _fours()
        d0, m0, t0, d1, m1, t1 = terms
        entry = (index // d0.to(index.dtype) % m0.to(index.dtype)) * t0.to(index.dtype)
        if TERMS == 2:
            entry += (index // d1.to(index.dtype) % m1.to(index.dtype)) * t1.to(index.dtype)
        if KIND == 2:
            entry = entry + _fours()
    return entry


@triton.jit
def _dither(group, low, high, DITHER: tl.constexpr):
    """The byte of each element."""
    if DITHER:
        word = hash_word(group.to(tl.uint32), low, high)
        byte = ((word >> (_fours() * 8).to(tl.uint32)) & 0xFF).to(tl.int32)
    else:
        byte = 128
    return byte


@triton.jit
def _code(x, inverse, byte, INTERPRETED: tl.constexpr):
    """floor((rint(x * inverse) + byte) / 256); what is out of range, inf and NaN come out beyond 2046."""
    if INTERPRETED:  # the interpreter has no multiply-add with one rounding
        units = x.to(tl.float64) * inverse.to(tl.float64)
        near = tl.abs(units) < 4194304.0
        units = tl.where(near, (units + 6755399441055744.0) - 6755399441055744.0, 4194304.0).to(tl.int32)
    else:
        # Adding 1.5 * 2**23 leaves the nearest integer in the low bits of the sum.
        origin = tl.full(x.shape, 12582912.0, tl.float32)
        units = tl.fma(x, tl.broadcast_to(inverse, x.shape), origin).to(tl.int32, bitcast=True) - 0x4B400000
    return (units + byte) >> 8


@triton.jit
def _value(q, byte, step, DITHER: tl.constexpr):
    """x' before it is rounded to its dtype: everything but the product is exact."""
    return ((q * 256 - byte).to(tl.float32) + (127.5 if DITHER else 128.0)) * (step.to(tl.float32) * 0.00390625)


@triton.jit
def _narrow(value, like, INTERPRETED: tl.constexpr):
    if INTERPRETED and like == tl.bfloat16:  # the interpreter does not round to nearest; for finite values
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return value.to(like)


@triton.jit
def _quantise(
    raw, group, count, tables, low, high, terms, ZERO: tl.constexpr, KIND: tl.constexpr, TERMS: tl.constexpr,
    WIDE: tl.constexpr, CENTRED: tl.constexpr, DITHER: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Signed codes, magnitudes as they are stored, and what is kept by them; zeros that are kept past the end."""
    x = raw.to(tl.float32)
    inverse_ptr, bound_ptr, step_ptr, centre_ptr = tables
    entry = _entry(group, terms, KIND, TERMS, WIDE)
    byte = _dither(group, low, high, DITHER)
    q = _code(x, tl.load(inverse_ptr + entry), byte, INTERPRETED)
    kept = tl.abs(q) <= 2046
    if HALF:  # a float32 that has a code is within its bound
        restored = _value(q, byte, tl.load(step_ptr + entry), DITHER)
        error = _narrow(restored, raw.dtype, INTERPRETED).to(tl.float32) - x
        kept = kept & (tl.abs(error) <= tl.load(bound_ptr + entry))
    if CENTRED:
        q -= tl.load(centre_ptr + entry).to(tl.int32)
        kept = kept & (tl.abs(q) <= 2046)
    size = tl.abs(q)
    if ZERO:
        kept = kept | (x == 0)
        size = tl.where(x == 0, 0, size + 1)
    here = group * 4 + _fours() < count
    return q, tl.where(here, size, 0), kept | (here == 0)


@triton.jit
def _store_escapes(
    chunk, at, wanted, x_ptr, bits_ptr, count, tables, low, high, terms, ZERO: tl.constexpr, KIND: tl.constexpr,
    TERMS: tl.constexpr, WIDE: tl.constexpr, CENTRED: tl.constexpr, DITHER: tl.constexpr, HALF: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """In order of position: row after row of 32 groups, found once more rather than remembered."""
    lanes = tl.arange(0, 32)[:, None, None, None, None]
    for row in range(8):
        group = chunk[None, :, None, None, None] * 256 + row * 32 + lanes
        index = group * 4 + _fours()
        raw = tl.load(x_ptr + index, mask=index < count, other=0.0)
        _, _, kept = _quantise(
            raw, group, count, tables, low, high, terms, ZERO, KIND, TERMS, WIDE, CENTRED, DITHER, HALF, INTERPRETED
        )
        lost = (kept == 0).to(tl.int32)
        in_group = tl.sum(lost, 4)
        rank = (tl.cumsum(in_group, 0) - in_group)[:, :, :, :, None] + tl.cumsum(lost, 4) - lost
        escaped = (lost > 0) & wanted[None, :, None, None, None]
        bits = tl.load(bits_ptr + index, mask=escaped, other=0)
        position = row * 128 + lanes * 4 + _fours()
        if HALF:
            place = at[None, :, None, None, None] + rank
            tl.store(place, (position << 16) | (bits.to(tl.int32) & 0xFFFF), mask=escaped)
            at += tl.sum(tl.reshape(in_group, (32, chunk.shape[0])), 0)
        else:
            place = at[None, :, None, None, None] + rank * 2
            tl.store(place, position, mask=escaped)
            tl.store(place + 1, bits, mask=escaped)
            at += tl.sum(tl.reshape(in_group, (32, chunk.shape[0])), 0) * 2


@triton.jit
def _width_of(klass):
    return tl.where(klass == 6, 7, tl.where(klass == 7, 11, klass))


@triton.jit
def _store_planes(at, code, width, wanted, FROM: tl.constexpr, COUNT: tl.constexpr):
    nibbles = _in_word(((code >> FROM) & 15) << _nibbles())
    for plane in tl.static_range(COUNT):
        word = tl.sum(((nibbles >> plane) & 0x11111111) << _rows(), 2)
        tl.store(at + FROM + plane, word, mask=wanted & (width > FROM + plane))


@triton.jit
def _load_planes(at, width, FROM: tl.constexpr, COUNT: tl.constexpr):
    nibbles = tl.zeros((32, width.shape[1], 4), tl.int32)
    for plane in tl.static_range(COUNT):
        word = tl.load(at + FROM + plane, mask=width > FROM + plane, other=0)
        nibbles |= ((word[:, :, None] >> _rows()) & 0x11111111) << plane
    return ((nibbles[:, :, :, None, None] >> _nibbles()) & 15) << FROM


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(
    x_ptr, bits_ptr, inverse_ptr, bound_ptr, step_ptr, centre_ptr, words_ptr, short_ptr, headers_ptr, counts_ptr,
    count, chunks, low, high, d0, m0, t0, d1, m1, t1,
    ZERO: tl.constexpr, KIND: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr, CENTRED: tl.constexpr,
    DITHER: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    SLOT: tl.constexpr = 512 if HALF else 1024
    ESCAPE: tl.constexpr = 1 if HALF else 2
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    if WIDE:
        chunk = chunk.to(tl.int64)
    tables = (inverse_ptr, bound_ptr, step_ptr, centre_ptr)
    terms = (d0, m0, t0, d1, m1, t1)
    group = _groups(chunk)
    index = group * 4 + _fours()
    if (tl.program_id(0).to(tl.int64) + 1) * (CHUNKS * 1024) <= count:
        raw = tl.load(x_ptr + index)
    else:
        raw = tl.load(x_ptr + index, mask=index < count, other=0.0)
    q, size, kept = _quantise(
        raw, group, count, tables, low, high, terms, ZERO, KIND, TERMS, WIDE, CENTRED, DITHER, HALF, INTERPRETED
    )
    code = tl.where(kept, size, 0)
    negative = ((q < 0) & (code > 0)).to(tl.int32)

    largest = tl.max(tl.max(tl.max(code, 4), 3), 2)
    length = tl.where(largest > 0, (largest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)
    klass = tl.where(length <= 5, length, tl.where(length <= 7, 6, 7))
    width = _width_of(klass)
    signs = tl.sum(_in_word(negative << _nibbles()) << _rows(), 2)
    signed = (signs != 0).to(tl.int32)
    planes = width + signed
    before = tl.cumsum(planes, 0) - planes
    total = tl.sum(planes, 0)
    escapes = tl.sum(tl.sum(_in_word((kept == 0).to(tl.int32)), 2), 0)
    coded_words = total + escapes * ESCAPE
    valid = tl.minimum(tl.maximum(count - chunk.to(tl.int64) * 1024, 0), 1024).to(tl.int32)
    raw_words = (valid + 1) // 2 if HALF else valid
    as_raw = coded_words >= raw_words
    tl.store(counts_ptr + chunk, tl.where(as_raw, raw_words, coded_words), mask=chunk < chunks)

    slot = words_ptr + chunk.to(tl.int64) * SLOT
    at = slot[None, :] + before
    wanted = (as_raw == 0)[None, :]
    most = tl.max(width)
    _store_planes(at, code, width, wanted, 0, 4)
    if most > 4:
        _store_planes(at, code, width, wanted, 4, 4)
    if most > 7:
        _store_planes(at, code, width, wanted, 8, 3)
    tl.store(at + width, signs, mask=wanted & (signed > 0))

    block = tl.arange(0, 32)[:, None]
    nibble = tl.where(as_raw[None, :], tl.where(block == 0, 8, 0), klass + 8 * signed)
    pairs = tl.sum(tl.reshape(nibble << (block % 2 * 4), (16, 2, CHUNKS)), 1)
    header = chunk[None, :] * 16 + tl.arange(0, 16)[:, None]
    tl.store(headers_ptr + header, pairs.to(tl.uint8), mask=(chunk < chunks)[None, :])

    if tl.max(escapes) > 0:
        _store_escapes(
            chunk, slot + total, as_raw == 0, x_ptr, bits_ptr, count, tables, low, high, terms,
            ZERO, KIND, TERMS, WIDE, CENTRED, DITHER, HALF, INTERPRETED,
        )  # fmt: skip
    if tl.max(as_raw.to(tl.int32)) > 0:
        for start in range(0, 1024, 128):
            inside = start + tl.arange(0, 128)[:, None]
            exists = as_raw[None, :] & (inside < valid[None, :])
            bits = tl.load(bits_ptr + chunk[None, :] * 1024 + inside, mask=exists, other=0)
            if HALF:
                padded = as_raw[None, :] & (inside < (raw_words * 2)[None, :])
                tl.store(short_ptr + chunk.to(tl.int64)[None, :] * 1024 + inside, bits, mask=padded)
            else:
                tl.store(slot[None, :] + inside, bits, mask=exists)


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


@triton.jit
def _put_exact(y_ptr, bits_ptr, at, bits, mask, MASK: tl.constexpr, HALF: tl.constexpr):
    if MASK:
        nonzero = (bits & (0x7FFF if HALF else 0x7FFFFFFF)) != 0
        tl.store(y_ptr + at, nonzero.to(tl.float32).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(bits_ptr + at, bits, mask=mask)


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(
    y_ptr, bits_ptr, step_ptr, centre_ptr, words_ptr, short_ptr, headers_ptr, offsets_ptr, count, chunks,
    low, high, d0, m0, t0, d1, m1, t1,
    ZERO: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr, TERMS: tl.constexpr, WIDE: tl.constexpr,
    CENTRED: tl.constexpr, DITHER: tl.constexpr, HALF: tl.constexpr, INTERPRETED: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    ESCAPE: tl.constexpr = 1 if HALF else 2
    chunk = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    if WIDE:
        chunk = chunk.to(tl.int64)
    exists = chunk < chunks
    block = tl.arange(0, 32)[:, None]
    packed = tl.load(headers_ptr + chunk[None, :] * 16 + block // 2, mask=exists[None, :], other=0).to(tl.int32)
    nibble = (packed >> (block % 2 * 4)) & 15
    as_raw = (tl.load(headers_ptr + chunk * 16, mask=exists, other=0).to(tl.int32) & 15) == 8
    coded = exists & (as_raw == 0)
    width = tl.where(coded[None, :], _width_of(nibble & 7), 0)
    signed = tl.where(coded[None, :], nibble >> 3, 0)
    planes = width + signed
    total = tl.sum(planes, 0)
    base = tl.load(offsets_ptr + chunk, mask=exists, other=0).to(tl.int64)
    after = tl.load(offsets_ptr + chunk + 1, mask=exists, other=0).to(tl.int64)
    escapes = tl.where(coded, (after - base).to(tl.int32) - total, 0) // ESCAPE
    at = (words_ptr + base)[None, :] + (tl.cumsum(planes, 0) - planes)
    code = _load_planes(at, width, 0, 4)
    if tl.max(width) > 4:
        code |= _load_planes(at, width, 4, 4) | _load_planes(at, width, 8, 3)
    group = _groups(chunk)
    index = group * 4 + _fours()
    if MASK:
        value = (code > 0).to(tl.float32)
    else:
        signs = tl.load(at + width, mask=signed > 0, other=0)
        negative = ((signs[:, :, None] >> _rows())[:, :, :, None, None] >> _nibbles()) & 1
        q = tl.where(negative > 0, ZERO - code, code - ZERO)
        entry = _entry(group, (d0, m0, t0, d1, m1, t1), KIND, TERMS, WIDE)
        if CENTRED:
            q += tl.load(centre_ptr + entry).to(tl.int32)
        value = _value(q, _dither(group, low, high, DITHER), tl.load(step_ptr + entry), DITHER)
        if ZERO:
            value = tl.where(code == 0, 0.0, value)
    value = _narrow(value, y_ptr.dtype.element_ty, INTERPRETED)
    wanted = coded[None, :, None, None, None]
    if (tl.program_id(0).to(tl.int64) + 1) * (CHUNKS * 1024) <= count:
        tl.store(y_ptr + index, value, mask=wanted)
    else:
        tl.store(y_ptr + index, value, mask=wanted & (index < count))

    most = tl.max(escapes)
    if most > 0:
        tl.debug_barrier()  # the escapes overwrite what other threads have just stored
        first = (words_ptr + base + total)[None, :]
        start = 0
        while start < most:
            rank = start + block
            has = rank < escapes[None, :]
            word = tl.load(first + rank * ESCAPE, mask=has, other=0)
            if HALF:
                bits = (word & 0xFFFF).to(tl.int16)
                position = (word >> 16) & 0xFFFF
            else:
                bits = tl.load(first + rank * 2 + 1, mask=has, other=0)
                position = word
            _put_exact(y_ptr, bits_ptr, chunk[None, :] * 1024 + position, bits, has, MASK, HALF)
            start += 32
    if tl.max(as_raw.to(tl.int32)) > 0:
        for start in range(0, 1024, 128):
            inside = start + tl.arange(0, 128)[:, None]
            target = chunk[None, :] * 1024 + inside
            here = as_raw[None, :] & (target < count)
            if HALF:
                bits = tl.load(short_ptr + base[None, :] * 2 + inside, mask=here, other=0)
            else:
                bits = tl.load(words_ptr + base[None, :] + inside, mask=here, other=0)
            _put_exact(y_ptr, bits_ptr, target, bits, here, MASK, HALF)
