"""What becomes of noise on its way down: how much of a share that one site adds arrives at each parameter.

Noise that goes on to the layers below is a share of the gradient that it is added to. An op hands that share on as it
is; where gradients of several ops meet, as those of a branch and of the stream around it do, each brings its own share
with the part of the energy that it has. So a share that is large in a branch may be small in the stream.

Nodes are met from below, site by site, while forward runs, and each gets a hook. Backward tells the energies of
gradients that meet. Nodes go by their numbers: nothing here keeps a graph alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.sums import norm
from lowtide.statistics import Arrival

_LEAF = "AccumulateGrad"
_CANCELLED = 0.25  # of the sum of energies: what gradients that meet have in common is not taken to cancel further
_NOTHING = 1e-6  # shares of a share that are not worth a word

Place = tuple[int, int]  # a node, and one of its edges; -1 for what arrives at it
Shares = dict[str, float]


class Flow:
    """The way of gradients through one forward's graph, from the sites down."""

    def __init__(self) -> None:
        self._above: dict[int, list[Place]] = {}  # by node: who adds to the gradient that arrives at it
        self._below: dict[int, list[tuple[int, int]]] = {}  # by node: edges, and the nodes that they lead to
        self._leaves: dict[int, list[tuple[int, bool]]] = {}  # edges that end in a parameter, and whether it is a scale
        self._noisy: dict[Place, list[str]] = {}
        self._sites: set[str] = set()
        self._onward: dict[str, bool] = {}
        self._nodes: set[int] = set()  # of sites
        self._norms: dict[Place, list[Tensor]] = {}
        self._unknown: set[Place] = set()  # whose gradients could not be looked at
        self._has_run = False

    def add(self, site: str, node: Any, edges: Sequence[int]) -> None:
        """``site`` adds noise to what ``node`` gives back along ``edges``.

        Of forwards with a backward each, one is enough. But all that ran before backward began may meet in one loss, as
        the views of a contrastive one do.
        """
        if self._has_run and site in self._sites:
            return
        self._sites.add(site)
        self._nodes.add(node._sequence_nr())
        for edge in edges:
            self._noisy.setdefault((node._sequence_nr(), edge), []).append(site)
        waiting = [node]
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number in self._below:
                continue
            self._below[number] = []
            for edge, (below, _) in enumerate(node.next_functions):
                if type(below).__name__ == _LEAF:
                    self._leaves.setdefault(number, []).append((edge, below.variable.dim() < 2))
                elif below is not None:
                    other = below._sequence_nr()
                    self._below[number].append((edge, other))
                    self._above.setdefault(other, []).append((number, edge))
                    waiting.append(below)
            node.register_hook(_Watch(self, number))

    def goes_on(self, site: str, node: Any) -> bool:
        """Whether the gradient that ``site`` gives to ``node`` is that of an activation, and no computed weight's:
        whether something that has a site lies between ``node`` and the parameters."""
        if site not in self._onward:
            self._onward[site] = self._is_above_a_site(node)
        return self._onward[site]

    def _is_above_a_site(self, node: Any) -> bool:
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in seen or type(node).__name__ == _LEAF:
                continue
            if node._sequence_nr() in self._nodes:
                return True
            seen.add(node)
            waiting += [below for below, _ in node.next_functions]
        return False

    def measure(self, number: int, outgoing: Sequence[Tensor | None], arrived: Sequence[Tensor | None]) -> None:
        """A node has run: take the norms of what meets others, and of what ends in parameters."""
        self._has_run = True
        edges = [edge for edge, below in self._below[number] if len(self._above[below]) > 1]
        edges += [edge for edge, _ in self._leaves.get(number, ())]
        for edge in edges:
            self._note((number, edge), outgoing[edge : edge + 1])
        if len(self._above.get(number, ())) > 1:
            self._note((number, -1), arrived)

    def _note(self, place: Place, gradients: Sequence[Tensor | None]) -> None:
        """If backward comes by several times, the last one counts. Only plain tensors are looked at: those of a
        tensor-parallel layer lie on several devices."""
        found = [each for each in gradients if each is not None]
        is_plain = all(type(each) is Tensor and each.layout is torch.strided for each in found)
        self._norms[place] = [norm(each) for each in found] if is_plain else []
        (self._unknown.discard if is_plain else self._unknown.add)(place)

    def finish(self) -> tuple[list[Tensor], Callable[[Sequence[float]], tuple[Arrival, ...]]]:
        """Norms to be sent to the host, and what makes something of them there."""
        places = [place for place, norms in self._norms.items() for _ in norms]
        norms = [each for norms in self._norms.values() for each in norms]
        above, leaves, noisy, unknown = self._above, self._leaves, self._noisy, self._unknown

        def read(numbers: Sequence[float]) -> tuple[Arrival, ...]:
            energies: dict[Place, float] = dict.fromkeys(unknown, math.nan)
            for place, number in zip(places, numbers, strict=True):
                energies[place] = energies.get(place, 0.0) + number * number
            return merge(_arrivals(above, leaves, noisy, energies)) if energies else ()

        return norms, read


class _Watch:
    """Runs when backward has run a node."""

    __slots__ = ("_flow", "_number")

    def __init__(self, flow: Flow, number: int) -> None:
        self._flow, self._number = flow, number

    @torch.no_grad()
    def __call__(self, grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> None:
        self._flow.measure(self._number, grad_inputs, grad_outputs)


def _arrivals(
    above: Mapping[int, Sequence[Place]],
    leaves: Mapping[int, Sequence[tuple[int, bool]]],
    noisy: Mapping[Place, Sequence[str]],
    energies: Mapping[Place, float],
) -> Iterator[Arrival]:
    """What arrives at each parameter. A node has a higher number than those below it."""
    shares: dict[int, Shares] = {}
    numbers = {*above, *leaves, *(place[0] for places in above.values() for place in places)}
    for number in sorted(numbers, reverse=True):
        places = above.get(number, ())
        parts = [_given(shares.get(node, {}), noisy.get((node, edge), ())) for node, edge in places]
        shares[number] = parts[0] if len(parts) == 1 else _meet(parts, *_weights(number, places, energies))
        for edge, is_scale in leaves.get(number, ()):
            energy = energies.get((number, edge))
            if energy is not None:
                known = energy if math.isfinite(energy) else 0.0
                yield Arrival(_given(shares[number], noisy.get((number, edge), ())), known, is_scale)


def _weights(number: int, places: Sequence[Place], energies: Mapping[Place, float]) -> tuple[list[float], float]:
    """Which part of the energy that arrives at a node each of those above it has brought; and what these parts are to
    be multiplied by for noise that all of them have in common.

    What gradients have in common counts once, whichever way it took; so where they add up to more than the sum of their
    energies, that sum is the measure. Where they cancel, noise that only one of them has does not, and is a larger
    share of what is left. What they have in common may cancel as they do. Where an energy is not known, each counts as
    if it had brought everything.
    """
    brought = [energies.get(place, 0.0) for place in places]
    total = sum(brought)
    arrived = min(energies.get((number, -1), total), total)
    if not math.isfinite(total + arrived):
        return [1.0] * len(places), 1.0
    if arrived <= 0:
        return [0.0] * len(places), 1.0
    return [energy / arrived for energy in brought], min(arrived / (_CANCELLED * total), 1.0)


def _given(shares: Shares, sites: Sequence[str]) -> Shares:
    """What a node gives on: what arrived at it, and what its own sites add."""
    return {**shares, **{site: shares.get(site, 0.0) + 1.0 for site in sites}} if sites else shares


def _meet(parts: Sequence[Shares], weights: Sequence[float], in_common: float) -> Shares:
    """The shares that parts with these weights have together."""
    found: Shares = {}
    for site in dict.fromkeys(site for part in parts for site in part):
        each = [part.get(site, 0.0) for part in parts]
        shared = min(each)
        share = sum(weight * (own - shared + shared * in_common) for weight, own in zip(weights, each, strict=True))
        if share > _NOTHING:
            found[site] = share
    return found


def merge(arrivals: Iterable[Arrival]) -> tuple[Arrival, ...]:
    """Parameters at which the same arrives, as one."""
    found: dict[Any, Arrival] = {}
    for arrival in arrivals:
        key = (frozenset(arrival.shares.items()), arrival.is_scale)
        before = found.get(key)
        found[key] = arrival if before is None else Arrival(arrival.shares, arrival.energy + before.energy, key[1])
    return tuple(found.values())
