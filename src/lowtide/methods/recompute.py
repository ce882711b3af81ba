"""Selective activation checkpointing with compressed boundaries; outside of the chosen modules as in ``fixed``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.controllers.fixed import Fixed

__all__ = ["Recompute"]


@dataclass(frozen=True, slots=True)
class Recompute:
    """``modules``: patterns of module paths, or True for every block. How their inputs are held is for ``attach`` to
    say (``boundary``)."""

    modules: bool | str | Iterable[str] = True

    def values(self) -> Codec:
        return codecs.create("sz")

    def controller(self) -> Fixed:
        return Fixed()

    def regions(self) -> bool | str | Iterable[str]:
        return self.modules
