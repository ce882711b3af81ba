"""Axes: where ticks go and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lowtide.reports.text import size

Format = Callable[[float], str]
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_LEAST = 1e-300  # smaller numbers cannot be divided into steps, and count as zero


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``stop``, with ticks at round values."""

    low: float
    high: float
    start: float
    stop: float
    ticks: tuple[float, ...]

    @classmethod
    def fit(
        cls,
        values: Iterable[float],
        *,
        start: float,
        stop: float,
        count: int = 5,
        zero: bool = False,
        binary: bool = False,
        whole: bool = False,
    ) -> Axis:
        """An axis that ends on ticks. ``zero`` includes zero, ``binary`` makes round numbers of bytes, ``whole`` has no
        ticks between whole numbers."""
        known = [0.0 if abs(value) < _LEAST else value for value in values]
        low, high = min(known, default=0.0), max(known, default=1.0)
        low, high = (min(low, 0.0), max(high, 0.0)) if zero else (low, high)
        if high - low < 1e-12 * max(abs(low), abs(high), 1e-12):
            low, high = low - (abs(low) or 1) / 2 * (not zero), high + (abs(high) or 1) / 2
        step = _round_up((high - low) / count, 1024.0 ** _power(high) if binary else 1.0)
        step = max(step, 1.0) if whole else step
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        ticks = tuple(step * index for index in range(first, max(last, first + 1) + 1))
        return cls(ticks[0], ticks[-1], start, stop, ticks)

    def place(self, value: float) -> float:
        """The pixel of a value, to a tenth."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.stop - self.start), 1)


def _round_up(step: float, unit: float) -> float:
    """The next larger of 1, 2, 2.5 and 5 times a power of ten, in multiples of ``unit``."""
    step /= unit
    power = 10.0 ** math.floor(math.log10(step))
    return unit * power * next((nice for nice in _STEPS if step <= nice * power * (1 + 1e-9)), 10.0)


def _power(nbytes: float) -> int:
    return min(int(math.log(max(nbytes, 1.0), 1024)), 3)


def percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def short_percent(share: float) -> str:
    return f"{100 * share:.4g} %"


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"


def short_times(ratio: float) -> str:
    return f"{ratio:g}x"


def nbytes(amount: float) -> str:
    return size(round(amount))


def short_nbytes(amount: float) -> str:
    """1.50 MiB -> 1.5 MiB."""
    number, _, unit = size(round(amount)).partition(" ")
    return f"{float(number):g} {unit}"


def plain(value: float) -> str:
    return f"{value:.4g}"


def count(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def points_of(difference: float) -> str:
    """A difference of accuracies, in points, always with its sign."""
    return f"{difference:+.2f}"
