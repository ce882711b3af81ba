"""A narrower float type: the plain baseline that every other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed

__all__ = ["Cast"]


@dataclass(frozen=True, slots=True)
class Cast:
    """Values in ``to``: bf16, fp8_e4m3 or fp8_e5m2. Tensors that are not wider than it are kept as they are."""

    to: str = "bf16"

    def values(self) -> Codec:
        return codecs.create("cast", to=self.to)

    def controller(self) -> Fixed:
        return Fixed()
