"""Twin of the codec ``cusz`` for NVIDIA GPUs: quantiser (cusz.cu), prediction and coder (integers.cu).

Where memory has another order than planes, torch turns codes round between the two: two bytes a value.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.codecs.cusz import CuSz, has_too_many
from lowtide.codecs.sz import stored_grid
from lowtide.coding import dither, escapes, layout, planes
from lowtide.coding.grid import Grid
from lowtide.coding.planes import Planes
from lowtide.kernels import _integers, _nvrtc
from lowtide.kernels._base import Twin
from lowtide.kernels._integers import Row
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._sz_jobs import TYPES
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["CuSzKernel"]

PROGRAM = _nvrtc.Program.read("cusz", "dtypes.cuh", "four.cuh", "warp.cuh", "dither.cuh", "cusz.cu")

_ARGS = struct.Struct("<6Q5I6I4x")
_THREADS = 256  # of a block, as in cusz.cu
_NO_CODE = -(1 << 15)


@dataclass(frozen=True, slots=True)
class CuSzKernel(Twin):
    """The twin of one ``CuSz``; what its kernels do not reach is left to the codec."""

    codec: CuSz

    takes_bound: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in TYPES and self.codec.coder == "blocks" and _nvrtc.available()

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        spec = layout.spec_of(x)
        if x.dtype not in TYPES or not _reaches(spec, () if bound is None else bound.axes):
            return self.codec.encode(x, bound, seed=seed)
        grid = self.codec.grid(x, bound)
        numbers = torch.zeros(3, dtype=torch.int64, device=x.device)  # values without a code, and two costs
        q = torch.empty(spec.numel, dtype=torch.int16, device=x.device)
        flat = layout.memory_view(x)
        _launch("quantise", spec, grid, seed, flat, q, numbers)
        shape, prediction = Planes.of(spec.shape), self.codec.prediction
        codes = shape.split(layout.restore(q, spec))
        row = Row(codes.flatten(), maps=shape, prediction=prediction, costs=numbers[1:])
        if prediction == "auto":
            _integers.survey(row)
        measured = _integers.measure(row)
        words, lost, plain, predicted = _integers.lengths([measured], numbers)
        if has_too_many(lost, spec):
            return self.codec.raw(x)
        outside = escapes.gather(flat, q == _NO_CODE) if lost else escapes.none(flat)
        is_predicted = predicted < plain if prediction == "auto" else prediction == "lorenzo"
        return self.codec.payload(spec, grid, seed, is_predicted, measured.pack(words), outside)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, meta = encoded.spec, encoded.meta
        if meta["kind"] == "raw" or spec.dtype not in TYPES or not _reaches(spec, meta["axes"]):
            return self.codec.decode(encoded)
        if not _integers.is_readable(meta["codes"]):
            return self.codec.decode(encoded)
        shape = Planes.of(spec.shape)
        codes = torch.empty(spec.numel, dtype=torch.int16, device=spec.device)
        _integers.read(encoded, meta["codes"], codes)
        if meta["predicted"]:
            codes = _integers.accumulate(codes, shape)
        as_codes = TensorSpec(spec.shape, spec.stride, torch.int16, spec.device)
        q = layout.memory_view(planes.join(codes, as_codes))
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        _launch("restore", spec, stored_grid(encoded), meta["seed"], flat, q)
        escapes.scatter(flat, encoded, checked=False)
        return layout.restore(flat, spec)


def _reaches(spec: TensorSpec, axes: tuple[int, ...]) -> bool:
    return 0 < spec.numel <= _integers.MOST and len(layout.index_terms(spec, axes)) <= 2


def _launch(
    kernel: str, spec: TensorSpec, grid: Grid, seed: int, values: Tensor, codes: Tensor, lost: Tensor | None = None
) -> None:
    terms = layout.index_terms(spec, grid.axes)
    divide, modulo, times = zip(*terms, *[(1, 1, 1)] * (2 - len(terms)), strict=True)
    keys = [key & 0xFFFFFFFF for key in dither.keys(seed)]
    tables = [grid.inverse, grid.promised, grid.step, lost]
    pointers = [0 if table is None else table.data_ptr() for table in tables]
    arguments = _ARGS.pack(
        values.data_ptr(), codes.data_ptr(), *pointers, spec.numel, *keys, grid.rounding == "dither", len(terms),
        *divide, *modulo, *times,
    )  # fmt: skip
    device = spec.device.index or 0
    function = _function(f"{kernel}<{TYPES[spec.dtype]}>", device)
    function.launch(-(-spec.numel // (4 * _THREADS)), _THREADS, 0, arguments, current_stream(device))


@cache
def _function(kernel: str, device: int) -> _nvrtc.Function:
    return PROGRAM.function(kernel, device)
