"""Error-bounded values as in SZ and cuSZ: quantise first, predict integers from integers, code the residuals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.codecs.sz import stored_grid
from lowtide.coding import escapes, integers, layout, lorenzo, planes
from lowtide.coding.grid import Grid
from lowtide.coding.planes import Planes
from lowtide.errors import BoundError, DtypeError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["CuSz"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("nearest", "dither")
_PREDICTIONS = ("auto", "lorenzo", "none")
_MANY = 1 / 8  # of the values: with more escapes than that, the tensor is stored as it is
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24  # elements quantised at a time


@dataclass(frozen=True, slots=True)
class CuSz:
    """For every finite x with bound eb: |x' - x| <= eb in exact arithmetic, the rounding of x' to its dtype included.

    q = round(x / step) on a grid anchored at zero, step a little under 2 eb: ``lowtide.coding.grid`` has the arithmetic
    and the proof. Prediction works on q and is undone exactly, so that it takes no part in the error. NaN, inf, what is
    more than 2046 steps from zero and what a bound of zero governs are stored apart and come back bit for bit. Zeros
    come back as zeros with ``rounding="nearest"``, as published; ``"dither"`` is unbiased under the same bound.

    ``prediction``: ``lorenzo`` predicts from neighbours in the plane (``lowtide.coding.planes``), ``none`` does not;
    ``auto`` takes what gives the smaller codes, which for sparse maps is none. Any shape, any dense layout; ``coder``
    is one of ``lowtide.coding.integers``. Values depend on neither.
    """

    rounding: str = "nearest"
    prediction: str = "auto"
    coder: str = "blocks"

    name: ClassVar[str] = "cusz"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)
        if self.prediction not in _PREDICTIONS:
            raise UnknownNameError("prediction", self.prediction, _PREDICTIONS)
        integers.require_coder(self.coder)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"cusz stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        if bound is None:
            raise BoundError("cusz needs an error bound: pass Bound.absolute(...) or a relative rule")
        spec = layout.spec_of(x)
        bound.check_shape(spec)
        grid = Grid.of(bound, x.dtype, x.device, self.rounding)
        flat = layout.memory_view(x)
        q, lost = _quantise(flat, spec, grid, seed)
        if int(lost.sum()) > spec.numel * _MANY:
            return Encoded(self.name, self.version, spec, {"kind": "raw"}, {"raw": flat.clone()})
        codes = Planes.of(spec.shape).split(layout.restore(q, spec))
        predicted = self.prediction != "none" and spec.numel > 0
        if predicted:
            residuals = lorenzo.difference(codes)
            predicted = self.prediction == "lorenzo" or _cost(residuals) < _cost(codes)
            codes = residuals if predicted else codes
        coded, parts = integers.write(codes.flatten(), self.coder)
        meta: dict[str, Any] = {"kind": "codes", "axes": grid.axes, "centred": False, "rounding": self.rounding}
        meta |= {"seed": seed, "predicted": predicted, "codes": coded}
        tensors = {**parts, "step": grid.step, **escapes.gather(flat, lost)}
        return Encoded(self.name, self.version, spec, meta, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, meta = encoded.spec, encoded.meta
        if meta["kind"] == "raw":
            return layout.restore(encoded.tensor("raw", dtype=spec.dtype, numel=spec.numel).clone(), spec)
        grid, shape = stored_grid(encoded), Planes.of(spec.shape)
        codes = shape.split(integers.read(encoded, meta["codes"], spec.numel))
        if meta["predicted"]:
            codes = lorenzo.accumulate(codes).to(torch.int16)
        as_codes = TensorSpec(spec.shape, spec.stride, torch.int16, spec.device)
        q = layout.memory_view(planes.join(codes.contiguous(), as_codes))
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        for start, stop in _slabs(spec):
            flat[start:stop] = grid.value(q[start:stop].int(), range(start, stop), spec, meta["seed"])
        escapes.scatter(flat, encoded)
        return layout.restore(flat, spec)


def _quantise(flat: Tensor, spec: TensorSpec, grid: Grid, seed: int) -> tuple[Tensor, Tensor]:
    """Codes in memory order, and which elements have none. Zero has one even where the step is zero: 0 times it."""
    q = torch.empty(spec.numel, dtype=torch.int16, device=spec.device)
    lost = torch.empty(spec.numel, dtype=torch.bool, device=spec.device)
    for start, stop in _slabs(spec):
        q[start:stop], lost[start:stop] = grid.quantise(flat[start:stop], range(start, stop), spec, seed)
    return q, lost & (flat != 0)


def _cost(codes: Tensor) -> float:
    """Bits that codes of these sizes take, roughly; of some of them."""
    some = codes.flatten()[:: max(codes.numel() >> 16, 1)]
    return float(some.abs().float().add_(1).log2_().mean())


def _slabs(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    size = _SLAB_CPU if spec.device.type == "cpu" else _SLAB
    for start in range(0, spec.numel, size):
        yield start, min(start + size, spec.numel)
