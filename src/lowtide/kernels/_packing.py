"""Views with gaps, made dense by one launch (packing.cu): queries, keys and values are often parts of one projection.

Torch copies such a view value by value. Here rows of it are copied in units of 16 bytes, where rows, the distances
between them and their start are whole units.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from lowtide.coding import layout
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import current_stream

PROGRAM = _nvrtc.Program.read("packing", "dtypes.cuh", "packing.cu")
KERNEL = "pack"

_ARGS = struct.Struct("<2Q7I4x")
_THREADS, _TILE = 256, 1024  # of a block: its threads, and the units that it has on their way at once; as in packing.cu
_BLOCKS = 6  # on a multiprocessor, as in packing.cu
_UNIT = 16  # bytes
_END = 1 << 31  # of what the kernel counts and divides


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the units of a view lie: ``gaps`` has inverse, shift and gap of rows, then of blocks of rows."""

    stride: tuple[int, ...]  # of the packed tensor
    count: int
    gaps: tuple[int, int, int, int, int, int]

    @classmethod
    def of(cls, shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> Geometry | None:
        """None where the kernel does not reach: dense tensors, more than two distances, parts of units, huge ones."""
        packed = layout.dense_stride(shape, stride)
        run, *outer = _collapsed(shape, stride, packed)
        lengths = [run[0], *(step for _, step in outer)]
        if 0 in shape or not 1 <= len(outer) <= 2 or any(length * itemsize % _UNIT for length in lengths):
            return None
        gaps: list[int] = []
        count = end = reach = run[0] * itemsize // _UNIT  # units so far, where they end, and the memory they lie in
        for size, step in outer:
            pitch = step * itemsize // _UNIT
            gaps += [*inverse(count), (pitch - end) % (1 << 32)]
            count, end, reach = count * size, pitch * size, reach + pitch * (size - 1)
        if max(count, reach) >= _END:
            return None
        return cls(packed, count, tuple(gaps + [0] * (6 - len(gaps))))  # type: ignore[arg-type]


def packed(x: Tensor) -> Tensor:
    """``x.clone()`` of a tensor that needs no gradient: a dense copy with the same bits and the same order of axes.

    Runs on the current stream and waits for nothing; it can be captured.
    """
    if not _has_kernel(x) or x.is_conj() or x.is_neg():
        return x.clone()
    geometry = _geometry(x.shape, x.stride(), x.dtype.itemsize)
    index = x.device.index or 0
    if geometry is None or x.data_ptr() % _UNIT or (function := _function(index)) is None:
        return x.clone()
    copy = torch.empty_strided(x.shape, geometry.stride, dtype=x.dtype, device=x.device)
    tiles = -(-geometry.count // _TILE)
    rounds = -(-tiles // _at_once(index))
    blocks = -(-tiles // rounds)  # which have as many tiles as their neighbours, or one less
    arguments = _ARGS.pack(x.data_ptr(), copy.data_ptr(), geometry.count, *geometry.gaps)
    function.launch(blocks, _THREADS, 0, arguments, current_stream(index))
    return copy


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and _nvrtc.available()


_geometry = lru_cache(maxsize=4096)(Geometry.of)


def _collapsed(shape: tuple[int, ...], stride: tuple[int, ...], order: tuple[int, ...]) -> list[tuple[int, int]]:
    """Sizes and strides, the innermost first, which has stride 1; axes that follow without a gap are one."""
    axes = [(1, 1)]
    for _, size, step in sorted(zip(order, shape, stride, strict=True)):
        inner, inner_step = axes[-1]
        if size != 1 and step == inner * inner_step:
            axes[-1] = (inner * size, inner_step)
        elif size != 1:
            axes.append((size, step))
    return axes


def inverse(divisor: int) -> tuple[int, int]:
    """(m, s) with i * m >> s == i // divisor for every i below 2 ** 31; m is below 2 ** 32.

    m * divisor exceeds 2 ** s by less than divisor <= 2 ** (s - 31), so i * m / 2 ** s exceeds i / divisor by less
    than 1 / divisor, too little to reach the next whole number.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


@cache
def _at_once(device: int) -> int:
    """Blocks that the device runs together."""
    return torch.cuda.get_device_properties(device).multi_processor_count * _BLOCKS


_FUNCTIONS: dict[int, _nvrtc.Function] = {}


def _function(device: int) -> _nvrtc.Function | None:
    """None while a graph is captured, if nothing has been packed before: no kernel is loaded then."""
    if device not in _FUNCTIONS:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return None
        _FUNCTIONS[device] = PROGRAM.function(KERNEL, device)
    return _FUNCTIONS[device]
