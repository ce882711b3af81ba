"""Store no values at all: for tensors of which backward reads nothing but the shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import layout
from lowtide.records import Bound, Encoded

__all__ = ["Shape"]


@dataclass(frozen=True, slots=True)
class Shape:
    """Zero bytes; x' has the shape, strides, dtype and device of x and arbitrary values.

    With ``poison`` the values are NaN (or the dtype's largest integer), so that a backward that does read them shows.
    """

    poison: bool = False

    name: ClassVar[str] = "shape"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return True

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        return Encoded(self.name, self.version, layout.spec_of(x), {"poison": self.poison})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec = encoded.spec
        blank = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        if encoded.meta["poison"]:
            floating = spec.dtype.is_floating_point or spec.dtype.is_complex
            blank.fill_(float("nan") if floating else spec.dtype == torch.bool or torch.iinfo(spec.dtype).max)
        return blank
