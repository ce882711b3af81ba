"""cuSZ: error-bounded values by dual quantisation, Lorenzo prediction and an entropy coder (Tian et al., PACT 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed

__all__ = ["CuSz"]


@dataclass(frozen=True, slots=True)
class CuSz:
    """A bound for each family of ops (a number, or "0.4 std"; None takes that of method ``fixed``), and the coding."""

    linear: Any = None
    norm: Any = None
    attention: Any = None
    product: Any = None
    pointwise: Any = None
    log_probability: Any = None
    rounding: str = "nearest"
    prediction: str = "auto"
    coder: str = "blocks"

    def values(self) -> Codec:
        return codecs.create("cusz", rounding=self.rounding, prediction=self.prediction, coder=self.coder)

    def controller(self) -> Fixed:
        return Fixed.of(self)
