"""Numbers that serve as bounds: on a coarse grid, so that what was learnt about a site stays useful, and never far from
the one before."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import torch

from lowtide.coding.grid import Grid
from lowtide.records import Bound
from lowtide.statistics import STEPS

MOST = 4.0  # in units of the standard deviation: beyond, a value costs no fewer bits and tells nothing
MOST_OF_SOME = 2.0  # the same where a bound governs the values on one side only: half as many codes are to be saved
_STAYS = 0.8  # of a level: so far may a value be from a bound before another one is taken
_STEEPEST = 2.6  # the power of a bound that a rounding's variance falls with: two, and less of it above the step
_FINEST = {"float32": 2.0**-9, "float64": 2.0**-9, "float16": 2.0**-6, "bfloat16": 2.0**-6}


def finest(dtype: str) -> float:
    """In units of the standard deviation: below, codes leave their range or dtypes their digits; nothing is gained."""
    return _FINEST[dtype]


def quantise(value: float, per_octave: int = 4) -> float:
    """The next smaller power of 2^(1 / per_octave)."""
    return 2.0 ** (math.floor(math.log2(value) * per_octave + 1e-6) / per_octave)


def settle(value: float, before: float | None, per_octave: int = 4) -> float:
    """The nearest power of 2^(1 / per_octave); but the one before, as long as it is less than a level away.

    So bounds are as often too large as too small, and one between two levels does not go back and forth.
    """
    if before is not None and abs(math.log2(value / before)) * per_octave < _STAYS:
        return before
    return 2.0 ** (round(math.log2(value) * per_octave) / per_octave)


@cache
def efficiency(dtype: str) -> float:
    """How much of a bound the quantiser uses: the error is uniform within this multiple of it.

    The rest covers roundings (lowtide.coding.grid); it is a sixteenth of the bound for bfloat16.
    """
    bound = Bound(torch.ones((), dtype=torch.float64))
    return float(Grid.of(bound, getattr(torch, dtype), torch.device("cpu"), "dither").step) / 2


def variance(value: float, dtype: str, curve: Sequence[float] = ()) -> float:
    """Of the error of a value stored under the bound ``value``; by a ``curve`` if there is one."""
    if curve:
        levels, logs = _points(curve)
        return 2.0 ** _between(math.log2(value), levels, logs)
    return (value * efficiency(dtype)) ** 2 / 3


def bound_for(error_variance: float, dtype: str, curve: Sequence[float] = ()) -> float:
    """The bound under which the error has this variance."""
    if curve:
        levels, logs = _points(curve)
        return 2.0 ** _between(math.log2(max(error_variance, 1e-300)), logs, levels)
    return math.sqrt(3 * error_variance) / efficiency(dtype)


def _points(curve: Sequence[float]) -> tuple[list[float], list[float]]:
    """Bounds and variances, as logarithms that rise; where nothing is rounded any more, as if a part still was."""
    levels = [math.log2(step) for step in STEPS]
    logs = [math.log2(curve[0])]
    for number in range(1, len(levels)):
        steepest = logs[-1] - _STEEPEST * (levels[number - 1] - levels[number])
        logs.append(min(max(math.log2(max(curve[number], 1e-300)), steepest), logs[-1] - 1e-3))
    return levels[::-1], logs[::-1]


def _between(at: float, known: Sequence[float], values: Sequence[float]) -> float:
    """On straight lines between points, and on with the last of them."""
    right = min(max(bisect_right(known, at), 1), len(known) - 1)
    left = right - 1
    return values[left] + (at - known[left]) * (values[right] - values[left]) / (known[right] - known[left])
