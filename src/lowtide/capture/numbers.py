"""Numbers of a step, by site and name: as they come in on the device, and as statistics once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.statistics import KINDS, PROPAGATED, Claim, SiteStatistics, Statistics

# Averaged over the forwards of a step; everything else is summed.
_MEANS = frozenset(
    f"{prefix}{name}"
    for prefix, names in (("", "peak error governed slope"), ("channel.", "absmax scale inverse_std gradient_peak"))
    for name in names.split()
)
# These are norms; their squares are summed. A device is spared hundreds of squares that the host takes as well.
_ROOTS = frozenset(("root", "stepped", *(f"energy.{kind}" for kind in KINDS)))


@dataclass(slots=True)
class Record:
    """One site in the step at hand: what it is, and its numbers, each with the backward pass that it came from.

    The spread is that of ``sampled`` values: their non-zeros, their sum, and the root of the sum of their squares.
    """

    facts: dict[str, Any]
    sampled: int = 0
    numbers: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    weights: dict[str, nn.Parameter] = field(default_factory=dict)  # by the kind of the gradient that ends in them

    def add(self, name: str, number: Tensor, backward: int | None = None) -> None:
        self.numbers.setdefault(name, []).append((-1 if backward is None else backward, number))

    def totals(self, since: int) -> dict[str, Tensor]:
        """All numbers over the step, without those of backward passes before ``since``."""
        found: dict[str, Tensor] = {}
        for name, items in self.numbers.items():
            parts = [number for backward, number in items if backward < 0 or backward >= since]
            if len(parts) == 1:  # as a rule; hundreds of numbers, and each op on them is a launch
                found[name] = parts[0]
            elif parts:
                together = torch.stack(parts)
                if name in _ROOTS:
                    found[name] = torch.linalg.vector_norm(together)
                else:
                    found[name] = together.mean(0) if name in _MEANS else together.sum(0)
        return found

    def passes(self, since: int) -> int:
        return max(sum(backward >= since for backward, _ in self.numbers.get("gradient", ())), 1)


@dataclass(frozen=True, slots=True)
class Known:
    """What the host knows of a record. ``weights``: by kind, how many sites feed the weight, and its number."""

    facts: dict[str, Any]
    sampled: int
    weights: dict[str, tuple[int, int]]


def read(
    step: int,
    names: list[tuple[str, str]],
    parts: list[list[float]],
    known: list[Known],
    is_skipped: bool,
) -> Statistics:
    """Statistics from numbers that have arrived, and what the host knew before."""
    found: dict[str, dict[str, list[float]]] = {}
    for (site, name), part in zip(names, parts, strict=True):
        found.setdefault(site, {})[name] = part
    loss = found.pop("", {}).get("loss")
    sites = {item.facts["site"]: _site(item, found.get(item.facts["site"], {})) for item in known}
    return Statistics(step, sites, None if loss is None else loss[0], is_skipped)


def _site(known: Known, parts: dict[str, list[float]]) -> SiteStatistics:
    prefix = "channel."
    channels = {name.removeprefix(prefix): part for name, part in parts.items() if name.startswith(prefix)}
    numbers = {name: part[0] for name, part in parts.items() if not name.startswith(prefix)}
    numbers |= {name: number * number for name, number in numbers.items() if name in _ROOTS}
    claims = tuple(
        Claim(kind, numbers[f"sensitivity.{kind}"], numbers[f"energy.{kind}"], *known.weights.get(kind, (1, None)))
        for kind in KINDS
        if f"sensitivity.{kind}" in numbers and f"energy.{kind}" in numbers
    )
    added = parts.get(f"sensitivity.{PROPAGATED}", [])
    curve = tuple(each / added[0] for each in added) if len(added) > 1 and added[0] > 0 else ()
    plain = ("gradient", "peak", "stepped", "momentum", "error", "governed", "slope")
    found: dict[str, Any] = {name: numbers[name] for name in plain if name in numbers}
    if "nonzero" in numbers:
        count = max(numbers["nonzero"], 1e-30)
        found["nonzero"] = numbers["nonzero"] / max(known.sampled, 1)
        found["std"] = max(numbers["root"] / count - (numbers["sum"] / count) ** 2, 0.0) ** 0.5
    return SiteStatistics(**known.facts, claims=claims, curve=curve, channels=channels, **found)
