"""GACT: min-max groups whose bits follow each tensor's sensitivity (Liu et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.bits import Bits
from lowtide.errors import UnknownNameError
from lowtide.methods._careful import wider

__all__ = ["Gact"]

_FIXED = {"L1": 4, "L1.1": 8, "L1.2": 2}
_ADAPTIVE = {"L2": 4, "L2.1": 3, "L2.2": 2}


@dataclass(frozen=True, slots=True)
class Gact:
    """``level``: L1, L1.1 and L1.2 have 4, 8 and 2 bits; L2, L2.1 and L2.2 have 4, 3 and 2 on average, by sensitivity.

    Sensitivities come from gradient statistics every ``period`` steps, not from passes of their own. Where an error
    goes on to other layers, widths are doubled; log-probabilities have 8 bits. ``faithful`` treats all values alike.
    """

    level: str = "L2.2"
    group: int = 256
    period: int = 100
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.level not in {**_FIXED, **_ADAPTIVE}:
            raise UnknownNameError("level of gact", self.level, [*_FIXED, *_ADAPTIVE])

    def values(self) -> Codec:
        return codecs.create("groups", bits={**_FIXED, "L2": 4, "L2.1": 2, "L2.2": 2}[self.level], group=self.group)

    def controller(self) -> Bits:
        bits = {**_FIXED, **_ADAPTIVE}[self.level]
        families: dict[str, int | None] = {} if self.faithful else {**wider(bits)}
        return Bits(bits, self.group, period=self.period if self.level in _ADAPTIVE else None, families=families)
