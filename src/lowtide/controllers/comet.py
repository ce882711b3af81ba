"""COMET: Jin et al., "COMET: A Novel Memory-Efficient Deep Learning Training Framework by Using Error-Bounded Lossy
Compression", VLDB 2022.

The error of a weight gradient is normal, with a standard deviation that the error bound determines; the bound is chosen
so that it is one percent of the mean momentum. Four phases at each update, by their names in the paper:

    parameter collection     N samples, share R of non-zero activations, gradient gY, mean momentum M
    gradient assessment      sigma = 0.01 M
    activation assessment    eb = sigma / (a L sqrt(N R))
    adaptive compression     the bounds hold for W = 1000 steps; W is halved when a bound moves by more than 2x

``a L`` is, as published, 0.32 times the mean over samples of the largest |gY|; a coefficient that was fitted. By
default it is lambda / sqrt(3) with lambda^2 = |gY|^2 / (N O), O the channels of gY, which is what it stands for: exact
for independent errors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lowtide.bounds import BoundRule, BoundSource
from lowtide.controllers import Keep
from lowtide.controllers._adaptive import Adaptive
from lowtide.controllers._sharing import by_tensor
from lowtide.errors import BoundError
from lowtide.ledger import Ledger
from lowtide.statistics import WEIGHT, Claim, SiteStatistics, Statistics, Wish

__all__ = ["Comet"]

COEFFICIENT = 0.32
_FIRST_PERIOD = Keep("comet: the first period is uncompressed, statistics are being collected")
_SHADOW_STEPS = 32  # of momentum where the optimizer has none: 0.9^32 = 0.03


@dataclass(frozen=True, slots=True)
class Collected:
    """What the first phase collects at one layer; ``gradient`` is |gY|^2 and ``peak`` the mean of each sample's max."""

    samples: int
    outputs: int
    nonzero: float
    gradient: float
    peak: float
    momentum: float


def collect(site: SiteStatistics) -> Collected | None:
    """Parameter collection. None for what is not the input of a layer with a weight and a momentum.

    gY carries the factor of a gradient scaler and is not clipped, while the momentum is unscaled and clipped; the norm
    of the weight's gradient after over before is the factor between them.
    """
    claim = site.claim(WEIGHT)
    known = site.momentum, site.stepped, site.gradient, site.nonzero
    if claim is None or claim.energy <= 0 or any(number is None for number in known):
        return None
    momentum, stepped, gradient, nonzero = (float(number or 0) for number in known)
    factor = stepped / claim.energy
    peak = (site.peak or 0.0) * math.sqrt(factor)
    return Collected(site.samples * site.passes, site.outputs, nonzero, gradient * factor, peak, momentum)


def assess_gradient(momentum: float, alpha: float = 0.01) -> float:
    """The standard deviation that the error of a gradient's entries may have."""
    return alpha * momentum


def assess_activation(sigma: float, layer: Collected, *, published: bool = False) -> float:
    """The error bound that leads to ``sigma``; infinite where no gradient arrives."""
    if published:
        slope = COEFFICIENT * layer.peak
    else:
        slope = math.sqrt(layer.gradient / (layer.samples * layer.outputs) / 3)
    spread = slope * math.sqrt(layer.samples * layer.nonzero)
    return sigma / spread if spread > 0 else math.inf


@dataclass
class Comet(Adaptive):
    """``alpha``: sigma over the mean momentum. ``period``: W. ``published``: the fitted coefficient and L of the paper.

    The paper treats the inputs of convolutions, and recomputes what norms and activation functions read. Here the
    inputs of linear layers are treated alike, and what other ops read is held under the bound ``others`` (None:
    exactly) once the first period is over.
    """

    alpha: float = 0.01
    period: int = 1000
    published: bool = False
    others: str | None = "0.1 std"

    def __post_init__(self) -> None:
        Adaptive.__post_init__(self)
        if not (isinstance(self.alpha, int | float) and 0 < self.alpha < math.inf):
            raise BoundError(f"comet: alpha is a share of the mean momentum, such as 0.01; got {self.alpha!r}")
        if not isinstance(self.period, int) or self.period < 2:
            raise BoundError(f"comet: period is a number of steps, 2 or more; got {self.period!r}")
        exactly = Keep("comet: not the input of a convolution or a linear layer")
        self._others = exactly if self.others is None else BoundRule.parse(self.others)
        self._window = self.period
        self._next = self.period  # the first step of the next period

    @property
    def window(self) -> int:
        """W, the length of the period at hand."""
        return self._window

    def _is_due(self, step: int) -> bool:
        return step == self._next - 2  # so that the bounds are there when the period begins

    def _wish(self) -> Wish:
        return Wish(noise=True, spread=True, momentum=True, shadow=True, peaks=self.published)

    def wants(self, step: int) -> Wish | None:
        soon = self._next - 2 - _SHADOW_STEPS <= step < self._next - 2
        return Adaptive.wants(self, step) or (Wish(shadow=True) if soon else None)

    def _start(self, op: str, family: str) -> BoundRule | Keep:
        return self._others if self._rules else _FIRST_PERIOD

    def _share(self, claim: Claim) -> None:
        return None

    def _update(self, statistics: Statistics, ledger: Ledger) -> dict[str, BoundSource | Keep]:
        """Adaptive compression."""
        rules: dict[str, BoundSource | Keep] = {}
        moves = [1.0]
        for group in by_tensor(statistics.sites.values()):
            bound = min((self._bound(site) for site in group), default=math.inf)
            for site in group:
                before = self._rules.get(site.site)
                if not 0 < bound < math.inf:
                    rules[site.site] = before or self._others
                    continue
                rules[site.site] = BoundRule(bound)
                if isinstance(before, BoundRule) and before.unit == "absolute":
                    moves.append(max(bound / before.value, before.value / bound))
        self._window = max(self._window // 2, 2) if max(moves) > 2 else self.period
        self._next = statistics.step + 2 + self._window
        return rules

    def _bound(self, site: SiteStatistics) -> float:
        layer = collect(site)
        if layer is None:
            return math.inf
        return assess_activation(assess_gradient(layer.momentum, self.alpha), layer, published=self.published)

    def state_dict(self) -> dict[str, Any]:
        return {**Adaptive.state_dict(self), "window": self._window, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        Adaptive.load_state_dict(self, state)
        self._window, self._next = int(state["window"]), int(state["next"])
