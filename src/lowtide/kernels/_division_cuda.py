"""The codec ``division`` on NVIDIA GPUs, in CUDA C++ (division.cu): bytes and values of ``lowtide.codecs.division``.

Planes that are contiguous and fit into shared memory are read and written once; the twin in Triton has the others.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.codecs.division import Division, of_payload
from lowtide.coding import dither, layout
from lowtide.coding.block_means import Blocks
from lowtide.kernels import _nvrtc
from lowtide.kernels._base import Twin
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._sz_jobs import TYPES
from lowtide.kernels._workspaces import Replay
from lowtide.kernels.division import DivisionKernel
from lowtide.records import Bound, Encoded, TensorSpec

PROGRAM = _nvrtc.Program.read("division", "dtypes.cuh", "four.cuh", "dither.cuh", "division.cu")

_HEAD, _COMMON = struct.Struct("<6Q2I"), struct.Struct("<9I4I5f")
_THREADS = 256  # as in division.cu
_VALUES = 4096  # of a tile of small planes
_SHARED_NBYTES = 96 << 10  # that a block of threads has on every GPU from compute capability 8.0 on
_PIECE = 8  # values that a lane adds up
_SLACK = 32  # bytes past a tile that padding of its last plane reads


@dataclass(frozen=True, slots=True)
class DivisionCuda(Twin):
    """The twin of one ``Division``."""

    codec: Division

    replays: ClassVar[bool] = True
    takes_replay: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in TYPES and not self.codec.faithful

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        codec = self.codec
        spec = codec.check(x)
        job = job_of(spec, codec)
        if job is None:
            return DivisionKernel(codec).encode(x, bound, seed=seed, replay=replay)
        stored = codec.room(spec, job.blocks)
        number = replay.number_at if replay is not None else 0
        job.run(job.encoder, job.encoder_shared, x, stored, number, dither.keys(seed))
        return codec.payload(spec, stored)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, writer = encoded.spec, of_payload(encoded)
        job = job_of(spec, writer)
        if job is None:
            return DivisionKernel(self.codec).decode(encoded)
        stored = dict(zip(("mean", "low", "scale", "codes"), writer.stored(encoded), strict=True))
        y = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        job.run(job.decoder, job.decoder_shared, y, stored)
        return y


@dataclass(frozen=True, slots=True)
class Job:
    """All that launches for tensors of one shape have in common."""

    blocks: Blocks
    device: int
    grid: int
    encoder: str
    decoder: str
    encoder_shared: int
    decoder_shared: int
    common: bytes

    def run(
        self,
        kernel: str,
        shared: int,
        values: Tensor,
        stored: dict[str, Tensor],
        number: int = 0,
        keys: tuple[int, int] = (0, 0),
    ) -> None:
        head = _HEAD.pack(
            values.data_ptr(), stored["mean"].data_ptr(), stored["low"].data_ptr(), stored["scale"].data_ptr(),
            stored["codes"].data_ptr(), number, keys[0] & 0xFFFFFFFF, keys[1] & 0xFFFFFFFF,
        )  # fmt: skip
        function = _function(kernel, self.device)
        function.launch(self.grid, _THREADS, shared, head + self.common, current_stream(self.device))


@lru_cache(maxsize=1024)
def job_of(spec: TensorSpec, codec: Division) -> Job | None:
    """None for what the kernels do not reach: other layouts and dtypes, large planes, nothing at all."""
    if not spec.numel or spec.dtype not in TYPES or codec.faithful or not layout.is_contiguous(spec):
        return None
    blocks = codec.blocks(spec)
    planes, tall, wide, places = blocks.planes, blocks.tall, blocks.wide, codec.places(blocks)
    together = _together(planes.area, planes.count, spec.dtype.itemsize)
    neighbours = 4 if planes.width % 4 == wide % 4 == 0 else 2 if planes.width % 2 == 0 else 1
    at_once = 4 if places % 4 == planes.area % 4 == 0 else 1
    encoder_shared = _aligned(together * (16 + 2 * blocks.per_plane)) + 4 * together * planes.area + _SLACK
    decoder_shared = _aligned(4 * together * (1 + blocks.per_plane))
    if at_once == 1:
        decoder_shared += together * planes.area * spec.dtype.itemsize
    if max(encoder_shared, decoder_shared) > _SHARED_NBYTES or planes.count >= 1 << 31:
        return None
    kind, shape = f"{TYPES[spec.dtype]}, {codec.bits}", f"{tall}, {wide}, {neighbours}"
    piece = min(wide, _PIECE)
    tail, full = planes.width % piece or piece, _flag(places * codec.parts == planes.area)
    shares = blocks.shares(torch.float32, torch.device("cpu"))
    common = _COMMON.pack(
        planes.count, together, planes.height, planes.width, planes.area, blocks.rows, blocks.columns,
        blocks.per_plane, places, *map(_inverse, (planes.width, blocks.columns, blocks.per_plane, places // at_once)),
        *(float(shares[row, column]) for row in (0, -1) for column in (0, -1)), torch.finfo(spec.dtype).max,
    )  # fmt: skip
    return Job(
        blocks,
        spec.device.index or 0,
        -(-planes.count // together),
        f"encode<{kind}, {_flag(codec.rounding == 'stochastic')}, {shape}, {tail}, {at_once}, {full}>",
        f"decode<{kind}, {shape}, {at_once}, {full}, {_flag(blocks.per_plane == 1)}>",
        encoder_shared,
        decoder_shared,
        common,
    )


def _together(area: int, count: int, itemsize: int) -> int:
    """Planes of a block of threads: as many as fill it, and so many that all tiles begin at multiples of 16 bytes."""
    step = 16 // gcd(16, area * itemsize)
    if step * area > 4 * _VALUES:
        step = 1
    return min(max(_VALUES // area // step, 1) * step, count)


def _inverse(divisor: int) -> int:
    """By which numbers whose product with the divisor is below 2**31 are divided: ``Divisor`` in division.cu."""
    return -(-(1 << 31) // divisor)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def _flag(value: bool) -> str:
    return "true" if value else "false"


@cache
def _function(kernel: str, device: int) -> _nvrtc.Function:
    return PROGRAM.function(kernel, device)
