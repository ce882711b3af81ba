"""A codec for each family of ops, that never changes: for codecs that take no bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lowtide.codecs import Codec
from lowtide.controllers.fixed import DEFAULTS, Fixed
from lowtide.errors import UnknownNameError
from lowtide.records import Need, Site

__all__ = ["Families"]


@dataclass(slots=True)
class Families(Fixed):
    """``codecs`` maps a family of ops to its codec, None to keep its values; the others have the method's.

    Values saved by ops that match none of the patterns ``ops`` are kept. Bounds, where a rule names a codec that takes
    one, are those of controller ``fixed``.
    """

    codecs: Mapping[str, Codec | None] = field(default_factory=dict)
    ops: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        Fixed.__post_init__(self)
        for family in self.codecs:
            if family not in DEFAULTS:
                raise UnknownNameError("family of ops", family, DEFAULTS)

    def codec(self, site: Site, need: Need, values: Codec | None) -> Codec | None:
        if not any(fnmatchcase(site.op, pattern) for pattern in self.ops):
            return None
        return self.codecs.get(need.family, values)
