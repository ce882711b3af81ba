"""Triton twin of the codec ``groups``: the bytes and values of ``lowtide.codecs.groups``.

A program handles some whole groups. It reads them a part at a time, so that the values whose codes share a byte, and
those that share a dither word, are in one thread: nothing but the extremes of a group crosses threads. Only the last
program masks what it reads and writes; the others move 16 bytes at a time. Groups may be those of chosen rows of a
matrix, which are read and written where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.groups import Groups, of_payload
from lowtide.coding import dither, layout
from lowtide.kernels import interpreted
from lowtide.kernels._base import Twin
from lowtide.kernels._pieces import hash_word, higher_of, key_of, lower_of, narrow, reciprocal, round_bf16, widen
from lowtide.kernels._workspaces import Replay
from lowtide.records import Bound, Encoded

__all__ = ["GroupsKernel"]

_WARPS = 4
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "low_key", "high_key", "per_row"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_GROUP = 1024


@dataclass(frozen=True, slots=True)
class GroupsKernel(Twin):
    """The twin of one ``Groups``; sizes of a group that are no power of two, or too large, are left to the codec."""

    codec: Groups

    takes_replay: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in DTYPES

    @property
    def replays(self) -> bool:
        """The codec itself would draw the same dither in every replay."""
        return fits(self.codec.group)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        if not self.reaches(x.dtype, x.numel()):
            return self.codec.encode(x, bound, seed=seed)
        return self.codec.payload(self.codec.check(x), *self._encode(x, x.numel(), seed, replay))

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, writer = encoded.spec, GroupsKernel(of_payload(encoded))
        if not writer.reaches(spec.dtype, spec.numel):
            return self.codec.decode(encoded)
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        writer._decode(encoded, flat)
        return layout.restore(flat, spec)

    def encode_rows(self, rows: Tensor, index: Tensor, *, seed: int, replay: Replay | None = None) -> dict[str, Tensor]:
        """What ``encode(rows[index])`` stores, without that copy; rows are of whole groups (``reaches``)."""
        per_row = rows.shape[1] // self.codec.group
        stored = self._encode(rows, index.numel() * rows.shape[1], seed, replay, index, per_row)
        return dict(zip(("low", "scale", "codes"), stored, strict=True))

    def decode_rows(self, encoded: Encoded, rows: Tensor, index: Tensor) -> None:
        """``rows[index] = decode(encoded)``, likewise."""
        self._decode(encoded, rows, index, rows.shape[1] // self.codec.group)

    def reaches(self, dtype: torch.dtype, count: int, row: int = 0) -> bool:
        """Whether there is anything to do and the kernels can do it; ``row`` is how long a row is, where there are."""
        return self.accepts(dtype) and count > 0 and fits(self.codec.group) and row % self.codec.group == 0

    def _encode(
        self,
        x: Tensor,
        count: int,
        seed: int,
        replay: Replay | None,
        index: Tensor | None = None,
        per_row: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor]:
        codec, groups = self.codec, -(-count // self.codec.group)
        low = torch.empty(groups, dtype=x.dtype, device=x.device)
        scale = torch.empty(groups, dtype=torch.int16, device=x.device)
        codes = torch.empty(codec.codes_nbytes(count), dtype=torch.uint8, device=x.device)
        tile = _tile(codec, x.dtype)
        if count:
            _encode[(-(-groups // tile),)](
                x, low, scale, codes, index, replay.number if replay is not None else None, count, per_row,
                *dither.keys(seed),
                BITS=codec.bits, GROUP=codec.group, GROUPS=tile, CHOSEN=index is not None,
                DITHER=codec.rounding == "stochastic", REPLAYED=replay is not None, num_warps=_WARPS, **_EXACT,
            )  # fmt: skip
        return low, scale.view(torch.bfloat16), codes

    def _decode(self, encoded: Encoded, y: Tensor, index: Tensor | None = None, per_row: int = 1) -> None:
        codec, spec = self.codec, encoded.spec
        low, scale, codes = codec.stored(encoded)
        tile = _tile(codec, spec.dtype)
        if spec.numel:
            _decode[(-(-low.numel() // tile),)](
                y, low, scale, codes, index, spec.numel, per_row,
                BITS=codec.bits, GROUP=codec.group, GROUPS=tile, CHOSEN=index is not None,
                LARGEST=torch.finfo(spec.dtype).max, SOFT=spec.dtype == torch.bfloat16 and interpreted(),
                num_warps=_WARPS, **_EXACT,
            )  # fmt: skip


def fits(group: int) -> bool:
    """Whether there are kernels for groups of this size."""
    return group <= _LARGEST_GROUP and group & (group - 1) == 0


def _tile(codec: Groups, dtype: torch.dtype) -> int:
    """Groups to a program: as many as give every thread one vector of each part, and so no two threads the same byte.

    A vector has at most 16 bytes, and all that a thread holds at most 32 values.
    """
    places = codec.group // codec.parts
    vector = min(16 // dtype.itemsize, 32 // codec.parts)
    return max(32 * _WARPS * vector // places, 1)


@triton.jit
def _begin(index_ptr, start, group, left, per_row, GROUP: tl.constexpr, CHOSEN: tl.constexpr):
    """Where groups begin: one after the other, or in chosen rows of ``per_row`` groups each."""
    if CHOSEN:
        number = start // GROUP + group
        row = tl.load(index_ptr + number // per_row, mask=group * GROUP < left, other=0)
        return tl.multiple_of((row * per_row + number % per_row) * GROUP, GROUP)
    else:
        return start + group * GROUP


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(
    x_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, number_ptr, count, per_row, low_key, high_key,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, DITHER: tl.constexpr,
    REPLAYED: tl.constexpr,
):  # fmt: skip
    low_key = key_of(low_key, number_ptr, REPLAYED)
    start = tl.program_id(0).to(tl.int64) * (GROUPS * GROUP)
    if start + GROUPS * GROUP <= count:
        _encode_tile(
            x_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row, low_key, high_key,
            BITS, GROUP, GROUPS, CHOSEN, DITHER, WHOLE=True,
        )  # fmt: skip
    else:
        _encode_tile(
            x_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row, low_key, high_key,
            BITS, GROUP, GROUPS, CHOSEN, DITHER, WHOLE=False,
        )  # fmt: skip


@triton.jit
def _encode_tile(
    x_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row, low_key, high_key,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, DITHER: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = max(4, PER_BYTE)
    PLACES: tl.constexpr = GROUP // PARTS
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, PLACES)[None, :]
    at = group[:, None] * GROUP + place
    left = tl.minimum(count - start, GROUPS * GROUP).to(tl.int32)  # elements of this program
    source = x_ptr + _begin(index_ptr, start, group, left, per_row, GROUP, CHOSEN)[:, None] + place
    for part in tl.static_range(PARTS):
        if WHOLE:
            x = widen(tl.load(source + part * PLACES))
            least, most = x, x
        else:
            here = at + part * PLACES < left
            x = widen(tl.load(source + part * PLACES, mask=here, other=0.0))
            least, most = tl.where(here, x, float("inf")), tl.where(here, x, float("-inf"))
        if part == 0:
            parts, lowest, highest = (x,), least, most
        else:
            parts = parts + (x,)  # type: ignore[assignment] # noqa: RUF005
            lowest, highest = lower_of(lowest, least), higher_of(highest, most)
    low = tl.reduce(lowest, 1, lower_of) + 0.0  # of zeros of both signs, the positive one
    span = tl.reduce(highest, 1, higher_of) - low
    sound = span < 8.507059173023462e37  # 2**126; not where it is NaN
    step = tl.maximum(span * (1.0 / ((1 << BITS) - 1)), 1.1754943508222875e-38)  # 2**-126
    bits = (step.to(tl.int32, bitcast=True) + 0xFFFC) & -65536
    scale = tl.where(sound, tl.where(span > 0, bits >> 16, 0), 0x7FC0).to(tl.int16)
    exists = group * GROUP < left
    first = start // GROUP
    tl.store(low_ptr + first + group, narrow(tl.where(sound, low, 0.0), low_ptr.dtype.element_ty), mask=exists)
    tl.store(scale_ptr + first + group, scale, mask=exists)

    inverse = reciprocal(bits.to(tl.float32, bitcast=True))
    byte_at = group[:, None] * (GROUP // PER_BYTE) + place
    for part in tl.static_range(PARTS):
        if DITHER and part % 4 == 0:
            index = (start // 4).to(tl.uint32) + (group[:, None] * (GROUP // 4) + part // 4 * PLACES + place)
            word = hash_word(index.to(tl.uint32), low_key, high_key)
        # No code needs clipping, but ptxas for sm_100 would fuse the product with the sum if nothing were in between.
        t = tl.minimum((parts[part] - low[:, None]) * inverse[:, None], (1 << BITS) - 1.0)
        if DITHER:
            byte = (word >> (part % 4 * 8)) & 0xFF
            t = t + tl.fma(byte.to(tl.float32), 0.00390625, -0.498046875)  # exact
        # Adding 1.5 * 2**23 rounds to the nearest integer, ties to even, and leaves it in the lowest bits.
        code = (t + 12582912.0).to(tl.int32, bitcast=True)
        if not WHOLE:
            code = tl.where(at + part * PLACES < left, code, 0)
        if part % PER_BYTE == 0:
            packed = code
        else:
            packed += code << (part % PER_BYTE * BITS)
        if part % PER_BYTE == PER_BYTE - 1:
            packed = tl.where(sound[:, None], packed, 0).to(tl.uint8)
            target = codes_ptr + start // PER_BYTE + (byte_at + part // PER_BYTE * PLACES)
            if WHOLE:
                tl.store(target, packed)
            else:
                tl.store(target, packed, mask=at + part // PER_BYTE * PER_BYTE * PLACES < left)


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(
    y_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, count, per_row,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, LARGEST: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (GROUPS * GROUP)
    if start + GROUPS * GROUP <= count:
        _decode_tile(
            y_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row,
            BITS, GROUP, GROUPS, CHOSEN, LARGEST, SOFT, WHOLE=True,
        )  # fmt: skip
    else:
        _decode_tile(
            y_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row,
            BITS, GROUP, GROUPS, CHOSEN, LARGEST, SOFT, WHOLE=False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    y_ptr, low_ptr, scale_ptr, codes_ptr, index_ptr, start, count, per_row,
    BITS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CHOSEN: tl.constexpr, LARGEST: tl.constexpr,
    SOFT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    PER_BYTE: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = max(4, PER_BYTE)
    PLACES: tl.constexpr = GROUP // PARTS
    group = tl.arange(0, GROUPS)
    place = tl.arange(0, PLACES)[None, :]
    at = group[:, None] * GROUP + place
    left = tl.minimum(count - start, GROUPS * GROUP).to(tl.int32)
    target = y_ptr + _begin(index_ptr, start, group, left, per_row, GROUP, CHOSEN)[:, None] + place
    exists = group * GROUP < left
    first = start // GROUP
    low = widen(tl.load(low_ptr + first + group, mask=exists, other=0.0))[:, None]
    scale = widen(tl.load(scale_ptr + first + group, mask=exists, other=0.0))[:, None]
    byte_at = group[:, None] * (GROUP // PER_BYTE) + place
    for part in tl.static_range(PARTS):
        if part % PER_BYTE == 0:
            source = codes_ptr + start // PER_BYTE + (byte_at + part // PER_BYTE * PLACES)
            if WHOLE:
                byte = tl.load(source).to(tl.int32)
            else:
                byte = tl.load(source, mask=at + part * PLACES < left, other=0).to(tl.int32)
        code = (byte >> (part % PER_BYTE * BITS)) & ((1 << BITS) - 1)
        # The product is exact, so that fusing it with the sum changes nothing.
        value = tl.fma(code.to(tl.float32), scale, low)
        value = tl.minimum(value, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if SOFT:
            value = narrow(round_bf16(value), y_ptr.dtype.element_ty)
        else:
            value = value.to(y_ptr.dtype.element_ty)
        if WHOLE:
            tl.store(target + part * PLACES, value)
        else:
            tl.store(target + part * PLACES, value, mask=at + part * PLACES < left)
