"""Bounds of rows in one launch (rows.cu): ``BoundRule.resolve`` and ``Grid.of`` together, for rows that lie in a row.

A bound per row belongs to the rows at hand and is worked out at every save: by itself some thirty small launches.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from lowtide.bounds import BoundRule, BoundSource
from lowtide.coding import grid
from lowtide.coding.grid import Grid
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._sz_jobs import TYPES
from lowtide.records import Bound

PROGRAM = _nvrtc.Program.read("rows", "dtypes.cuh", "rows.cu")

_ARGS = struct.Struct("<5Q2Q3dfI")
_THREADS = 256  # of a block, as in rows.cu
_UNITS = ("std", "absolute")


def measure(x: Tensor, source: BoundSource, axes: tuple[int, ...], rounding: str) -> tuple[Bound, Grid] | None:
    """The bound of ``source`` for each row of ``x`` and the grid it leads to; None where the kernel does not reach.

    A standard deviation differs from torch's by roundings of float32; all else is equal bit for bit.
    """
    if not _reaches(x, source, axes):
        return None
    assert isinstance(source, BoundRule)
    sizes = tuple(x.shape[: len(axes)])
    rows = math.prod(sizes)
    length = x.numel() // rows
    step = torch.empty(rows, dtype=torch.bfloat16, device=x.device)  # of its own: it lives as long as a payload
    bound = torch.empty(sizes, dtype=torch.float64, device=x.device)
    inverse, promised = torch.empty(2 * rows, dtype=torch.float32, device=x.device).chunk(2)
    arguments = _ARGS.pack(
        x.data_ptr(), bound.data_ptr(), inverse.data_ptr(), promised.data_ptr(), step.data_ptr(), rows, length,
        source.value, *grid.scale(x.dtype, rounding), source.unit == "std",
    )  # fmt: skip
    lanes, index = _lanes(length), x.device.index or 0
    function = _function(TYPES[x.dtype], lanes, index)
    function.launch(-(-rows * lanes // _THREADS), _THREADS, 0, arguments, current_stream(index))
    return Bound(bound, axes), Grid(axes, rounding, step, None, inverse, promised)


def _reaches(x: Tensor, source: BoundSource, axes: tuple[int, ...]) -> bool:
    return (
        isinstance(source, BoundRule)
        and source.unit in _UNITS
        and 0 < len(axes) < x.dim()
        and axes == tuple(range(len(axes)))
        and x.dtype in TYPES
        and x.is_contiguous()
        and x.numel() > 0
    )


def _lanes(length: int) -> int:
    """Threads for a row: few for a short one, so that most of them have values."""
    return 8 if length <= 256 else 32 if length <= 8192 else _THREADS


_FUNCTIONS: dict[tuple[str, int, int], _nvrtc.Function] = {}


def _function(dtype: str, lanes: int, device: int) -> _nvrtc.Function:
    key = (dtype, lanes, device)
    if key not in _FUNCTIONS:
        _FUNCTIONS[key] = PROGRAM.function(expression(dtype, lanes), device)
    return _FUNCTIONS[key]


def expression(dtype: str, lanes: int) -> str:
    """The template of a kernel, as NVRTC names it."""
    return f"measure<{dtype}, {lanes}>"
