"""AC-GC (NeurIPS 2021): bounds that guarantee how much the gradient's variance grows."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.acgc import Acgc as AcgcController
from lowtide.methods import options_of

__all__ = ["Acgc"]


@dataclass(frozen=True, slots=True)
class Acgc:
    """The options of ``lowtide.controllers.acgc``, and how values are coded."""

    noise: float = 0.5
    form: str = "functional"
    period: int = 100
    keep: int = 10
    others: str | None = None
    checks: int = 1
    factor: float = 4.0
    pause: int = 100
    retreat: str = "exact"
    rounding: str = "dither"
    coder: str = "auto"

    def values(self) -> Codec:
        return codecs.create("sz", rounding=self.rounding, coder=self.coder)

    def controller(self) -> AcgcController:
        return AcgcController(**options_of(self, AcgcController))
