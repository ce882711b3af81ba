"""Noise that goes on to other layers adds up on the way, so the sites that add to it have an amount in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.statistics import SiteStatistics

_ROUNDS = 400  # of the search below; its last ones change shares by less than a hundredth


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


@dataclass(frozen=True, slots=True)
class Limit:
    """No more than ``most`` may arrive at one place, of what parts take: ``shares`` of it, by name."""

    shares: Mapping[str, float]
    most: float


def spread(parts: Sequence[Part], limits: Sequence[Limit]) -> dict[str, float]:
    """What each part may take where several limits count: the amounts that cost the fewest bits in all.

    That is the largest sum of size * log(amount). At the best amounts each is its size over the sum of what its limits
    charge for a unit of it, and a limit charges something only if it is reached; prices go up where too much arrives
    and down where less does, until that is so. With one limit for all parts alike it is ``divide``.
    """
    factors = _on_host([[limit.shares.get(part.name, 0.0) for part in parts] for limit in limits])
    most, room = _on_host([part.most for part in parts]), _on_host([limit.most for limit in limits])
    size = _on_host([max(part.size, 1) for part in parts])
    size /= size.sum()
    prices = 1 / room / len(limits)

    def amounts() -> torch.Tensor:
        return torch.minimum(most, size / (prices @ factors))

    for _ in range(_ROUNDS):
        prices *= ((factors @ amounts()) / room).clamp(1e-3, 1e3).sqrt()
    found = amounts()
    over = (factors @ found / room).clamp(min=1)
    found /= torch.where(factors > 0, over.unsqueeze(1), 1.0).amax(0)
    return dict(zip((part.name for part in parts), found.tolist(), strict=True))


def _on_host(numbers: list[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")


def by_tensor(sites: Iterable[SiteStatistics]) -> list[list[SiteStatistics]]:
    """Sites grouped by the tensor that is stored for them, where one bound can serve them all; what is made of it last.

    Norms of one kind that read the same tensor measure the same spreads, other ops and other norms do not.
    Log-probabilities have a bound of their own: what another op reads of them is not their exponential.
    """
    groups: dict[tuple[str, str], list[SiteStatistics]] = {}
    for site in sites:
        key = (site.leader, "" if site.unit == "absolute" else site.stored_by)
        if site.family == "log_probability":
            key = (site.site, site.family)
        groups.setdefault(key, []).append(site)
    return [sorted(group, key=lambda site: bool(site.source)) for group in groups.values()]
