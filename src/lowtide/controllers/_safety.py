"""What is done when the model of the noise is wrong or training goes astray: back to exact storage for a while."""

from __future__ import annotations

import logging
import math
from typing import Any

from lowtide.bounds import BoundRule
from lowtide.controllers import Keep
from lowtide.errors import BoundError

_LOG = logging.getLogger("lowtide")
_EVENTS = 100  # remembered
_ENOUGH = 20  # losses before one of them can be called a jump
_DECAY = 0.95


class SafetyNet:
    """Holds sites, or all of them, exactly for ``pause`` steps.

    A site: if a check measured ``factor`` times the noise that its bound was set for. All: if the loss is no number, or
    exceeds its running mean by six running standard deviations and by half of the mean, or if the optimizer stepped
    with gradients that are not finite. Where there is no room for exact storage, ``retreat`` can be a fine bound.
    """

    def __init__(self, *, factor: float, pause: int, retreat: str) -> None:
        if not factor > 1 or pause < 1:
            raise BoundError(f"the safety net wants factor > 1 and pause >= 1, got {factor!r} and {pause!r}")
        self._factor, self._pause = factor, pause
        self._bound = None if retreat == "exact" else BoundRule.parse(retreat)
        self._until: dict[str, int] = {}  # the first step of normal storage again, by site; "" is all sites
        self._mean, self._variance, self._losses = 0.0, 0.0, 0
        self.events: list[str] = []

    def holds(self, site: str) -> Keep | BoundRule | None:
        """What ``site`` retreats to; None if it does not."""
        if site not in self._until and "" not in self._until:
            return None
        return self._bound or Keep("safety net: exact storage for a while, see events")

    @property
    def is_holding(self) -> bool:
        return bool(self._until)

    def advance(self, step: int) -> bool:
        """Step ``step`` is next. Whether somebody returns to normal storage."""
        ended = [site for site, until in self._until.items() if until <= step]
        for site in ended:
            del self._until[site]
            self._say(step, f"{site or 'all sites'}: back from {self._name}")
        return bool(ended)

    def check(self, site: str, measured: float, allowed: float, step: int) -> bool:
        """A measured noise. Whether the site retreats."""
        if math.isfinite(measured) and measured <= self._factor * allowed:
            return False
        self._until[site] = step + self._pause
        self._say(
            step,
            f"{site}: measured noise {measured:.3g} is more than {self._factor:g} times its share {allowed:.3g}; "
            f"{self._name} for {self._pause} steps",
        )
        return True

    def loss(self, value: float, step: int) -> bool:
        """A loss. Whether all sites retreat."""
        if not math.isfinite(value):
            return self.alarm(f"the loss is {value}", step)
        deviation = value - self._mean
        if self._losses >= _ENOUGH and deviation > max(6 * math.sqrt(self._variance), abs(self._mean) / 2):
            return self.alarm(f"the loss jumped from about {self._mean:.4g} to {value:.4g}", step)
        weight = max(1 - _DECAY, 1 / (self._losses + 1))
        self._mean += weight * deviation
        self._variance = (1 - weight) * (self._variance + weight * deviation**2)
        self._losses += 1
        return False

    def alarm(self, why: str, step: int) -> bool:
        """All sites retreat; one alarm at a time."""
        if "" in self._until:
            self._until[""] = step + self._pause
            return False
        self._until[""] = step + self._pause
        self._say(step, f"{why}: {self._name} for {self._pause} steps, at all sites")
        return True

    @property
    def _name(self) -> str:
        return "exact storage" if self._bound is None else f"a bound of {self._bound}"

    def note(self, step: int, text: str) -> None:
        """Something to know that is no cause for concern."""
        self.events = [*self.events, f"step {step}: {text}"][-_EVENTS:]

    def _say(self, step: int, text: str) -> None:
        self.note(step, text)
        _LOG.warning("step %d: %s", step, text)

    def state_dict(self) -> dict[str, Any]:
        return {
            "until": dict(self._until),
            "losses": [self._mean, self._variance, self._losses],
            "events": list(self.events),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._until = dict(state["until"])
        self._mean, self._variance, self._losses = state["losses"]
        self.events = list(state["events"])
