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
        spec, grid = layout.spec_of(x), self.grid(x, bound)
        flat = layout.memory_view(x)
        q, lost = _quantise(flat, spec, grid, seed)
        if has_too_many(int(lost.sum()), spec):
            return self.raw(x)
        codes = Planes.of(spec.shape).split(layout.restore(q, spec))
        predicted = self.prediction != "none" and spec.numel > 0
        if predicted:
            residuals = lorenzo.difference(codes)
            predicted = self.prediction == "lorenzo" or lorenzo.cost(residuals) < lorenzo.cost(codes)
            codes = residuals if predicted else codes
        coded = integers.write(codes.flatten(), self.coder)
        return self.payload(spec, grid, seed, predicted, coded, escapes.gather(flat, lost))

    def grid(self, x: Tensor, bound: Bound | None) -> Grid:
        """The steps for ``x`` under ``bound``; refuses what cannot be promised."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"cusz stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        if bound is None:
            raise BoundError("cusz needs an error bound: pass Bound.absolute(...) or a relative rule")
        bound.check_shape(TensorSpec.of(x))
        return Grid.of(bound, x.dtype, x.device, self.rounding)

    def raw(self, x: Tensor) -> Encoded:
        """The tensor as it is."""
        flat = layout.memory_view(x)
        return Encoded(self.name, self.version, TensorSpec.of(x), {"kind": "raw"}, {"raw": flat.clone()})

    def payload(
        self,
        spec: TensorSpec,
        grid: Grid,
        seed: int,
        predicted: bool,
        coded: tuple[dict[str, Any], dict[str, Tensor]],
        escaped: dict[str, Tensor],
    ) -> Encoded:
        """Of codes by ``integers.write`` and escapes by ``escapes.gather``."""
        meta: dict[str, Any] = {"kind": "codes", "axes": grid.axes, "centred": False, "rounding": self.rounding}
        meta |= {"seed": seed, "predicted": predicted, "codes": coded[0]}
        return Encoded(self.name, self.version, spec, meta, {**coded[1], "step": grid.step, **escaped})

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


def has_too_many(lost: int, spec: TensorSpec) -> bool:
    """Whether so many escapes cost more than they are worth."""
    return lost > spec.numel * _MANY


def _quantise(flat: Tensor, spec: TensorSpec, grid: Grid, seed: int) -> tuple[Tensor, Tensor]:
    """Codes in memory order, and which elements have none. Zero has one even where the step is zero: 0 times it."""
    q = torch.empty(spec.numel, dtype=torch.int16, device=spec.device)
    lost = torch.empty(spec.numel, dtype=torch.bool, device=spec.device)
    for start, stop in _slabs(spec):
        q[start:stop], lost[start:stop] = grid.quantise(flat[start:stop], range(start, stop), spec, seed)
    return q, lost & (flat != 0)


def _slabs(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    size = _SLAB_CPU if spec.device.type == "cpu" else _SLAB
    for start in range(0, spec.numel, size):
        yield start, min(start + size, spec.numel)
