"""Bounds that never change: one for each family of ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lowtide.bounds import BoundRule
from lowtide.controllers import Noise
from lowtide.errors import StateError, UnknownNameError
from lowtide.ledger import Ledger
from lowtide.records import Need, Site
from lowtide.statistics import Statistics

__all__ = ["Fixed"]

DEFAULTS: Mapping[str, str] = {
    "linear": "0.4 std",
    "norm": "0.4 std",
    "attention": "0.1 std",
    "product": "0.1 std",
    "pointwise": "0.1 std",
    "log_probability": "0.001 probability",
    "unknown": "0.1 std",
}


@dataclass(slots=True)
class Fixed:
    """``table`` maps a family of ops to its bound; families left out have the defaults above.

    A choice, not yet a measured optimum: their effect on accuracy has not been established. Ops whose error propagates
    to the layers below get a quarter of the bound of conv and linear inputs. Probabilities may be off by 0.001, at
    random: that adds as much, at most, to the variance of a row's gradient, whose energy is 2 at most.
    """

    table: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for family in self.table:
            if family not in DEFAULTS:
                raise UnknownNameError("family of ops", family, DEFAULTS)
        self.table = {family: BoundRule.parse(rule) for family, rule in {**DEFAULTS, **self.table}.items()}

    @classmethod
    def of(cls, options: Any) -> Fixed:
        """From an object that has a bound, or None for the default, under the name of a family."""
        given = {family: getattr(options, family, None) for family in DEFAULTS}
        return cls({family: rule for family, rule in given.items() if rule is not None})

    def bound(self, site: Site, need: Need) -> BoundRule:
        rule: BoundRule = self.table[need.family]
        return rule

    def wants(self, step: int) -> None:
        """Constants need no statistics."""

    def step(self, number: int, statistics: Statistics | None, ledger: Ledger) -> bool:
        """Constants do not move."""
        return False

    def noise_by_site(self) -> dict[str, Noise]:
        return {}

    def events(self) -> tuple[str, ...]:
        return ()

    def state_dict(self) -> dict[str, Any]:
        return {"table": {family: str(rule) for family, rule in self.table.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"table"}:
            raise StateError(f"controller 'fixed' keeps 'table' in its state, the state dict has {sorted(state)}")
        if set(state["table"]) != set(DEFAULTS):
            raise StateError(
                f"the table of 'fixed' has {', '.join(DEFAULTS)}; the state dict has {sorted(state['table'])}"
            )
        self.table = {family: BoundRule.parse(rule) for family, rule in state["table"].items()}
