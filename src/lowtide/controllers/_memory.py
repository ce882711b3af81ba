"""A number of bytes as the target: which bounds meet it, and what payloads really took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from lowtide import sizes
from lowtide.bounds import BoundRule, BoundSource
from lowtide.controllers import Keep, _levels
from lowtide.controllers._allocation import Stored, allocate
from lowtide.controllers._sharing import by_tensor
from lowtide.errors import BudgetError, SizeError
from lowtide.ledger import Ledger
from lowtide.statistics import PROPAGATED, SCALE, SiteStatistics

_AIM, _LOW, _HIGH = 0.985, 0.97, 1.0  # of the target: what is aimed at, and what is left as it is
_DRIFT = (0.95, 1.005)  # of the target: how far what is held may drift before bounds are looked at again
_WAIT = 2  # steps until payloads tell what a change of bounds has led to
_WATCH = 8  # steps between looks at a target that is met
_PER_OCTAVE = 32
_ASSUMED = (
    3 * 0.005 / 0.1**2
)  # where no sensitivity is known: 0.1 std is taken to add 0.005 of noise, all sites together
_ROOM = Keep("exact: the memory budget has room for it")


class Memory:
    """Turns "8GiB" or a ratio into bounds. ``is_met`` once what is held lies between 0.97 and 1.0 of the target."""

    def __init__(self, target: str | float) -> None:
        self._ratio, self._nbytes = _parse(target)
        self._text = str(target)
        self._sites: dict[str, SiteStatistics] = {}
        self._seen: dict[str, tuple[float, float]] = {}  # by tensor: a ratio to the std, and bits a value
        self._changed = -_WAIT  # the step at whose end bounds were last changed
        self._limited = False  # all bounds are as large as they can be
        self._is_new = False  # statistics that no bounds have been fitted to
        self._over: bool | None = None  # whether the last look found more than the target
        self._stride = 1.0  # of the way (of a bound's logarithm) to what is asked for: less after an overshoot
        self.is_met = False

    def learn(self, sites: Iterable[SiteStatistics]) -> None:
        """New statistics."""
        self._sites = {site.site: site for site in sites}
        self.is_met = False
        self._is_new = True
        self._over, self._stride = None, 1.0

    def fit(self, ledger: Ledger, rules: Mapping[str, BoundSource | Keep], step: int) -> dict[str, BoundRule | Keep]:
        """Bounds from the statistics, corrected by what the payloads of step ``step`` took; empty if none changes."""
        if self.is_met and step % _WATCH:
            return {}
        raw = sum(entry.raw_nbytes for entry in ledger.sites.values())
        held = sum(entry.held_nbytes for entry in ledger.sites.values())
        if not self._sites or not raw or step < self._changed + _WAIT:
            return {}
        target = self._share(ledger) * raw
        if self.is_met and _DRIFT[0] * target <= held <= _DRIFT[1] * target:
            return {}
        groups = [group for group in by_tensor(self._sites.values()) if self._is_placed(group, ledger)]
        placed = {group[0].site: _held(group, ledger) for group in groups}
        self._measure(groups, rules, ledger)
        if _LOW * target <= held <= _HIGH * target and not self._is_new:
            self.is_met = True
            return {}
        if self._limited and held > target:
            self._refuse(held / raw, ledger)
        tensors = [self._stored(group, len(groups), rules, ledger) for group in groups]
        chosen = allocate(tensors, _AIM * target - (held - sum(placed.values())))
        chosen |= _of_views(groups, chosen)
        self._limited = all(chosen[item.name] == item.most == _levels.MOST for item in tensors)
        self._changed = step
        self._is_new = self.is_met = False
        self._pace(held > target)
        new: dict[str, BoundRule | Keep] = {}
        for group in groups:
            before = _ratio(rules.get(group[0].site), group[0])
            rule = _rule(group[0], _towards(chosen[group[0].site], before, self._stride))
            new.update({site.site: rule for site in group if not site.source and rules.get(site.site) != rule})
        self.is_met = not new
        return new

    def _pace(self, over: bool) -> None:
        """Bits do not fall by one an octave with every coder: halve the stride when the target has been jumped over."""
        if self._over is not None and over is not self._over:
            self._stride = max(self._stride / 2, 1 / 8)
        self._over = over

    def noise(self, rules: Mapping[str, BoundSource | Keep]) -> float:
        """What the bounds add, as predicted: the mean over weights, and what goes on to the layers below."""
        total = 0.0
        for site in self._sites.values():
            ratio = _ratio(rules.get(site.source or site.site), site)
            if ratio is not None and site.claims and site.family != "log_probability":
                total += self._cost([site]) * ratio**2 / 3
        return total

    def _is_placed(self, group: list[SiteStatistics], ledger: Ledger) -> bool:
        """Whether the tensor's bytes are ours to decide: what is made again has none."""
        first, entry = group[0], ledger.sites.get(group[0].site)
        if entry is None or first.family == "log_probability" or not _scale(first):
            return False
        return bool(first.claims) or entry.codec.split()[0] != "again"

    def _share(self, ledger: Ledger) -> float:
        if self._ratio is not None:
            return self._ratio
        return self._nbytes / ledger.raw_peak if ledger.raw_peak else 1.0

    def _cost(self, group: list[SiteStatistics], count: int = 0) -> float:
        """Noise per squared ratio: weights as their mean, what propagates as half of its sum, scales as a tenth.

        What attention adds to the gradients of queries, keys and values counts as what a weight's own input adds.
        """
        weights = sum(1 for site in self._sites.values() if site.claim("weight") is not None) or 1
        scales = sum(1 for site in self._sites.values() if site.claim(SCALE) is not None) or 1
        parts = {PROPAGATED: 1 / weights if group[0].family == "attention" else 0.5, SCALE: 0.1 / scales}
        gain = sum(claim.gain * parts.get(claim.kind, 1 / weights) for site in group for claim in site.claims)
        if not any(site.claims for site in group):
            return _ASSUMED / max(count, 1)
        return gain * (_scale(group[0]) * _levels.efficiency(group[0].dtype)) ** 2

    def _measure(
        self, groups: list[list[SiteStatistics]], rules: Mapping[str, BoundSource | Keep], ledger: Ledger
    ) -> None:
        for group in groups:
            first, entry = group[0], ledger.sites[group[0].site]
            ratio = _ratio(rules.get(first.site), first)
            if ratio is not None and entry.codec != "kept" and first.numel and entry.saves:
                self._seen[first.site] = (ratio, 8 * _held(group, ledger) / (first.numel * entry.saves))

    def _stored(
        self, group: list[SiteStatistics], count: int, rules: Mapping[str, BoundSource | Keep], ledger: Ledger
    ) -> Stored:
        first = group[0]
        finest = _levels.finest(first.dtype)
        before = _ratio(rules.get(first.site), first) or finest
        numel = first.numel * max(ledger.sites[first.site].saves, 1)
        return Stored(
            first.site,
            numel,
            numel * _itemsize(first.dtype),
            self._cost(group, count),
            least=max(before / 2, finest),
            most=min(max(before, finest) * 2, _levels.MOST),
            nonzero=first.nonzero if first.nonzero is not None else 1.0,
            seen=self._seen.get(first.site),
            may_be_kept=before / 2 <= finest,
        )

    def _refuse(self, share: float, ledger: Ledger) -> None:
        raise BudgetError(
            f"a memory budget of {self._text} cannot be met: under the largest bounds what is held is still "
            f"{share:.1%} of plain training's {ledger.raw_peak} bytes. The smallest budget that can be met here is "
            f"{math.ceil(share * ledger.raw_peak / _LOW)} bytes ({share / _LOW:.1%})"
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "seen": {name: list(pair) for name, pair in self._seen.items()},
            "changed": self._changed,
            "limited": self._limited,
            "is_new": self._is_new,
            "is_met": self.is_met,
            "over": self._over,
            "stride": self._stride,
        }

    def load_state_dict(self, state: dict[str, Any], sites: Iterable[SiteStatistics]) -> None:
        self.learn(sites)
        self._seen = {name: (pair[0], pair[1]) for name, pair in state["seen"].items()}
        self._changed, self._limited = int(state["changed"]), bool(state["limited"])
        self.is_met, self._is_new = bool(state["is_met"]), bool(state["is_new"])
        self._over, self._stride = state["over"], float(state["stride"])


def _of_views(groups: Iterable[list[SiteStatistics]], chosen: Mapping[str, float | None]) -> dict[str, float | None]:
    """Queries, keys and values are views of one tensor, as a rule, and keeping one would keep all of it: only where
    all of them are to be kept they are; else these have the finest bound."""
    read = [group[0] for group in groups if group[0].family == "attention"]
    bounded = {_op_of(site) for site in read if chosen[site.site] is not None}
    return {
        site.site: _levels.finest(site.dtype) for site in read if chosen[site.site] is None and _op_of(site) in bounded
    }


def _op_of(site: SiteStatistics) -> str:
    return site.site.rpartition(".")[0]


def _parse(target: str | float) -> tuple[float | None, int]:
    """A ratio, or bytes."""
    text = str(target).strip()
    try:
        ratio = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None, sizes.parse(text, what="memory")
    if isinstance(target, int) and not isinstance(target, bool) and target > 1:
        return None, target
    if not 0 < ratio <= 1:
        raise SizeError(f"memory is a number of bytes ('8GiB') or a ratio from 0 to 1 ('0.25', '25%'); got {target!r}")
    return ratio, 0


def _scale(site: SiteStatistics) -> float:
    """The standard deviation in the unit of the site's bound."""
    return 1.0 if site.unit == "std" else site.std or 0.0


def _ratio(rule: BoundSource | Keep | None, site: SiteStatistics) -> float | None:
    """A bound as a ratio to the standard deviation; None if there is none."""
    if not isinstance(rule, BoundRule) or not _scale(site):
        return None
    return rule.value if rule.unit == "std" else rule.value / _scale(site)


def _towards(ratio: float | None, before: float | None, stride: float) -> float | None:
    return before * (ratio / before) ** stride if ratio is not None and before is not None else ratio


def _rule(site: SiteStatistics, ratio: float | None) -> BoundRule | Keep:
    if ratio is None:
        return _ROOM
    return BoundRule(_levels.quantise(ratio * _scale(site), _PER_OCTAVE), site.unit)


def _held(group: list[SiteStatistics], ledger: Ledger) -> int:
    return sum(ledger.sites[site.site].held_nbytes for site in group if site.site in ledger.sites)


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)
