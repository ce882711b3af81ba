"""What twins of codecs have in common."""

from __future__ import annotations

from typing import Any, ClassVar


class Twin:
    """A twin that stores values, takes no bound and knows sizes beforehand, where it does not say otherwise."""

    __slots__ = ()

    codec: Any
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False
    ticketed: ClassVar[bool] = False
    takes_replay: ClassVar[bool] = False  # by ``encode``, so that each replay of a graph has dither of its own

    @property
    def name(self) -> str:
        name: str = self.codec.name
        return name
