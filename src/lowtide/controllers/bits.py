"""Bits that set themselves: more for tensors whose error disturbs gradients more, under an average (ActNN, GACT)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lowtide import codecs
from lowtide.codecs import Codec
from lowtide.coding.bitpack import WIDTHS
from lowtide.controllers import Noise
from lowtide.controllers._widths import Tensor, allocate, variance
from lowtide.controllers.fixed import Fixed
from lowtide.errors import PolicyError, StateError
from lowtide.ledger import Ledger
from lowtide.records import Need, Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT, SiteStatistics, Statistics, Wish

__all__ = ["Bits"]

_RANGE = 5.6  # of 256 normal values, in standard deviations (expected)
_EARLY = (0, 10)  # steps that are measured although they are no multiple of the period
_CHECKS = 4  # sites whose real error is measured, each time
_WORTHWHILE = 0.8  # of the noise of equal widths, above which widths stay equal
_CODECS = {"groups", "norm_groups", "sample_groups"}


@dataclass(slots=True)
class Bits:
    """The widths of codec ``groups`` for every tensor: ``average`` bits a value, and as little noise as that allows.

    A tensor with error variance v adds v * S to the variance of a weight gradient, S its sensitivity. Stochastic
    rounding in groups of range R at b bits has v = R**2 / 6 / (2**b - 1)**2. R is taken as 5.6 standard deviations,
    times a factor that spot checks of the real error correct, four sites each time. Error that goes on to the layers
    below counts as that share of all weight gradients together. From these costs ``allocate`` gives the bits: at steps
    0 and 10 and then every ``period`` steps, from statistics of that one step, with no pass of its own. Where that
    would save less than a fifth of the noise, all have the average. Without a period (None) nothing moves.

    Until there are statistics, and where no formula for S is known, tensors have the widest width that is not above
    the average. ``families`` gives a family of ops a width of its own that is not in the average; None keeps its
    values. With ``per_sample``, averages between two widths are met by codec
    ``sample_groups``. Inputs of norms have codec ``norm_groups``.
    """

    average: float = 2.0
    group: int = 256
    per_sample: bool = False
    period: int | None = 100
    families: Mapping[str, int | None] = field(default_factory=dict)
    _bounds: Fixed = field(init=False, default_factory=Fixed)
    _bits: dict[str, float] = field(init=False, default_factory=dict)
    _factors: dict[str, float] = field(init=False, default_factory=dict)
    _noise: dict[str, Noise] = field(init=False, default_factory=dict)
    _turn: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.average, int | float) or not WIDTHS[0] <= self.average <= WIDTHS[-1]:
            raise PolicyError(f"codes have 1 to 8 bits, so their average cannot be {self.average!r}")
        if self.period is not None and (not isinstance(self.period, int) or self.period < 2):
            raise PolicyError(f"period is a number of steps, 2 or more, or None; got {self.period!r}")

    def codec(self, site: Site, need: Need, values: Codec | None) -> Codec | None:
        bits = self.families[need.family] if need.family in self.families else self._bits.get(site.name, self._widest)
        if bits is None:
            return None
        if need.family == "norm":
            sizes = {"per": need.per.value, "row_dims": need.row_dims}
            return codecs.create("norm_groups", bits=bits, group=self.group, **sizes)
        if bits in WIDTHS:
            return codecs.create("groups", bits=int(bits), group=self.group)
        return codecs.create("sample_groups", bits=bits, group=self.group)

    def bound(self, site: Site, need: Need) -> Any:
        """For codecs that take one, which only a rule can name."""
        return self._bounds.bound(site, need)

    def wants(self, step: int) -> Wish | None:
        if self.period is None or (step not in _EARLY and step % self.period):
            return None
        names = sorted(self._bits)
        turn = [names[(self._turn + place) % len(names)] for place in range(min(_CHECKS, len(names)))]
        return Wish(noise=True, spread=True, checks=frozenset(turn))

    def step(self, number: int, statistics: Statistics | None, ledger: Ledger) -> bool:
        if statistics is None or not statistics.is_finite:
            return False
        sites = {name: site for name, site in statistics.sites.items() if self._is_ours(name, site, ledger)}
        if not sites:
            return False
        self._turn += _CHECKS
        self._calibrate(sites)
        costs = self._costs(sites)
        tensors: dict[str, Tensor] = {}
        for name, site in sites.items():
            known = tensors.get(site.leader, Tensor(0, 0.0))
            tensors[site.leader] = Tensor(max(known.count, site.numel), known.cost + costs[name])
        by_leader = dict(zip(tensors, self._allocate(list(tensors.values())), strict=True))
        before, self._bits = self._bits, {name: by_leader[site.leader] for name, site in sites.items()}
        self._noise = {name: self._foresee(site, statistics.step) for name, site in sites.items()}
        return self._bits != before

    def noise_by_site(self) -> dict[str, Noise]:
        return dict(self._noise)

    def events(self) -> tuple[str, ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"bits": dict(self._bits), "factors": dict(self._factors), "turn": self._turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"bits", "factors", "turn"}:
            raise StateError(
                f"controller 'bits' keeps bits, factors and turn in its state, this one has {sorted(state)}"
            )
        if any(not WIDTHS[0] <= bits <= WIDTHS[-1] for bits in state["bits"].values()):
            raise StateError("the bits in this state are not between 1 and 8: it belongs to another controller")
        self._bits, self._factors, self._turn = dict(state["bits"]), dict(state["factors"]), int(state["turn"])
        self._noise = {}

    @property
    def _widest(self) -> float:
        """The widest width that is not above the average."""
        return max(width for width in WIDTHS if width <= self.average)

    def _allocate(self, tensors: list[Tensor]) -> list[float]:
        """Bits for tensors; all alike if that is hardly worse, since what is known about them is not exact."""
        bits, alike = allocate(tensors, self.average, fractions=self.per_sample), [self._widest] * len(tensors)
        noise, otherwise = (sum(map(variance, [tensor.cost for tensor in tensors], each)) for each in (bits, alike))
        return alike if self._widest == self.average and noise > _WORTHWHILE * otherwise else bits

    def _is_ours(self, name: str, site: SiteStatistics, ledger: Ledger) -> bool:
        """Whether values were coded here by a codec whose bits are to be chosen, and what they cost is known."""
        if site.family in self.families:
            return False
        entry = ledger.sites.get(name)
        coded = entry is not None and not _CODECS.isdisjoint(entry.codec.split(", "))
        return coded and bool(site.claims) and site.std is not None

    def _calibrate(self, sites: Mapping[str, SiteStatistics]) -> None:
        """Let the real error of the sites that were checked count for half: it is one draw of a random number."""
        for name, site in sites.items():
            model = variance(_spread(site), self._bits.get(name, self._widest))
            if site.error is not None and site.error > 0 and model > 0:
                self._factors[name] = math.sqrt(self._factors.get(name, 1.0) * site.error / model)

    def _costs(self, sites: Mapping[str, SiteStatistics]) -> dict[str, float]:
        """Added variance of all weight gradients together, if a step were the whole range."""
        energies = [claim.energy for site in sites.values() for claim in site.claims if claim.kind == WEIGHT]
        energy = sum(energies)
        typical = {}
        for unit in {site.unit for site in sites.values()}:
            known = [self._factors[name] for name, site in sites.items() if site.unit == unit and name in self._factors]
            typical[unit] = median(known) if known else 1.0
        below = _below(sites.values())
        costs = {}
        for name, site in sites.items():
            onward = (
                energy / (len(energies) or 1) if site.family == "attention" else energy
            )  # one weight's, or all of it
            reach = sum(claim.gain * onward if claim.kind == PROPAGATED else claim.sensitivity for claim in site.claims)
            scale = site.claim(SCALE)
            if scale is not None and "batch_norm" in site.op and site.claim(BELOW) is None:
                reach += below * scale.sensitivity
            costs[name] = _spread(site) * self._factors.get(name, typical[site.unit]) * reach
        return costs

    def _foresee(self, site: SiteStatistics, step: int) -> Noise:
        error = variance(_spread(site) * self._factors.get(site.site, 1.0), self._bits[site.site])
        own, onward = site.claim(WEIGHT) or site.claim(SCALE), site.claim(PROPAGATED)
        is_measured = own is not None and site.error is not None
        return Noise(
            predicted=error * own.gain if own is not None else None,
            measured=site.error * own.gain if own is not None and site.error is not None else None,
            checked=step if is_measured else None,
            propagated=error * onward.gain if onward is not None else None,
        )


def _below(sites: Iterable[SiteStatistics]) -> float:
    """What a batch norm's error does to the weight below, as a multiple of what it does to its scale, as a rule."""
    pairs = [(site.claim(BELOW), site.claim(SCALE)) for site in sites]
    known = [below.sensitivity / scale.sensitivity for below, scale in pairs if below and scale and scale.sensitivity]
    return median(known) if known else 0.0


def _spread(site: SiteStatistics) -> float:
    """The variance of an error with the whole range for a step, in the unit of the site's sensitivity."""
    std = 1.0 if site.unit == "std" else site.std or 0.0
    return (_RANGE * std) ** 2 / 6
