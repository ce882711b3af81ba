"""Error-bounded values under bounds that follow from the gradient noise that a user allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.budget import Budget as BudgetController
from lowtide.methods import options_of

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True)
class Budget:
    """The options of ``lowtide.controllers.budget``, and how values are coded.

    ``pairs``: the input of a batch norm and what ReLU made of its output share a payload; None: they do unless there is
    a ``memory`` to fill.
    """

    remakes: ClassVar[bool] = True
    remakes_products: ClassVar[bool] = True

    noise: float = 0.03
    propagated: float | None = None
    scale: float | None = None
    memory: str | float | None = None
    period: int = 400
    warm_up: str | None = None
    checks: int = 1
    factor: float = 4.0
    pause: int = 100
    retreat: str = "exact"
    rounding: str = "dither"
    coder: str = "auto"
    predict: str = "off"
    pairs: bool | None = None
    flow: bool = True

    @property
    def joins(self) -> bool | None:
        """Whether pairs share a payload; None where ``remake`` has to say so."""
        if self.pairs is None and self.memory is None:
            return True
        return self.pairs

    def values(self) -> Codec:
        return codecs.create("sz", rounding=self.rounding, coder=self.coder, predict=self.predict)

    def controller(self) -> BudgetController:
        return BudgetController(**options_of(self, BudgetController))
