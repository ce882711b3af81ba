"""From what a user says about error ("0.4 std", 0.01) to an absolute bound for the tensor at hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.errors import BoundError, UnknownNameError
from lowtide.records import Bound, Need

_ENOUGH = 1 << 22  # values for a statistic
CONSTANT = ("absolute", "probability")  # units that do not depend on the tensor
UNITS = (*CONSTANT, "std", "range", "absmax")


class BoundSource(Protocol):
    """Anything that can state a bound for a tensor."""

    def resolve(self, x: Tensor, need: Need) -> Bound: ...

    def __str__(self) -> str: ...


@dataclass(frozen=True, slots=True)
class BoundRule:
    """A bound as a multiple of a unit: of 1 (absolute), or of a statistic of the tensor itself.

    ``std`` is the standard deviation of the finite non-zero values, ``range`` their maximum minus minimum, ``absmax``
    their largest magnitude: each per tensor, per channel or per row, as the op that reads the tensor needs it. Of a
    large tensor, statistics per tensor and per channel are those of evenly spaced entries along its first axis, four
    million values or a little more. The ``std`` of a row, or of a channel of a sample, is that of all its values.

    ``probability`` is for log-probabilities: what is stored, and bounded, are the probabilities themselves.
    """

    value: float
    unit: str = "absolute"

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise UnknownNameError("unit of a bound", self.unit, UNITS)
        if not (math.isfinite(self.value) and self.value > 0):
            raise BoundError(f"bound must be finite and greater than zero, got {self.value!r}")

    @classmethod
    def parse(cls, text: float | str | Mapping[str, Any] | BoundRule) -> BoundRule:
        """``0.01`` or ``"0.01"`` (absolute), ``"0.4 std"``, ``{"std": 0.4}``."""
        if isinstance(text, BoundRule):
            return text
        if isinstance(text, Mapping):
            if len(text) != 1:
                raise BoundError(f"a bound has one unit, as in {{'std': 0.4}}; got {dict(text)}")
            unit, value = next((str(key), item) for key, item in text.items())
        else:
            value, _, unit = str(text).strip().partition(" ")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise BoundError(
                f"cannot read {text!r} as a bound; write a number, or one with a unit: '0.4 std'"
            ) from None
        return cls(number, unit.strip() or "absolute")

    def resolve(self, x: Tensor, need: Need) -> Bound:
        axes = need.axes(x.dim())
        if self.unit in CONSTANT:
            sizes = [x.shape[axis] for axis in axes]
            return Bound(torch.full(sizes, self.value, dtype=torch.float64, device=x.device), axes)
        value = _STATISTICS[self.unit](sample(x, axes), axes).double() * self.value
        return Bound(value.nan_to_num_(0.0, 0.0, 0.0), axes)

    def __str__(self) -> str:
        return f"{self.value!r}" if self.unit == "absolute" else f"{self.value!r} {self.unit}"


def sample(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """What a statistic is taken of: some of a large tensor's entries along its first axis, if ``axes`` leave it."""
    if x.numel() <= _ENOUGH or 0 in axes:
        return x
    return x[:: max(1, min(x.numel() // _ENOUGH, x.shape[0] // 8))]


def _masked(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, list[int]]:
    """Values in a working precision with zeros in place of what does not count, the mask, the axes to reduce."""
    work = x.to(torch.promote_types(x.dtype, torch.float32))
    size = work.abs()
    mask = (size > 0) & (size < torch.inf)
    return torch.where(mask, work, 0), mask, [axis for axis in range(x.dim()) if axis not in axes]


def _std(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    over = [axis for axis in range(x.dim()) if axis not in axes]
    if not over or not x.numel():
        return x.new_zeros([x.shape[axis] for axis in axes], dtype=torch.promote_types(x.dtype, torch.float32))
    if 0 in axes:
        return torch.std(x, over, correction=0)
    values, mask, over = _masked(x, axes)
    # In units of the largest magnitude, so that no square over- or underflows.
    peak = torch.linalg.vector_norm(values, torch.inf, over, keepdim=True)
    values = values / torch.where(peak > 0, peak, 1)
    count = mask.sum(over, keepdim=True).clamp(min=1)
    mean = values.sum(over, keepdim=True) / count
    spread = torch.where(mask, values - mean, 0).square_().sum(over, keepdim=True) / count
    return (spread.sqrt() * peak).squeeze(over)


def _range(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    values, mask, over = _masked(x, axes)
    if not over or not x.numel():
        return values.new_zeros([x.shape[axis] for axis in axes])
    high = torch.where(mask, values, -torch.inf).amax(over)
    return torch.where(high == -torch.inf, 0, high - torch.where(mask, values, torch.inf).amin(over))


def _absmax(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    values, _, over = _masked(x, axes)
    if not over:
        return values.abs()
    return values.abs().amax(over) if x.numel() else values.new_zeros([x.shape[axis] for axis in axes])


_STATISTICS = {"std": _std, "range": _range, "absmax": _absmax}
