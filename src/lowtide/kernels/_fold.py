"""``lowtide.coding.fold`` on NVIDIA GPUs (fold.cu): each function one launch, the same bits.

Elsewhere, and for what the kernels do not reach, torch does the work.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import cast

import torch
from torch import Tensor

from lowtide.coding import fold as plain
from lowtide.coding import layout
from lowtide.coding.fold import Norm
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._packing import inverse
from lowtide.kernels._sz_jobs import TYPES
from lowtide.records import Bound, TensorSpec

PROGRAM = _nvrtc.Program.read("fold", "dtypes.cuh", "four.cuh", "folding.cuh", "fold.cu")


class Folding:
    """A pair that is to be coded as one tensor. Where the coder's kernels fold it themselves, that tensor is never in
    memory; to all others this looks like it, but for its values (``folded``)."""

    __slots__ = ("device", "dtype", "made", "nbytes", "shape", "source", "table")

    def __init__(self, source: Tensor, made: Tensor, table: Tensor) -> None:
        """``made`` is laid out as ``source``, the input of the norm."""
        self.source, self.made, self.table = source, made, table
        self.shape, self.device, self.dtype = source.shape, source.device, table.dtype
        self.nbytes: int = source.nbytes + made.nbytes

    @property
    def is_cuda(self) -> bool:
        return self.source.is_cuda

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.of(cast(Tensor, self))

    def stride(self) -> tuple[int, ...]:
        return self.source.stride()

    def dim(self) -> int:
        return self.source.dim()

    def numel(self) -> int:
        return self.source.numel()

    def parts(self) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """What kernels read, and where they find what is not the first of it."""
        return (self.source, self.made, self.table), (self.made.data_ptr(), self.table.data_ptr())

    def folded(self) -> Tensor:
        """Its values."""
        return fold(self.source, self.made, self.table)


_ARGS, _CHANNELS = struct.Struct("<4Q7I4x"), struct.Struct("<7Q2I")
_THREADS, _UNITS = 256, 2  # of a block; of four values, to a thread: as in fold.cu
_RUNS, _INNER, _ANY = range(3)
_SOURCE, _MADE = range(2)
_END = (1 << 31) - 4 * _THREADS * _UNITS  # of what the kernels count

mask = plain.mask


def table(norm: Norm, source: Bound, made: Bound | None, dtype: torch.dtype) -> Tensor:
    """As ``lowtide.coding.fold.table``."""
    bounds = [None if bound is None else bound.value for bound in (source, made)]
    index = norm.mean.device.index or 0
    function = _function("tabulate", index) if _reaches(norm, bounds, dtype) else None
    if function is None:
        return plain.table(norm, source, made, dtype)
    channels = norm.mean.numel()
    numbers = torch.empty((plain.ROWS, channels), dtype=torch.float32, device=norm.mean.device)
    pointers = [part.data_ptr() if part is not None else 0 for part in (*norm, *bounds)]
    arguments = _CHANNELS.pack(*pointers, numbers.data_ptr(), channels, source.value.numel() > 1)
    function.launch(-(-channels // _THREADS), _THREADS, 0, arguments, current_stream(index))
    return numbers


def fold(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """As ``lowtide.coding.fold.fold``; ``y`` is laid out as ``x``."""
    t = _launch(f"fold<{TYPES.get(x.dtype)}>", x, y, table, torch.float32)
    return t if t is not None else plain.fold(x, y, table)


def source(t: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``lowtide.coding.fold.source``."""
    x = _launch(f"unfold<{TYPES.get(dtype)}, {_SOURCE}>", t, None, table, dtype)
    return x if x is not None else plain.source(t, table, dtype)


def made(t: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``lowtide.coding.fold.made``."""
    y = _launch(f"unfold<{TYPES.get(dtype)}, {_MADE}>", t, None, table, dtype)
    return y if y is not None else plain.made(t, table, dtype)


def gate(t: Tensor, gradient: Tensor, table: Tensor) -> Tensor:
    """As ``lowtide.coding.fold.gate``; ``table`` is the one of ``t``."""
    gated = _launch(f"gate<{TYPES.get(gradient.dtype)}>", t, gradient, table, gradient.dtype)
    return gated if gated is not None else plain.gate(t, gradient)


def _launch(kernel: str, start: Tensor, other: Tensor | None, table: Tensor, dtype: torch.dtype) -> Tensor | None:
    """What a kernel makes of ``start``, in ``dtype`` and laid out alike; None where it does not reach."""
    places = _places(TensorSpec.of(start)) if _has_kernel(start) and table.dtype == torch.float32 else None
    device = start.device.index or 0
    function = None if places is None else _function(kernel, device)
    if places is None or function is None:
        return None
    result = torch.empty_strided(start.shape, start.stride(), dtype=dtype, device=start.device)
    second = 0 if other is None else other.data_ptr()
    arguments = _ARGS.pack(start.data_ptr(), second, result.data_ptr(), table.data_ptr(), *places)
    blocks = -(-start.numel() // (4 * _THREADS * _UNITS))
    function.launch(blocks, _THREADS, 0, arguments, current_stream(device))
    return result


@lru_cache(maxsize=4096)
def _places(spec: TensorSpec) -> tuple[int, ...] | None:
    """How values of a dense tensor find their channels; None for what is empty, or too large to count."""
    count = spec.numel
    if not 0 < count < _END or not layout.is_dense(spec.shape, spec.stride):
        return None
    terms = layout.index_terms(spec, (1,))
    run, channels = terms[0][:2] if terms else (1 << 31, 1)
    where = _RUNS if run % 4 == 0 else _INNER if run == 1 and channels % 4 == 0 else _ANY
    return count, channels, *inverse(run), *inverse(channels), where


def _reaches(parts: Norm, bounds: list[Tensor | None], dtype: torch.dtype) -> bool:
    floats = all(part.dtype == torch.float32 and part.is_contiguous() for part in parts)
    doubles = all(part is None or (part.dtype == torch.float64 and part.device == parts[0].device) for part in bounds)
    return _has_kernel(parts[0]) and dtype in TYPES and floats and doubles and parts[0].numel() > 0


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and _nvrtc.available()


_FUNCTIONS: dict[tuple[str, int], _nvrtc.Function] = {}


def _function(kernel: str, device: int) -> _nvrtc.Function | None:
    """None while a graph is captured, if the kernel has not run before: none is loaded then."""
    key = (kernel, device)
    if key not in _FUNCTIONS:
        with torch.cuda.device(device):
            if torch.cuda.is_current_stream_capturing():
                return None
        name, _, dtype = kernel.rstrip(">").partition("<")
        if name == "fold":  # backward is to find its own compiled
            for part in (_SOURCE, _MADE):
                PROGRAM.compile_ahead(f"unfold<{dtype}, {part}>", device)
            PROGRAM.compile_ahead(f"gate<{dtype}>", device)
        _FUNCTIONS[key] = PROGRAM.function(kernel, device)
    return _FUNCTIONS[key]
