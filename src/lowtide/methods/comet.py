"""COMET (VLDB 2022): bounds from the momentum of each layer, renewed every thousand steps; exact zeros."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.comet import Comet as CometController
from lowtide.methods import options_of

__all__ = ["Comet"]


@dataclass(frozen=True, slots=True)
class Comet:
    """The options of ``lowtide.controllers.comet``, and how values are coded."""

    alpha: float = 0.01
    period: int = 1000
    published: bool = False
    others: str | None = "0.1 std"
    checks: int = 1
    factor: float = 4.0
    pause: int = 100
    retreat: str = "exact"
    rounding: str = "dither"
    coder: str = "auto"

    def values(self) -> Codec:
        return codecs.create("sz", rounding=self.rounding, coder=self.coder, keep_zeros=True)

    def controller(self) -> CometController:
        return CometController(**options_of(self, CometController))
