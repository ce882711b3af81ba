"""Triton twin of the codec ``division``: the bytes and values of ``lowtide.codecs.division``.

A program encodes some whole planes. It goes through their blocks once, for means and extremes, and then through their
values part by part, as they are packed; the second time they come from a cache as a rule, and memory is read once. A
decoder's program has some places of some planes. Planes are contiguous, or the channels of a channels_last tensor, of
which a program takes neighbours; tensors of other layouts are copied first, which payloads do not show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.codecs.division import Division, of_payload
from lowtide.coding import dither, layout
from lowtide.coding.block_means import Blocks
from lowtide.coding.planes import join
from lowtide.kernels import interpreted
from lowtide.kernels._base import Twin
from lowtide.kernels._pieces import hash_word, higher_of, key_of, lower_of, narrow, reciprocal, round_bf16, widen
from lowtide.kernels._workspaces import Replay
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["DivisionKernel"]

_WARPS = 4
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "low_key", "high_key", "inner", "right", "bottom", "corner"]
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_NBYTES = 8192  # of a program at a time: 64 a thread; half of that for channels_last, whose addresses take registers
_CHANNELS = 16  # neighbours of a channels_last tensor that a program reads together


@dataclass(frozen=True, slots=True)
class DivisionKernel(Twin):
    """The twin of one ``Division``; what was published (``faithful``) is left to the codec."""

    codec: Division

    replays: ClassVar[bool] = True
    takes_replay: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES and not self.codec.faithful

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        codec = self.codec
        spec = codec.check(x)
        if not spec.numel or not self.accepts(x.dtype):
            return codec.encode(x, bound, seed=seed)
        geometry = Geometry.of(spec, codec)
        if geometry is None:
            x = x.contiguous()
            geometry = Geometry.of(TensorSpec.of(x), codec)
        assert geometry is not None, "whatever is contiguous has one"
        stored = codec.room(spec, geometry.blocks)
        bits = {name: stored[name].view(torch.int16) for name in ("mean", "low", "scale")}
        _encode[(geometry.tiles,)](
            x, bits["mean"], bits["low"], bits["scale"], stored["codes"],
            replay.number if replay is not None else None,
            geometry.blocks.planes.count, geometry.channels, *dither.keys(seed), *geometry.shares,
            **geometry.constants, COLUMNS=geometry.columns,
            DITHER=codec.rounding == "stochastic", REPLAYED=replay is not None, num_warps=_WARPS, **_EXACT,
        )  # fmt: skip
        return codec.payload(spec, stored)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, writer = encoded.spec, of_payload(encoded)
        if not spec.numel or not DivisionKernel(writer).accepts(spec.dtype):
            return self.codec.decode(encoded)
        mean, low, scale, codes = writer.stored(encoded)
        geometry = Geometry.of(spec, writer)
        if geometry is not None:
            y = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        else:
            y = torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)
            geometry = Geometry.of(TensorSpec.of(y), writer)
        assert geometry is not None, "whatever is contiguous has one"
        across = -(-geometry.constants["PLACES"] // geometry.constants["TAKE"])
        _decode[(geometry.tiles, across)](
            y, mean, low, scale, codes, geometry.blocks.planes.count, geometry.channels,
            **geometry.constants, LARGEST=torch.finfo(spec.dtype).max,
            SOFT=spec.dtype == torch.bfloat16 and interpreted(), num_warps=_WARPS, **_EXACT,
        )  # fmt: skip
        return join(y, spec)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the planes of a tensor lie, and how many of them a program takes.

    ``channels`` is how many planes lie side by side in memory, value by value; 1 where each is contiguous. ``columns``
    of a row of blocks are read at a time. ``shares`` are 1 / the number of values of a block: inside, in the last
    column, in the last row, in both. ``constants`` are what both kernels are compiled for.
    """

    blocks: Blocks
    channels: int
    together: int
    columns: int
    shares: tuple[float, ...]
    constants: Mapping[str, int]

    @staticmethod
    def of(spec: TensorSpec, codec: Division) -> Geometry | None:
        """None for layouts that the kernels do not know, and where there are no values."""
        return _geometry(spec, codec)

    @property
    def tiles(self) -> int:
        """Programs: those of a channels_last tensor do not reach from one sample to the next."""
        per_sample = self.channels if self.channels > 1 else self.blocks.planes.count
        samples = self.blocks.planes.count // per_sample
        return samples * -(-per_sample // self.together)


@lru_cache(maxsize=1024)
def _geometry(spec: TensorSpec, codec: Division) -> Geometry | None:
    blocks = codec.blocks(spec)
    planes, values, channels = blocks.planes, _NBYTES // spec.dtype.itemsize, 1
    if not spec.numel:
        return None
    if layout.is_contiguous(spec):
        columns = min(_power_of_two(planes.width), values // blocks.tall)
        together = min(max(values // (columns * blocks.tall), 1), _power_of_two(planes.count))
    elif planes.is_image and len(spec.shape) == 4 and _is_channels_last(spec):
        channels, values = spec.shape[1], values // 2
        together = min(_CHANNELS, _power_of_two(channels))
        columns = min(_power_of_two(planes.width), values // (together * blocks.tall))
    else:
        return None
    places, shares = codec.places(blocks), blocks.shares(torch.float32, torch.device("cpu"))
    constants = {
        "BITS": codec.bits,
        "HEIGHT": planes.height,
        "WIDTH": planes.width,
        "TALL": blocks.tall,
        "WIDE": blocks.wide,
        "TOGETHER": together,
        "PLACES": places,
        "TAKE": min(max(values // (together * codec.parts), 1), _power_of_two(places)),
        "LAST": channels > 1,
    }
    corners = tuple(float(shares[row, column]) for row in (0, -1) for column in (0, -1))
    return Geometry(blocks, channels, together, max(columns, blocks.wide), corners, constants)


def _is_channels_last(spec: TensorSpec) -> bool:
    _, channels, height, width = spec.shape
    expected = (height * width * channels, 1, width * channels, channels)
    return all(
        size == 1 or stride == want for size, stride, want in zip(spec.shape, spec.stride, expected, strict=True)
    )


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


@triton.jit
def _planes(channels, count, TOGETHER: tl.constexpr, AREA: tl.constexpr, LAST: tl.constexpr):
    """The planes of this program, which of them exist, and where they begin."""
    tile = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, TOGETHER)
    if LAST:
        tiles = (channels + TOGETHER - 1) // TOGETHER
        sample = tile // tiles
        channel = tile % tiles * TOGETHER + index
        return sample * channels + channel, channel < channels, sample * channels * AREA + channel
    else:
        plane = tile * TOGETHER + index
        return plane, plane < count, plane * AREA


@triton.jit
def _add_up(x, SIDE: tl.constexpr):
    """Sums of neighbours along the last axis, pair by pair, as in ``lowtide.coding.block_means``."""
    if SIDE > 1:
        even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], x.shape[2] // 2, 2))
        return _add_up(even + odd, SIDE // 2)
    else:
        return x


@triton.jit
def _round_down(value):
    """To the bfloat16 value below or equal, as float32."""
    bits = value.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _top_half(value):
    """The bits of a bfloat16 value that is held as float32."""
    return (value.to(tl.int32, bitcast=True) >> 16).to(tl.int16)


@triton.jit(do_not_specialize=_RUNTIME)
def _encode(
    x_ptr, mean_ptr, low_ptr, scale_ptr, codes_ptr, number_ptr, count, channels, low_key, high_key, inner, right,
    bottom, corner,
    BITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TOGETHER: tl.constexpr, PLACES: tl.constexpr, TAKE: tl.constexpr, LAST: tl.constexpr, COLUMNS: tl.constexpr,
    DITHER: tl.constexpr, REPLAYED: tl.constexpr,
):  # fmt: skip
    low_key = key_of(low_key, number_ptr, REPLAYED)
    AREA: tl.constexpr = HEIGHT * WIDTH
    ROWS: tl.constexpr = (HEIGHT + TALL - 1) // TALL
    ACROSS: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
    plane, exists, base = _planes(channels, count, TOGETHER, AREA, LAST)
    lowest = tl.full((TOGETHER,), float("inf"), tl.float32)
    highest = tl.full((TOGETHER,), float("-inf"), tl.float32)
    for row in range(ROWS):
        for start in range(0, WIDTH, COLUMNS):
            down = row * TALL + tl.arange(0, TALL)[None, :, None]
            across = start + tl.arange(0, COLUMNS)[None, None, :]
            here = (down < HEIGHT) & (across < WIDTH) & exists[:, None, None]
            if LAST:
                at = base[:, None, None] + (down * WIDTH + across).to(tl.int64) * channels
            else:
                at = base[:, None, None] + (down * WIDTH + across)
            x = widen(tl.load(x_ptr + at, mask=here, other=0.0))
            sums = _add_up(tl.trans(_add_up(x, WIDE), 0, 2, 1), TALL).reshape(TOGETHER, COLUMNS // WIDE)
            block = start // WIDE + tl.arange(0, COLUMNS // WIDE)[None, :]
            last = block == ACROSS - 1
            if row == ROWS - 1:
                share = tl.where(last, corner, bottom)
            else:
                share = tl.where(last, right, inner)
            mean = round_bf16(sums * share)
            where = mean_ptr + plane[:, None] * (ROWS * ACROSS) + row * ACROSS + block
            tl.store(where, _top_half(mean), mask=(block < ACROSS) & exists[:, None])
            spread = tl.broadcast_to(mean[:, None, :, None], (TOGETHER, TALL, COLUMNS // WIDE, WIDE))
            residual = x - spread.reshape(TOGETHER, TALL, COLUMNS)
            # Axis by axis: Triton 3.6 takes the wrong lanes where an axis that was reshaped lies on lanes apart.
            least = tl.reduce(tl.where(here, residual, float("inf")), 2, lower_of)
            most = tl.reduce(tl.where(here, residual, float("-inf")), 2, higher_of)
            lowest = lower_of(lowest, tl.reduce(least, 1, lower_of))
            highest = higher_of(highest, tl.reduce(most, 1, higher_of))
    low = _round_down(lowest + 0.0)  # of zeros of both signs, the positive one
    span = highest - low
    sound = span < 8.507059173023462e37  # 2**126; not where it is NaN
    step = tl.maximum(span * (1.0 / ((1 << BITS) - 1)), 1.1754943508222875e-38)  # 2**-126
    bits = (step.to(tl.int32, bitcast=True) + 0xFFFC) & -65536
    scale = tl.where(sound, tl.where(highest > low, bits >> 16, 0), 0x7FC0).to(tl.int16)
    tl.store(low_ptr + plane, _top_half(tl.where(sound, low, 0.0)), mask=exists)
    tl.store(scale_ptr + plane, scale, mask=exists)
    for start in range(0, ROWS * ACROSS, 16):
        block = start + tl.arange(0, 16)[None, :]
        lost = (block < ROWS * ACROSS) & (exists & ~sound)[:, None]
        zero = tl.zeros((TOGETHER, 16), tl.int16)
        tl.store(mean_ptr + plane[:, None] * (ROWS * ACROSS) + block, zero, mask=lost)
    tl.debug_barrier()  # means that other threads have stored are loaded below

    inverse = reciprocal(bits.to(tl.float32, bitcast=True))
    PER_BYTE: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = max(4, PER_BYTE)
    for start in range(0, PLACES, TAKE):
        place = start + tl.arange(0, TAKE)[None, :]
        for part in tl.static_range(PARTS):
            if DITHER and part % 4 == 0:
                index = plane[:, None] * (PLACES * PARTS // 4) + part // 4 * PLACES + place
                word = hash_word(index.to(tl.uint32), low_key, high_key)
            value = part * PLACES + place
            here = (place < PLACES) & (value < AREA) & exists[:, None]
            if LAST:
                at = base[:, None] + value.to(tl.int64) * channels
            else:
                at = base[:, None] + value
            x = widen(tl.load(x_ptr + at, mask=here, other=0.0))
            block = value // WIDTH // TALL * ACROSS + value % WIDTH // WIDE
            mean = tl.load(mean_ptr + plane[:, None] * (ROWS * ACROSS) + block, mask=here, other=0).to(tl.int32)
            residual = x - (mean << 16).to(tl.float32, bitcast=True)
            t = tl.minimum((residual - low[:, None]) * inverse[:, None], (1 << BITS) - 1.0)
            if DITHER:
                byte = (word >> (part % 4 * 8)) & 0xFF
                t = t + tl.fma(byte.to(tl.float32), 0.00390625, -0.498046875)  # exact
            # Adding 1.5 * 2**23 rounds to the nearest integer, ties to even, and leaves it in the lowest bits.
            code = (t + 12582912.0).to(tl.int32, bitcast=True) & 0xFF
            code = tl.where(here & sound[:, None], code, 0)
            if part % PER_BYTE == 0:
                packed = code
            else:
                packed += code << (part % PER_BYTE * BITS)
            if part % PER_BYTE == PER_BYTE - 1:
                target = codes_ptr + plane[:, None] * (PLACES * PARTS // PER_BYTE) + part // PER_BYTE * PLACES + place
                tl.store(target, packed.to(tl.uint8), mask=(place < PLACES) & exists[:, None])


@triton.jit(do_not_specialize=_RUNTIME)
def _decode(
    y_ptr, mean_ptr, low_ptr, scale_ptr, codes_ptr, count, channels,
    BITS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
    TOGETHER: tl.constexpr, PLACES: tl.constexpr, TAKE: tl.constexpr, LAST: tl.constexpr, LARGEST: tl.constexpr,
    SOFT: tl.constexpr,
):  # fmt: skip
    AREA: tl.constexpr = HEIGHT * WIDTH
    ROWS: tl.constexpr = (HEIGHT + TALL - 1) // TALL
    ACROSS: tl.constexpr = (WIDTH + WIDE - 1) // WIDE
    PER_BYTE: tl.constexpr = 8 // BITS
    PARTS: tl.constexpr = max(4, PER_BYTE)
    plane, exists, base = _planes(channels, count, TOGETHER, AREA, LAST)
    low = widen(tl.load(low_ptr + plane, mask=exists, other=0.0))[:, None]
    scale = widen(tl.load(scale_ptr + plane, mask=exists, other=0.0))[:, None]
    place = tl.program_id(1) * TAKE + tl.arange(0, TAKE)[None, :]
    stored = (place < PLACES) & exists[:, None]
    for part in tl.static_range(PARTS):
        if part % PER_BYTE == 0:
            source = codes_ptr + plane[:, None] * (PLACES * PARTS // PER_BYTE) + part // PER_BYTE * PLACES + place
            byte = tl.load(source, mask=stored, other=0).to(tl.int32)
        code = (byte >> (part % PER_BYTE * BITS)) & ((1 << BITS) - 1)
        value = part * PLACES + place
        here = stored & (value < AREA)
        block = value // WIDTH // TALL * ACROSS + value % WIDTH // WIDE
        mean = widen(tl.load(mean_ptr + plane[:, None] * (ROWS * ACROSS) + block, mask=here, other=0.0))
        # The product is exact, so that fusing it with the sum changes nothing.
        y = tl.fma(code.to(tl.float32), scale, mean + low)
        y = tl.minimum(y, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        y = tl.maximum(y, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
        if SOFT:
            y = narrow(round_bf16(y), y_ptr.dtype.element_ty)
        else:
            y = y.to(y_ptr.dtype.element_ty)
        if LAST:
            at = base[:, None] + value.to(tl.int64) * channels
        else:
            at = base[:, None] + value
        tl.store(y_ptr + at, y, mask=here)
