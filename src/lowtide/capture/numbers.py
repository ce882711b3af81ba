"""Numbers of a step, by site and name: as they come in on the device, and as statistics once they are on the host."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.statistics import KINDS, Claim, SiteStatistics, Statistics

# Averaged over the forwards of a step; everything else is summed.
_MEANS = frozenset(
    f"{prefix}{name}"
    for prefix, names in (
        ("", "nonzero mean square peak error"),
        ("channel.", "absmax scale inverse_std gradient_peak"),
    )
    for name in names.split()
)


@dataclass(slots=True)
class Record:
    """One site in the step at hand: what it is, and its numbers, each with the backward pass that it came from."""

    facts: dict[str, Any]
    numbers: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    weights: dict[str, nn.Parameter] = field(default_factory=dict)  # by the kind of the gradient that ends in them

    def add(self, name: str, number: Tensor, backward: int | None = None) -> None:
        self.numbers.setdefault(name, []).append((-1 if backward is None else backward, number.detach()))

    def totals(self, since: int) -> dict[str, Tensor]:
        """All numbers over the step, without those of backward passes before ``since``."""
        found: dict[str, Tensor] = {}
        for name, items in self.numbers.items():
            parts = [number for backward, number in items if backward < 0 or backward >= since]
            if len(parts) == 1:  # as a rule; hundreds of numbers, and each op on them is a launch
                found[name] = parts[0]
            elif parts:
                together = torch.stack(parts)
                found[name] = together.mean(0) if name in _MEANS else together.sum(0)
        return found

    def passes(self, since: int) -> int:
        return max(sum(backward >= since for backward, _ in self.numbers.get("gradient", ())), 1)


def read(
    step: int,
    names: list[tuple[str, str]],
    parts: list[Tensor],
    facts: list[tuple[dict[str, Any], dict[str, int]]],
    is_skipped: bool,
) -> Statistics:
    """Statistics from numbers that have arrived. ``facts``: of each site, with the uses of its weights by kind."""
    found: dict[str, dict[str, Tensor]] = {}
    for (site, name), part in zip(names, parts, strict=True):
        found.setdefault(site, {})[name] = part
    loss = found.pop("", {}).get("loss")
    sites = {item["site"]: _site(item, uses, found.get(item["site"], {})) for item, uses in facts}
    return Statistics(step, sites, None if loss is None else float(loss), is_skipped)


def _site(facts: dict[str, Any], uses: dict[str, int], numbers: dict[str, Tensor]) -> SiteStatistics:
    claims = tuple(
        Claim(kind, float(numbers[f"sensitivity.{kind}"]), float(numbers[f"energy.{kind}"]), uses.get(kind, 1))
        for kind in KINDS
        if f"sensitivity.{kind}" in numbers and f"energy.{kind}" in numbers
    )
    plain = ("gradient", "nonzero", "peak", "stepped", "momentum", "error")
    known: dict[str, Any] = {name: float(numbers[name]) for name in plain if name in numbers}
    if "nonzero" in numbers:  # mean and mean square are those of all values, the spread that of the non-zeros
        share = max(known["nonzero"], 1e-30)
        known["std"] = max(float(numbers["square"]) / share - (float(numbers["mean"]) / share) ** 2, 0.0) ** 0.5
    prefix = "channel."
    channels = {name.removeprefix(prefix): part.tolist() for name, part in numbers.items() if name.startswith(prefix)}
    return SiteStatistics(**facts, claims=claims, channels=channels, **known)
