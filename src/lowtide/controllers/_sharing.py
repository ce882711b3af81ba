"""Noise that goes on to other layers adds up on the way, so there is one amount of it for all sites together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowtide.statistics import SiteStatistics


@dataclass(frozen=True, slots=True)
class Part:
    """A site's part in a common amount: it can use ``most`` of it and has ``size`` values to store."""

    name: str
    most: float
    size: int


def divide(total: float, parts: Iterable[Part]) -> dict[str, float]:
    """``total`` in proportion to sizes; what a site cannot use is divided among the others.

    With bits a value falling by half the logarithm of its variance, that proportion costs the fewest bits.
    """
    shares: dict[str, float] = {}
    waiting = sorted(parts, key=lambda part: part.most / max(part.size, 1))
    size = sum(part.size for part in waiting)
    for part in waiting:
        shares[part.name] = min(part.most, total * part.size / max(size, 1))
        total -= shares[part.name]
        size -= part.size
    return shares


def by_tensor(sites: Iterable[SiteStatistics]) -> list[list[SiteStatistics]]:
    """Sites grouped by the tensor that is stored for them, where one bound can serve them all; what is made of it last.

    Log-probabilities have one of their own: what another op reads of them is not their exponential.
    """
    groups: dict[tuple[str, str], list[SiteStatistics]] = {}
    for site in sites:
        key = (site.leader, "") if site.unit == "absolute" else (site.source or site.site, site.unit)
        if site.family == "log_probability":
            key = (site.site, site.family)
        groups.setdefault(key, []).append(site)
    return [sorted(group, key=lambda site: bool(site.source)) for group in groups.values()]
