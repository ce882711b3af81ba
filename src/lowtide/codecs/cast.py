"""Store the values in a narrower float type: the plain baseline, with no error bound of its own choosing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import escapes, layout
from lowtide.errors import DtypeError, UnknownNameError
from lowtide.records import Bound, Encoded

__all__ = ["Cast"]

_TARGETS = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Cast:
    """|x' - x| <= |x| * 2**-8 for bf16, 2**-4 (e4m3) and 2**-3 (e5m2) of |x| for fp8, in the target's normal range.

    fp8 is scaled by a power of two that puts the largest finite magnitude just below the format's largest value; below
    the normal range the error is at most half the smallest step. NaN, inf and values that the target would turn into
    them are stored apart and restored bit for bit; zeros stay zeros. A dtype not wider than the target is refused.
    """

    to: str = "bf16"

    name: ClassVar[str] = "cast"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.to not in _TARGETS:
            raise UnknownNameError("cast target", self.to, _TARGETS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize > _TARGETS[self.to].itemsize

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"cast to {self.to} takes wider floating point tensors, got {x.dtype}")
        target = _TARGETS[self.to]
        flat = layout.memory_view(x)
        finite = torch.where(flat.isfinite(), flat, 0).double() if target.itemsize == 1 else flat
        exponent = _exponent(finite, target) if target.itemsize == 1 else None
        narrow = (finite if exponent is None else torch.ldexp(finite, -exponent).float()).to(target)
        exponent = torch.zeros(1, device=x.device) if exponent is None else exponent
        exponent = exponent.to(torch.int32)
        lost = ~flat.isfinite() | ~_widen(narrow, exponent, x.dtype).isfinite()
        tensors = {"values": narrow, "exponent": exponent, **escapes.gather(flat, lost)}
        return Encoded(self.name, self.version, layout.spec_of(x), {"to": self.to}, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec = encoded.spec
        narrow = encoded.tensor("values", dtype=_TARGETS[encoded.meta["to"]], numel=spec.numel)
        flat = _widen(narrow, encoded.tensor("exponent", dtype=torch.int32, numel=1), spec.dtype)
        escapes.scatter(flat, encoded)
        return layout.restore(flat, spec)


def _widen(narrow: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    if narrow.dtype.itemsize == 2:
        return narrow.to(dtype)
    return torch.ldexp(narrow.double(), exponent).to(dtype)


def _exponent(finite: Tensor, target: torch.dtype) -> Tensor:
    """The power of two to divide by, so that the largest magnitude stays below the target's largest value."""
    peak = finite.abs().amax() if finite.numel() else finite.new_zeros(())
    room = torch.frexp(torch.tensor(torch.finfo(target).max)).exponent.to(finite.device) - 1
    return (torch.frexp(peak.double()).exponent - room).reshape(1)
