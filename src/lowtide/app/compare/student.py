"""A mean with its confidence interval by Student's t ("The probable error of a mean", 1908)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of ``count`` values. ``half`` is half the width of its interval, None where one value gives none."""

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = 0.95) -> Estimate:
        if not values:
            raise ValueError("a mean needs a value")
        if len(values) == 1:
            return cls(values[0], None, 1)
        count = len(values)
        half = quantile(count - 1, confidence) * stdev(values) / math.sqrt(count)
        return cls(fmean(values), half, count)

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


def quantile(freedom: int, confidence: float) -> float:
    """The t with P(|T| <= t) = confidence, by bisection."""
    low, high = 0.0, 1.0
    while probability(high, freedom) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle, freedom) < confidence else (low, middle)
    return high


def probability(t: float, freedom: int) -> float:
    """P(|T| <= t): the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun, "Handbook of Mathematical Functions"."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, is_odd = math.cos(angle), freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if is_odd else 2, freedom - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if is_odd else total
