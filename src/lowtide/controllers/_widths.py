"""Widths under a budget of bits: which tensors to give up bits at, so that the noise grows least.

A tensor of n values at b bits adds the variance cost / (2**b - 1)**2, and at 1 bit 1.3 times that: normal values lie
near the middle of their range, where both codes are far. Widths go down from 8 bits to 4, 2 and 1. Each of these steps
has a price, the variance it adds for every bit it saves, and a tensor's prices rise on its way down; so taking the
cheapest step anywhere until the budget is met is optimal (ActNN and GACT do the same, one bit or one width at a time).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.coding.bitpack import WIDTHS

_ONE_BIT = 1.3  # R^2 / 4 - std^2 over R^2 / 6, for a range R of 5.6 std


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is stored at one place: ``count`` values, and the variance they add if a step is their whole range."""

    count: int
    cost: float


def variance(cost: float, bits: float) -> float:
    """The added variance at an average of ``bits``; between two widths some values have the one, some the other."""
    few = max(width for width in WIDTHS if width <= bits)
    many = min(width for width in WIDTHS if width >= bits)
    share = (bits - few) / (many - few) if many > few else 0.0
    return cost * ((1 - share) * _relative(few) + share * _relative(many))


def _relative(width: int) -> float:
    return _ONE_BIT if width == 1 else (2**width - 1) ** -2.0


def allocate(tensors: Sequence[Tensor], average: float, *, fractions: bool) -> list[float]:
    """Bits for each tensor; their mean over all values is at most ``average``.

    The last step is the one that adds least among those that suffice; with ``fractions`` it is the cheapest one, taken
    only as far as the budget asks for.
    """
    bits = [float(WIDTHS[-1])] * len(tensors)
    excess = sum(tensor.count * (WIDTHS[-1] - average) for tensor in tensors)
    steps = [step for index, tensor in enumerate(tensors) if (step := _next(index, tensor, WIDTHS[-1])) is not None]
    while excess > 0 and steps:
        step = min(steps)
        if step.saved >= excess and not fractions:
            step = min((step for step in steps if step.saved >= excess), key=lambda step: step.added)
        if step.saved > excess and fractions:
            bits[step.index] -= excess / tensors[step.index].count
            break
        bits[step.index] = float(step.width)
        excess -= step.saved
        steps.remove(step)
        following = _next(step.index, tensors[step.index], step.width)
        if following is not None:
            steps.append(following)
    return bits


@dataclass(frozen=True, order=True, slots=True)
class _Step:
    """From a width to the next narrower one; ``price`` is ``added`` for each bit that is ``saved``."""

    price: float
    index: int
    width: int
    added: float
    saved: int


def _next(index: int, tensor: Tensor, width: int) -> _Step | None:
    narrower = max((few for few in WIDTHS if few < width), default=0)
    saved = tensor.count * (width - narrower)
    if not narrower or not saved:
        return None
    added = variance(tensor.cost, narrower) - variance(tensor.cost, width)
    return _Step(added / saved, index, narrower, added, saved)
