"""ActNN: min-max groups of 4 or 2 bits, bits by layer and by sample (Chen et al., ICML 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.bits import Bits
from lowtide.errors import UnknownNameError
from lowtide.methods._careful import wider

__all__ = ["ActNn"]

_BITS = {"L1": 4, "L2": 4, "L3": 2}


@dataclass(frozen=True, slots=True)
class ActNn:
    """``level``: L1 codes inputs of conv and linear layers in 4 bits, L2 those of norms too, L3 all in 2 bits on
    average, by the sensitivity of layers and samples.

    ``bits`` is another width, or for L3 another average. Where an error goes on to other layers, widths are doubled;
    log-probabilities have 8 bits. ``faithful`` keeps such values, which ActNN left alone. ``per_sample`` and ``period``
    are those of controller ``bits``.
    """

    level: str = "L3"
    bits: float | None = None
    group: int = 256
    per_sample: bool = True
    period: int = 100
    faithful: bool = False

    def __post_init__(self) -> None:
        if self.level not in _BITS:
            raise UnknownNameError("level of actnn", self.level, _BITS)

    def values(self) -> Codec:
        bits = _BITS[self.level] if self.bits is None or self.level == "L3" else self.bits
        return codecs.create("groups", bits=bits, group=self.group)

    def controller(self) -> Bits:
        bits = _BITS[self.level] if self.bits is None else self.bits
        families: dict[str, int | None] = dict.fromkeys(wider(bits)) if self.faithful else {**wider(bits)}
        if self.level == "L1":
            families["norm"] = None
        is_adaptive = self.level == "L3"
        period = self.period if is_adaptive else None
        return Bits(bits, self.group, per_sample=self.per_sample and is_adaptive, period=period, families=families)
