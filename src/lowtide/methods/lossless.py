"""Lossless coding: a bitmap of zeros and entropy-coded exponents; training is bit-equal to plain training."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed

__all__ = ["Lossless"]


@dataclass(frozen=True, slots=True)
class Lossless:
    """Values bit for bit; masks, shapes and indices as in method ``exact``."""

    coder: str = "blocks"

    def values(self) -> Codec:
        return codecs.create("lossless", coder=self.coder)

    def controller(self) -> Fixed:
        return Fixed()
