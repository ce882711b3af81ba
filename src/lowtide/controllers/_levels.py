"""Numbers that serve as bounds: on a coarse grid, so that what was learnt about a site stays useful, and never far from
the one before."""

from __future__ import annotations

import math
from functools import cache

import torch

from lowtide.coding.grid import Grid
from lowtide.records import Bound

MOST = 4.0  # in units of the standard deviation: beyond, a value costs no fewer bits and tells nothing
MOST_OF_SOME = 2.0  # the same where a bound governs the values on one side only: half as many codes are to be saved
_STAYS = 0.8  # of a level: so far may a value be from a bound before another one is taken
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


def variance(value: float, dtype: str) -> float:
    """Of the error of a value stored under the bound ``value``."""
    return (value * efficiency(dtype)) ** 2 / 3


def bound_for(error_variance: float, dtype: str) -> float:
    """The bound under which the error has this variance."""
    return math.sqrt(3 * error_variance) / efficiency(dtype)
