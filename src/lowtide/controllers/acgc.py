"""AC-GC: Evans and Aamodt, "AC-GC: Lossy Activation Compression with Guaranteed Convergence", NeurIPS 2021.

The guarantee: if the squared error of a gradient is at most e^2 V^2 whatever the error of the activations within their
bounds, and V^2 bounds E|g|^2, then E|g'|^2 <= (1 + e^2) V^2 for the gradient g' that training uses, and SGD's bound on
the loss grows by that factor at most. The bounds that achieve it, as coded by the authors in their two releases
(functional and performance), dx the error bound of an activation of size N C H W:

    conv, linear    dx^2 = e^2 |gW|^2 / (N C H W * u |gY|^2)                u = taps / strides; 1 for linear layers
    batch norm      dx_c^2 = f e^2 |gX|^2 M / (K scale_c^2 r_c^4 G_c)       by channel c of K, M = N H W, r = 1 / std
                    G_c = gscale_c^2 + r_c^2 nnz_c^2 max(gY_c^2) (absmax_c / 2)^2

nnz_c counts the non-zeros of gY. Where several layers read one tensor, |gW|^2 and u |gY|^2 are sums over them. Their
constants: functional dx^2 = e |gW|^2 / (2 ...) for convolutions and f e^2 = e for norms, so e^2 = e / 2 and f = 2;
performance dx^2 = 2 eps |gW|^2 / ... and eps, so e^2 = 2 eps and f = 1/2. Published runs have e = eps = 1.

The conv rule is the Cauchy-Schwarz inequality: it holds for the worst error there could be. For errors that are
independent, as dither makes them, ``form="statistical"`` reaches the same e^2 in the mean with bounds that are larger
by sqrt(3 N P Q / share of non-zeros), P Q the output pixels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.bounds import BoundRule, BoundSource
from lowtide.controllers import Keep, _levels
from lowtide.controllers._adaptive import Adaptive
from lowtide.controllers._channels import ChannelBounds
from lowtide.controllers._sharing import by_tensor
from lowtide.errors import BoundError, UnknownNameError
from lowtide.ledger import Ledger
from lowtide.statistics import PROPAGATED, WEIGHT, Claim, SiteStatistics, Statistics, Wish

__all__ = ["Acgc"]

_FORMS = {"functional": 2.0, "performance": 0.5, "statistical": 1.0}  # f of the rule for norms
_FLOOR = 1e-16  # under both sums of the conv rule
_NORM_FLOOR = 2.0**-16  # under dx_c^2
_NOT_YET = Keep("acgc: no statistics yet")


def conv_bound(e2: float, weights: Sequence[float], gradients: Sequence[float], numel: int) -> float:
    """dx for a tensor of ``numel`` values; |gW|^2 and u |gY|^2 of each layer that reads it."""
    return math.sqrt(e2 * max(sum(weights), _FLOOR) / (numel * max(sum(gradients), _FLOOR)))


def norm_bounds(error: float, energy: float, count: int, channels: dict[str, list[float]]) -> tuple[float, ...]:
    """dx_c for each channel; ``error`` is f e^2, ``energy`` |gX|^2, ``count`` M."""
    names = ("scale", "inverse_std", "scale_gradient", "gradient_nonzero", "gradient_peak", "absmax")
    bounds = []
    for scale, spread, gscale, nonzero, peak, absmax in zip(*(channels[name] for name in names), strict=True):
        worst = gscale**2 + spread**2 * nonzero**2 * peak**2 * (absmax / 2) ** 2
        divisor = len(channels["scale"]) * scale**2 * spread**4 * worst
        square = error * energy * count / divisor if divisor > 0 else absmax**2
        bounds.append(math.sqrt(max(square, _NORM_FLOOR)))
    return tuple(bounds)


@dataclass
class Acgc(Adaptive):
    """``noise``: e^2. ``form``: "functional" or "performance" as released, or "statistical".

    Measured every ``period`` steps; the bounds in force are the mean of those of the last ``keep`` measurements. Until
    the first, and for ops that AC-GC has no rule for, values are held exactly, or under the bound ``others`` for the
    latter: the guarantee does not cover those.
    """

    noise: float = 0.5
    form: str = "functional"
    period: int = 100
    keep: int = 10
    others: str | None = None

    def __post_init__(self) -> None:
        Adaptive.__post_init__(self)
        if self.form not in _FORMS:
            raise UnknownNameError("form of acgc", self.form, _FORMS)
        if not (isinstance(self.noise, int | float) and 0 < self.noise < math.inf):
            raise BoundError(f"acgc: noise is e^2, such as 0.5; got {self.noise!r}")
        if not isinstance(self.period, int) or self.period < 2 or not isinstance(self.keep, int) or self.keep < 1:
            raise BoundError(f"acgc: period is 2 or more and keep 1 or more; got {self.period!r} and {self.keep!r}")
        exactly = Keep("acgc: no rule for this op")
        self._others = exactly if self.others is None else BoundRule.parse(self.others)
        self._history: dict[str, list[list[float]]] = {}

    def _is_due(self, step: int) -> bool:
        return step % self.period == 0

    def _wish(self) -> Wish:
        return Wish(noise=True, spread=True, channels=self.form != "statistical")

    def _start(self, op: str, family: str) -> BoundSource | Keep:
        return self._others if family not in ("linear", "norm") else _NOT_YET

    def _share(self, claim: Claim) -> float | None:
        return self.noise if claim.kind == WEIGHT else None

    def _update(self, statistics: Statistics, ledger: Ledger) -> dict[str, BoundSource | Keep]:
        rules: dict[str, BoundSource | Keep] = {}
        for group in by_tensor(statistics.sites.values()):
            bounds = self._bounds(group)
            for site in group:
                rules[site.site] = self._averaged(site, bounds) if bounds is not None else self._others
        return rules

    def _bounds(self, group: list[SiteStatistics]) -> tuple[float, ...] | None:
        """One bound, or one for each channel, from the statistics at hand."""
        weights = [claim for site in group if (claim := site.claim(WEIGHT)) is not None]
        if len(weights) == len(group):
            if self.form == "statistical":
                return (min(self._statistical(claim, group[0].dtype) for claim in weights),)
            gradients = [site.reuse * (site.gradient or 0.0) for site in group]
            return (
                conv_bound(
                    self.noise, [claim.energy for claim in weights], gradients, group[0].numel * group[0].passes
                ),
            )
        site, onward = group[0], group[0].claim(PROPAGATED)
        if site.family != "norm" or onward is None:
            return None
        if self.form == "statistical":
            return (min(self._statistical(onward, site.dtype), _levels.MOST),)
        if "scale_gradient" not in site.channels:
            return None
        count = site.numel * site.passes // len(site.channels["scale"])
        return norm_bounds(_FORMS[self.form] * self.noise, onward.energy, count, dict(site.channels))

    def _statistical(self, claim: Claim, dtype: str) -> float:
        return _levels.bound_for(self.noise / (claim.uses * claim.gain), dtype) if claim.gain > 0 else math.inf

    def _averaged(self, site: SiteStatistics, bounds: tuple[float, ...]) -> BoundSource | Keep:
        """The mean over the last measurements."""
        if not all(0 < value < math.inf for value in bounds):
            return self._rules.get(site.site) or self._others
        history = [past for past in self._history.get(site.site, []) if len(past) == len(bounds)]
        history = self._history[site.site] = [*history, list(bounds)][-self.keep :]
        means = tuple(sum(column) / len(history) for column in zip(*history, strict=True))
        if site.family == "norm" and self.form != "statistical":
            return ChannelBounds(means)
        return BoundRule(means[0], site.unit)

    def state_dict(self) -> dict[str, Any]:
        return {**Adaptive.state_dict(self), "history": {name: list(past) for name, past in self._history.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Adaptive.load_state_dict(self, state)
        self._history = {name: [list(past) for past in item] for name, item in state["history"].items()}
