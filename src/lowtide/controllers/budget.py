"""Bounds from the gradient noise that a user allows: the added variance of each gradient as a share of its energy.

A value stored under the bound eb comes back with an error of variance v = eb^2 / 3, which adds v * S to the variance of
the gradient that is computed from it (lowtide.capture.sensitivity). With E the energy of that gradient, the bound that
uses up a share e2 of it is

    eb = sqrt(3 e2 E / S)

The theory is that of AC-GC (Evans and Aamodt, NeurIPS 2021) and COMET (Jin et al., VLDB 2022), with the expected error
in place of the worst one, and one objective for every op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.bounds import BoundRule
from lowtide.controllers import Keep, _levels
from lowtide.controllers._adaptive import Adaptive, with_stand_ins
from lowtide.controllers._memory import Memory
from lowtide.controllers._sharing import Limit, Part, by_tensor, divide, spread
from lowtide.errors import BoundError, StateError
from lowtide.ledger import Ledger
from lowtide.statistics import BELOW, PROPAGATED, SCALE, Arrival, Claim, SiteStatistics, Statistics, Wish

__all__ = ["Budget"]

_ASSUMED = 0.1  # std: where no sensitivity is known, a bound that is taken to stay within the share at noise = 0.01
_ASSUMED_ATTENTION = 0.05  # the same where errors are exponents: those of scores as large as 6 stay below 0.4
_PROBABILITY = 1 / 32  # of the noise: the largest error of a probability, and a limit of a row's added variance
_FINEST_PROBABILITY = 2.0**-16  # below, too many of them are too many steps from zero to have a code
_NORMAL = 0.01
_OF_ATTENTION = 1 / 16  # of the noise, for each of the four tensors that attention saves
# Ops whose gradient is divided by what may be next to nothing (quotients, norms, standard deviations; exponentials by
# their sum), or may be next to nothing itself (squared errors): no multiple of the spread of what they read is safe.
_BY_NEXT_TO_NOTHING = frozenset(("div", "linalg_vector_norm", "norm", "std", "std_mean", "exp", "mse_loss"))
_NOT_YET = Keep("not measured yet: what an error does may be divided by next to nothing")
_STRIDE = 2.0  # the most by which a bound grows at an update
_UNKNOWN_BELOW = 0.3  # of the share of a batch norm's scale, where the layer below is not known


@dataclass
class Budget(Adaptive):
    """``noise``: the share of the gradient's energy that storage may add to its variance, all in all.

    - A weight's gradient gets three quarters of it from the values stored by its own layer and by a batch norm that
      reads what the layer made.
    - ``propagated`` is the most that may arrive at a weight of what all sites add to gradients that go on to the layers
      below (norms, pointwise functions, products); ``noise`` if it is None. It adds up on the way down, and all sites
      divide it. How much of it arrives at each weight is measured (lowtide.capture.flow): less, where gradients meet.
      In the mean over weights a quarter of it may arrive. Without ``flow`` all of it is taken to arrive everywhere.
    - Attention's queries, keys, values and outputs may add the remaining quarter to the gradients of queries, keys and
      values, and so to that of the weight that makes them.
    - ``scale`` is the share for the scales of norms, which are few and carry little of the gradient; ten times
      ``noise`` if it is None.

    ``memory`` ("8GiB", or a ratio to what plain training holds: "0.25") takes the place of ``noise``: the bounds with
    the least noise among those that need no more bytes, found within a few steps after each measurement from what
    payloads really took. Where the largest bounds there are do not suffice, BudgetError names the smallest budget that
    would.

    Measured in steps 0, 2, 4, 6, 8, 12, 16, 24, ..., twice in an octave (with ``memory`` once, and without ``flow``),
    and then every ``period``. Until a site was measured, and where no formula is known for an op, bounds are cautious
    multiples of the standard deviation: ``warm_up`` ("0.1 std", with ``memory`` "0.4 std"), and 0.1 std (attention of a
    kind that is not known: 0.05 std) times sqrt(noise / 0.01). Nothing is held exactly just because it is new, so that
    memory has no spike at the start, but for what quotients, norms, standard deviations, exponentials and squared
    errors read: no bound is cautious there. If ``warm_up`` is given it is for these, too.

    Log-probabilities have a bound of noise / 32 on probabilities from the first step on, or the finer one that is
    measured.

    A bound is the nearest power of 2^(1/4), or the one before while that is less than a level away. Where the last
    statistics ask for a finer one it is taken at once, since they are of the gradients that come; a coarser one is
    approached by half the way (of its logarithm) and by a factor of two at most. Sites that saved the same tensor get
    one bound, the smallest, so that the tensor is stored once.
    """

    noise: float = 0.03
    propagated: float | None = None
    scale: float | None = None
    memory: str | float | None = None
    period: int = 400
    warm_up: str | None = None
    flow: bool = True

    def __post_init__(self) -> None:
        Adaptive.__post_init__(self)
        for name, value in (("noise", self.noise), ("scale", self.scale), ("propagated", self.propagated)):
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise BoundError(f"budget: {name} is a share of the gradient's energy, such as 0.01; got {value!r}")
        if not isinstance(self.period, int) or self.period < 2:
            raise BoundError(f"budget: period is a number of steps, 2 or more; got {self.period!r}")
        self._memory = None if self.memory is None else Memory(self.memory)
        self._first = BoundRule.parse(self.warm_up or ("0.1 std" if self.memory is None else "0.4 std"))
        self._targets: dict[str, float] = {}
        self._last: Statistics | None = None
        self._told = False

    @property
    def follows_sizes(self) -> bool:
        """Whether bounds follow from what payloads took: sizes must then be those of the bounds in force."""
        return self.memory is not None

    def _is_due(self, step: int) -> bool:
        """Gradients change fastest in the beginning: twice while the number of steps doubles, with ``memory`` once."""
        octave = 1 << step.bit_length() >> 1
        apart = octave if self.memory is not None else octave // 2
        return step % min(max(apart, 2), self.period) == 0

    def _wish(self) -> Wish:
        return Wish(noise=True, spread=True, flow=self.flow and self.memory is None)

    def _start(self, op: str, family: str) -> BoundRule | Keep:
        if op in _BY_NEXT_TO_NOTHING and self.warm_up is None:
            return _NOT_YET
        return self._assumed(family) if family == "log_probability" else self._first

    def _share(self, claim: Claim) -> float | None:
        if self.memory is not None:
            return None
        if claim.kind == SCALE:
            return self._share_of_scales
        return 0.75 * self.noise

    def step(self, number: int, statistics: Statistics | None, ledger: Ledger) -> bool:
        moved = Adaptive.step(self, number, statistics, ledger)
        if self._memory is None or self._last is None or self._safety.is_holding:
            return moved
        sites = self._last.sites.values()
        rules = {site.site: self._rules.get(site.site) or self._start(site.stored_by, site.family) for site in sites}
        new = self._memory.fit(ledger, rules, number)
        self._rules.update(with_stand_ins(new, sites))
        if self._memory.is_met and not self._told:
            self._told = True
            self._safety.note(
                number + 1, f"memory {self.memory}: met, added noise about {self._memory.noise(rules):.2g}"
            )
        return moved or bool(new)

    def _update(self, statistics: Statistics, ledger: Ledger) -> dict[str, BoundRule | Keep]:
        statistics = self._without_noise(statistics)
        if self._memory is not None:
            self._memory.learn(statistics.sites.values())
            self._last = statistics
            return {}
        groups = by_tensor(statistics.sites.values())
        parts_of_weights = self._divide_weights(groups)
        own = [self._own_limit(group, parts_of_weights) for group in groups]
        going = [_going_on(group) for group in groups]
        reach = [sum(gains.values()) for gains in going]
        parts = [
            Part(group[0].site, limit * gain, round(group[0].numel * group[0].governed))
            for group, limit, gain in zip(groups, own, reach, strict=True)
            if gain > 0
        ]
        mixed = {group[0].site: gains for group, gains in zip(groups, going, strict=True)}
        shares = self._divide_propagated(parts, mixed, statistics.arrivals)
        rules: dict[str, BoundRule | Keep] = {}
        for group, limit, gain in zip(groups, own, reach, strict=True):
            if gain > 0:
                limit = min(limit, shares[group[0].site] / gain)
            is_known = any(site.claims for site in group)
            rule = self._rule(group[0], limit) if is_known else self._assumed(group[0].family)
            if rule is not None:
                rules.update(dict.fromkeys((site.site for site in group), rule))
        return rules

    def _divide_propagated(
        self, parts: list[Part], going: Mapping[str, Mapping[str, float]], arrivals: Sequence[Arrival]
    ) -> dict[str, float]:
        """What each stored tensor may add to gradients that go on. ``going``: by tensor, the gains of its sites.

        At no parameter more may arrive than ``propagated`` (the scales of norms: their share), and in the mean over the
        gradient's energy a quarter of it, so that it is ``noise`` together with what weights have of their own inputs;
        or more if so much arrives where all sites divide the whole, as they do where layers follow one another.
        """
        total = self.noise if self.propagated is None else self.propagated
        alone = divide(total, parts)
        if not arrivals or not parts:
            return alone
        limits = [
            Limit(_mix(arrival.shares, going), self._share_of_scales if arrival.is_scale else total)
            for arrival in arrivals
        ]
        energy = sum(arrival.energy for arrival in arrivals)
        if energy > 0:
            mean: dict[str, float] = {}
            for limit, arrival in zip(limits, arrivals, strict=True):
                for name, share in limit.shares.items():
                    mean[name] = mean.get(name, 0.0) + share * arrival.energy / energy
            usual = sum(alone[name] * share for name, share in mean.items() if name in alone)
            limits.append(Limit(mean, max(total / 4, usual)))
        return spread(parts, limits)

    @property
    def _share_of_scales(self) -> float:
        return 10 * self.noise if self.scale is None else self.scale

    def _divide_weights(self, groups: list[list[SiteStatistics]]) -> dict[tuple[str, int], float]:
        """What each site may add to a weight's gradient that several feed: equal parts, but for what one cannot use."""
        feeding: dict[int, list[tuple[SiteStatistics, Claim, float]]] = {}
        for group in groups:
            most = self._own_limit(group, {})
            for site in group:
                for claim in site.claims:
                    if claim.uses > 1 and claim.weight is not None and claim.gain > 0:
                        feeding.setdefault(claim.weight, []).append((site, claim, most))
        found: dict[tuple[str, int], float] = {}
        for weight, items in feeding.items():
            claim = items[0][1]
            share = self._share(claim)
            if share is not None:
                parts = [Part(site.site, most * claim.gain, 1) for site, claim, most in items]
                divided = divide(share * len(items) / claim.uses, parts)
                found.update({(name, weight): part for name, part in divided.items()})
        return found

    def _own_limit(self, group: list[SiteStatistics], parts: Mapping[tuple[str, int], float]) -> float:
        """The largest variance of an error that keeps the gradients of parameters within their shares.

        ``parts``: of the shares of weights that several sites feed, which count only if they are in there.
        """
        first = group[0]
        if first.family == "log_probability":  # at most what is assumed from the first step on
            return _levels.variance(self._assumed(first.family).value, first.dtype, first.curve)
        most = _levels.MOST if first.governed == 1 else _levels.MOST_OF_SOME
        limits = [_levels.variance(most * (1.0 if first.unit == "std" else first.std or 0.0), first.dtype)]
        for site in group:
            for claim in site.claims:
                share = self._share(claim)
                if _goes_on(site, claim) or claim.gain <= 0 or share is None:
                    continue
                if claim.kind == PROPAGATED:
                    share = _OF_ATTENTION * self.noise
                if claim.kind == SCALE and "batch_norm" in site.op and site.claim(BELOW) is None:
                    share *= _UNKNOWN_BELOW
                if claim.uses == 1 or claim.weight is None:
                    limits.append(share / (claim.uses * claim.gain))
                elif (site.site, claim.weight) in parts:
                    limits.append(parts[site.site, claim.weight] / claim.gain)
        return min(limits)

    def _rule(self, site: SiteStatistics, limit: float) -> BoundRule | Keep | None:
        """The bound for errors of variance ``limit``: a finer one at once, a coarser one step by step."""
        target = _levels.bound_for(limit, site.dtype, site.curve)
        if target <= 0:
            return None
        before = self._targets.get(site.site, target)
        target = self._targets[site.site] = min(target, math.sqrt(before * target))
        now = self.value_at(site)
        rule = self._rules.get(site.site)
        is_level = isinstance(rule, BoundRule) and rule.unit == site.unit
        if now is not None:
            target = min(target, _STRIDE * now)
        value = _levels.settle(target, now if is_level else None)
        scale = 1.0 if site.unit == "std" else site.std or 0.0
        finest = _FINEST_PROBABILITY if site.unit == "probability" else _levels.finest(site.dtype) * scale
        if value < finest:
            return Keep(f"its share of noise asks for a bound too fine to save memory ({value:.2g})")
        return BoundRule(value, site.unit)

    def _assumed(self, family: str) -> BoundRule:
        factor = math.sqrt(self.noise / _NORMAL) if self.memory is None else 1.0
        if family == "log_probability":
            return BoundRule(_levels.quantise(_PROBABILITY * _NORMAL * factor**2), "probability")
        assumed = _ASSUMED_ATTENTION if family == "attention" else _ASSUMED
        return BoundRule(_levels.quantise(min(assumed * factor, 1.0)), "std")

    def state_dict(self) -> dict[str, Any]:
        return {
            **Adaptive.state_dict(self),
            "targets": dict(self._targets),
            "memory": None if self._memory is None else self._memory.state_dict(),
            "told": self._told,
            "last": None if self._last is None else self._last.to_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Adaptive.load_state_dict(self, state)
        self._targets = dict(state["targets"])
        self._told = bool(state["told"])
        self._last = None if state["last"] is None else Statistics.from_state(state["last"])
        if (state["memory"] is None) != (self._memory is None):
            raise StateError("the state and this session do not agree whether there is a memory budget")
        if self._memory is not None:
            self._memory.load_state_dict(state["memory"], self._last.sites.values() if self._last is not None else ())


def _going_on(group: Sequence[SiteStatistics]) -> dict[str, float]:
    """By site, the noise that a unit of variance adds to gradients that go on."""
    found: dict[str, float] = {}
    for site in group:
        for claim in site.claims:
            if _goes_on(site, claim) and claim.gain > 0:
                name = site.saved or site.site
                found[name] = found.get(name, 0.0) + claim.gain
    return found


def _mix(shares: Mapping[str, float], going: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How much arrives of what a stored tensor adds, of shares by site; all of it where a site's way is not known."""
    found = {}
    for name, gains in going.items():
        whole = sum(gains.values())
        if whole > 0:
            found[name] = sum(shares.get(site, 0.0) * gain for site, gain in gains.items()) / whole
    return found


def _goes_on(site: SiteStatistics, claim: Claim) -> bool:
    """Whether noise adds up on the way down. That of attention is a branch's, and ends for the most part in weights."""
    return claim.kind == PROPAGATED and site.family != "attention"
