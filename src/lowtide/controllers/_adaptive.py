"""What all controllers with statistics share: asking for them, predicting noise, checking a layer, retreating.

Statistics of step t are handed over at the end of step t + 1 and act from step t + 2 on, always.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.bounds import BoundRule, BoundSource
from lowtide.controllers import Keep, Noise, _levels
from lowtide.controllers._channels import ChannelBounds
from lowtide.controllers._safety import SafetyNet
from lowtide.errors import BoundError, StateError
from lowtide.ledger import Ledger
from lowtide.records import Need, Site
from lowtide.statistics import PROPAGATED, SCALE, WEIGHT, Claim, SiteStatistics, Statistics, Wish

_CHECKED = ("convolution", "addmm", "mm", "linear", "native_layer_norm", "native_batch_norm", "cudnn_batch_norm")


@dataclass
class Adaptive(ABC):
    """``checks``: how many sites have their real error measured at each update, in rotation. ``factor``, ``pause`` and
    ``retreat``: see the safety net."""

    checks: int = 1
    factor: float = 4.0
    pause: int = 100
    retreat: str = "exact"
    _rules: dict[str, BoundSource | Keep] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.checks < 0:
            raise BoundError(f"checks is how many sites are checked at an update, 0 or more; got {self.checks!r}")
        self._safety = SafetyNet(factor=self.factor, pause=self.pause, retreat=self.retreat)
        self._noise: dict[str, Noise] = {}
        self._known: list[str] = []  # sites that can be checked, in order of rotation
        self._turn = 0
        self._ours: set[str] = set()  # sites whose bound no rule of the user's has set
        self._checked: list[str] = []
        self._asked: int | None = None  # the step whose statistics are under way
        self._retry = False

    # What a method decides.

    @abstractmethod
    def _is_due(self, step: int) -> bool:
        """Whether step ``step`` is to be measured."""

    @abstractmethod
    def _wish(self) -> Wish:
        """What is measured then."""

    @abstractmethod
    def _start(self, op: str, family: str) -> BoundSource | Keep:
        """The bound of a site of which nothing is known yet; ``op`` is the one that saved the tensor."""

    @abstractmethod
    def _update(self, statistics: Statistics, ledger: Ledger) -> Mapping[str, BoundSource | Keep]:
        """New bounds, by site."""

    @abstractmethod
    def _share(self, claim: Claim) -> float | None:
        """The noise that the method allows in one gradient; None if it has no such notion."""

    # What follows from it.

    def bound(self, site: Site, need: Need) -> BoundSource | Keep:
        self._ours.add(site.name)
        held = self._safety.holds(site.name)
        if held is not None:
            return held
        rule = self._rules.get(site.name)
        return rule if rule is not None else self._start(site.op, need.family)

    def wants(self, step: int) -> Wish | None:
        if self._asked is None and (self._retry or self._is_due(step)):
            self._retry, self._asked = False, step
            order = [*self._known[self._turn :], *self._known[: self._turn]]
            self._checked = order[: self.checks]
            self._turn = (self._turn + self.checks) % max(len(self._known), 1)
        if self._asked != step:
            return None
        return dataclasses.replace(self._wish(), checks=frozenset(self._checked))

    def step(self, number: int, statistics: Statistics | None, ledger: Ledger) -> bool:
        moved = self._safety.advance(number + 1)
        if statistics is not None and statistics.loss is not None:
            moved |= self._safety.loss(statistics.loss, number + 1)
        if self._asked is None or self._asked >= number:
            return moved
        self._asked = None
        beyond: set[str] = set()  # tensors that have to be exact
        if statistics is not None:
            beyond = {site.source or name for name, site in statistics.sites.items() if site.overflows}
            sites = {name: site for name, site in statistics.sites.items() if not site.overflows}
            statistics = dataclasses.replace(statistics, sites=sites)
        if statistics is None or not (statistics.sites or beyond):
            self._retry = True  # nothing was trained in that step
        elif not statistics.is_finite:
            self._retry = True
            if not statistics.is_skipped:
                moved |= self._safety.alarm("gradients are not finite", number + 1)
        else:
            moved |= self._learn(statistics, beyond, ledger, number + 1)
        return moved

    def _learn(self, statistics: Statistics, beyond: Iterable[str], ledger: Ledger, step: int) -> bool:
        ours = {name: site for name, site in statistics.sites.items() if (site.saved or name) in self._ours}
        statistics = dataclasses.replace(statistics, sites=ours)
        retreated = self._take_note(self._without_noise(statistics), ledger, step)
        new = with_stand_ins(self._update(statistics, ledger), statistics.sites.values())
        new.update(dict.fromkeys(beyond, Keep("what an error in it does to gradients is too large for a number")))
        moved = any(self._rules.get(name) != rule for name, rule in new.items())
        self._rules = {**self._rules, **new}
        return moved or retreated

    def _without_noise(self, statistics: Statistics) -> Statistics:
        """Gradients were measured with their noise; here are their energies without it.

        A weight's gradient has the noise of every site that feeds it, and none from a site that is held exactly.
        """
        errors = {name: self._error(site) or 0.0 for name, site in statistics.sites.items()}
        noise: dict[int | None, float] = {}
        for name, site in statistics.sites.items():
            for claim in site.claims:
                noise[claim.weight] = noise.get(claim.weight, 0.0) + errors[name] * claim.sensitivity
        sites = {}
        for name, site in statistics.sites.items():
            claims = tuple(
                claim.without_noise(errors[name] * claim.sensitivity if claim.weight is None else noise[claim.weight])
                for claim in site.claims
            )
            sites[name] = dataclasses.replace(site, claims=claims)
        return dataclasses.replace(statistics, sites=sites)

    def _error(self, site: SiteStatistics) -> float | None:
        """The variance of a stored value's error; None if the site has retreated, or its bound is not one number."""
        value = self.value_at(site) if self._safety.holds(site.site) is None else None
        return None if value is None else _levels.variance(value, site.dtype, site.curve)

    def _take_note(self, statistics: Statistics, ledger: Ledger, step: int) -> bool:
        """Predict the noise of the bounds that were in force; hold the checked sites to it. Whether one retreats."""
        parts = Counter(site.saved or name for name, site in statistics.sites.items())  # a tensor made of several
        self._known = [
            name
            for name, site in statistics.sites.items()
            if site.claims and site.op in _CHECKED and parts[site.saved or name] == 1
        ]
        retreated = False
        for name, site in statistics.sites.items():
            error, entry = self._error(site), ledger.sites.get(name)
            if error is None or not site.claims or (entry is not None and entry.codec == "kept"):
                self._noise.pop(name, None)
                continue
            noise = self._noise.get(name, Noise())
            onward, own = site.claim(PROPAGATED), site.claim(WEIGHT) or site.claim(SCALE)
            if onward is not None:
                noise = dataclasses.replace(noise, propagated=error * onward.gain)
            if own is not None:
                share, predicted = self._share(own), error * own.gain
                noise = dataclasses.replace(noise, share=share, predicted=predicted)
                if site.error is not None:
                    measured = site.error * own.gain
                    noise = dataclasses.replace(noise, measured=measured, checked=statistics.step)
                    retreated |= self._safety.check(name, measured, max(share or 0.0, predicted), step)
            self._noise[name] = noise
        return retreated

    def value_at(self, site: SiteStatistics) -> float | None:
        """The bound in force at a site, as a number in the site's unit; None if it is not one number.

        For a tensor that is made again, that of the stored one.
        """
        rule = self._rules.get(site.source or site.site) or self._start(site.stored_by, site.family)
        return in_unit(rule, site) if isinstance(rule, BoundRule) else None

    def noise_by_site(self) -> dict[str, Noise]:
        return dict(self._noise)

    def events(self) -> list[str]:
        return list(self._safety.events)

    def state_dict(self) -> dict[str, Any]:
        return {
            "rules": {name: rule_to_state(rule) for name, rule in self._rules.items()},
            "noise": {name: dataclasses.asdict(noise) for name, noise in self._noise.items()},
            "known": list(self._known),
            "turn": self._turn,
            "checked": list(self._checked),
            "asked": self._asked,
            "retry": self._retry,
            "safety": self._safety.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        expected = set(self.state_dict())
        if set(state) != expected:
            name = type(self).__name__.lower()
            raise StateError(f"controller {name!r} keeps {sorted(expected)} in its state; this one has {sorted(state)}")
        self._rules = {name: rule_from_state(rule) for name, rule in state["rules"].items()}
        self._noise = {name: Noise(**noise) for name, noise in state["noise"].items()}
        self._known, self._turn, self._checked = list(state["known"]), int(state["turn"]), list(state["checked"])
        self._asked, self._retry = state["asked"], bool(state["retry"])
        self._safety.load_state_dict(state["safety"])


def with_stand_ins(
    new: Mapping[str, BoundSource | Keep], sites: Iterable[SiteStatistics]
) -> dict[str, BoundSource | Keep]:
    """New bounds; for tensors that are made again, those under which they add as much noise if they are stored."""
    found = dict(new)
    for site in sites:
        rule = new.get(site.source) if site.source else None
        if isinstance(rule, BoundRule) and rule.unit in ("absolute", "std") and 0 < site.slope < math.inf:
            scale = 1.0 if rule.unit == site.unit else site.std or 0.0
            found[site.site] = BoundRule(_levels.quantise(max(rule.value * scale * math.sqrt(site.slope), 1e-30)))
    return found


def in_unit(rule: BoundRule, site: SiteStatistics) -> float | None:
    """A rule as a number in the site's unit."""
    if rule.unit == site.unit:
        return rule.value
    if rule.unit == "std" and site.unit == "absolute" and site.std:
        return rule.value * site.std
    return None


def rule_to_state(rule: BoundSource | Keep) -> Any:
    if isinstance(rule, Keep):
        return {"keep": rule.reason}
    return list(rule.values) if isinstance(rule, ChannelBounds) else str(rule)


def rule_from_state(state: Any) -> BoundSource | Keep:
    if isinstance(state, dict):
        return Keep(state["keep"])
    return ChannelBounds(tuple(state)) if isinstance(state, list) else BoundRule.parse(state)
