"""DIVISION: block means in bfloat16 and what is left in 2 bits (Wang et al., ICML 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.codecs import Codec
from lowtide.codecs.division import Division as DivisionCodec
from lowtide.controllers.families import Families
from lowtide.methods._careful import wider_codecs

__all__ = ["Division"]


@dataclass(frozen=True, slots=True)
class Division:
    """``bits`` for inputs of conv, linear and norm layers, twice as many where an error goes on to other layers.

    Log-probabilities have 8-bit groups. ``faithful`` codes inputs of convolutions and batch norms alone, as published.
    """

    bits: int = 2
    block: int = 8
    rounding: str = "stochastic"
    faithful: bool = False

    def values(self) -> Codec:
        return DivisionCodec(self.bits, self.block, self.rounding, self.faithful)

    def controller(self) -> Families:
        if self.faithful:
            return Families(ops=("*convolution*", "*batch_norm*"))
        return Families(codecs=wider_codecs(lambda bits: replace(self, bits=bits).values(), self.bits))
