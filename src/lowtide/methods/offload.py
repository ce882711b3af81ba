"""Migration to host memory (vDNN, Layrub): values bit for bit, in pinned memory until backward asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed
from lowtide.stores.host import Host

__all__ = ["Offload"]


@dataclass(frozen=True, slots=True)
class Offload:
    """Losses, gradients and updated weights are bit-equal to plain training; the options are those of the store."""

    staging: int | str = "1GiB"
    least: int | str = "64KiB"
    keep: int | str | None = None

    def values(self) -> Codec:
        return codecs.create("identity")

    def controller(self) -> Fixed:
        return Fixed()

    def store(self) -> Host:
        return Host(self.staging, self.least, self.keep)
