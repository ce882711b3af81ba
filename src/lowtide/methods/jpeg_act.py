"""JPEG-ACT: activation maps through a cosine transform and a table of steps (Evans, Liu, Aamodt, ISCA 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.families import Families
from lowtide.methods._careful import LOG_PROBABILITY, PROPAGATING

__all__ = ["JpegAct"]


@dataclass(frozen=True, slots=True)
class JpegAct:
    """``table`` for inputs of conv, linear and norm layers, the finer ``optL`` where an error goes on to other layers.

    Log-probabilities have 8-bit groups. ``faithful`` codes as published: values are clipped and codes truncated.
    """

    table: str = "optH"
    rounding: str = "dither"
    coder: str = "blocks"
    faithful: bool = False

    def values(self) -> Codec:
        return codecs.create(
            "jpeg_act", table=self.table, rounding=self.rounding, coder=self.coder, faithful=self.faithful
        )

    def controller(self) -> Families:
        finer: dict[str, Codec | None] = dict.fromkeys(PROPAGATING, replace(self, table="optL").values())
        return Families(codecs={**finer, LOG_PROBABILITY: codecs.create("groups", bits=8)})
