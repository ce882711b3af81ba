"""Error-bounded values under bounds that never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed as FixedController

__all__ = ["Fixed"]


@dataclass(frozen=True, slots=True)
class Fixed:
    """A bound for each family of ops (a number, or "0.4 std"; None takes the default), and how values are coded."""

    remakes: ClassVar[bool] = False

    linear: Any = None
    norm: Any = None
    attention: Any = None
    product: Any = None
    pointwise: Any = None
    log_probability: Any = None
    rounding: str = "dither"
    coder: str = "auto"
    predict: str = "off"

    def values(self) -> Codec:
        return codecs.create("sz", rounding=self.rounding, coder=self.coder, predict=self.predict)

    def controller(self) -> FixedController:
        return FixedController.of(self)
