"""Save only what costs nothing: shapes, exact masks, window indices and weight casts; every value stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.controllers.fixed import Fixed

__all__ = ["Exact"]


@dataclass(frozen=True, slots=True)
class Exact:
    """Losses, gradients and updated weights are bit-equal to plain training."""

    remakes: ClassVar[bool] = False

    def values(self) -> None:
        return None

    def controller(self) -> Fixed:
        return Fixed()
