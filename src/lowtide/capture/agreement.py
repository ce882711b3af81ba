"""Ranks that have parts of one tensor (DTensor) measure together, so that bounds are the same on all of them.

Under tensor parallelism every rank has parts of some layers, and copies of all that lies between them: norms, residual
streams, biases. The gradients of those copies are computed on each rank for itself and have to be the same, bit for
bit; nothing puts copies right that have drifted apart. What is saved for them comes back the same where its bound is.
But bounds follow from what is measured everywhere, and each rank measures its own parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch import distributed as dist

from lowtide.capture.flow import merge
from lowtide.statistics import KINDS, Claim, SiteStatistics, Statistics

_NUMBERS = ("gradient", "nonzero", "std", "peak", "stepped", "momentum", "error", "governed", "slope")


class Agreement:
    """Knows the process groups of the meshes on which tensors are divided. All their ranks save the same sites."""

    def __init__(self) -> None:
        self._meshes: list[Any] = []
        self._groups: list[Any] = []

    def look(self, tensor: Tensor) -> None:
        """If this is a DTensor, its ranks agree from now on. They all come by here, since they all run this op."""
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None or mesh in self._meshes:
            return
        self._meshes.append(mesh)
        groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
        self._groups += [group for group in groups if group not in self._groups]

    @property
    def is_needed(self) -> bool:
        return bool(self._groups)

    def merge(self, statistics: Statistics | None) -> Statistics | None:
        """What all ranks together have measured in a step. Each of them must call this, if it has measured or not."""
        for group in self._groups:
            states: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(states, None if statistics is None else statistics.to_state(), group=group)
            found = [Statistics.from_state(state) for state in states if state is not None]
            statistics = _together(found) if found else None
        return statistics


def _together(parts: Sequence[Statistics]) -> Statistics:
    """Sensitivities and energies are sums over a gradient, so their means stand in the same proportion as their sums:
    the noise is that of the whole gradient where ranks have parts of it, and what it was where each has all of it."""
    sites: dict[str, list[SiteStatistics]] = {}
    for part in parts:
        for name, site in part.sites.items():
            sites.setdefault(name, []).append(site)
    return Statistics(
        parts[0].step,
        {name: _site(same) for name, same in sites.items()},
        _mean(part.loss for part in parts),
        any(part.is_skipped for part in parts),
        merge(arrival for part in parts for arrival in part.arrivals),
    )


def _site(parts: Sequence[SiteStatistics]) -> SiteStatistics:
    channels = {
        name: [sum(numbers) / len(parts) for numbers in zip(*(part.channels[name] for part in parts), strict=True)]
        for name in parts[0].channels
        if len({len(part.channels.get(name, ())) for part in parts}) == 1
    }
    curves = [part.curve for part in parts if part.curve]
    curve = tuple(sum(numbers) / len(curves) for numbers in zip(*curves, strict=True))
    numbers: dict[str, Any] = {name: _mean(getattr(part, name) for part in parts) for name in _NUMBERS}
    return dataclasses.replace(parts[0], claims=tuple(_claims(parts)), curve=curve, channels=channels, **numbers)


def _claims(parts: Sequence[SiteStatistics]) -> Iterator[Claim]:
    for kind in KINDS:
        same = [claim for part in parts if (claim := part.claim(kind)) is not None]
        if same:
            sensitivity, energy = (sum(numbers) / len(same) for numbers in zip(*map(_amounts, same), strict=True))
            yield dataclasses.replace(same[0], sensitivity=sensitivity, energy=energy)


def _amounts(claim: Claim) -> tuple[float, float]:
    return claim.sensitivity, claim.energy


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if known else None
