"""Bounds for a number of bytes: the ones that add the least noise among all that fit.

Storing n values under the bound eb takes about n (h - log2 eb) bits and adds v G of noise, v = eb^2 / 3 and G the noise
for a unit of variance. For a given number of bits the sum of the noise is least where every stored value adds the same:

    v = c n / G

One number c is left, found by bisection. How many bits a value takes is modelled as the entropy of a normal variable's
dithered codes, corrected at each tensor by what its last payload took.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

_OCTAVES, _PER_OCTAVE = range(-5, 6), 8  # below, a bit for each halving
_ZERO_CODE = 63 / 64  # above this share of non-zeros, zero has no code of its own


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor to be placed. Bounds are ratios to its standard deviation.

    ``cost``: noise per variance of the error, in units of the squared standard deviation. ``least`` to ``most``: the
    ratios that are allowed. ``seen``: a ratio, and the bits a value took under it. ``raw``: bytes if it is kept as it
    is, which it may if ``may_be_kept``.
    """

    name: str
    numel: int
    raw: int
    cost: float
    least: float
    most: float
    nonzero: float = 1.0
    seen: tuple[float, float] | None = None
    may_be_kept: bool = True

    def nbytes(self, ratio: float) -> float:
        """Bytes that the payload is expected to take."""
        bits = self._model(ratio)
        if self.seen is not None:
            before, taken = self.seen
            model = self._model(before)
            bits = taken * bits / model if ratio >= before else taken + bits - model
        return self.numel * bits / 8

    def noise(self, ratio: float) -> float:
        return self.cost * ratio**2 / 3

    def _model(self, ratio: float) -> float:
        bits = entropy(ratio)
        share = self.nonzero
        if not 0 < share < _ZERO_CODE:
            return max(bits, 1e-3)
        return share * bits - share * math.log2(share) - (1 - share) * math.log2(1 - share)


def allocate(tensors: Sequence[Stored], nbytes: float) -> dict[str, float | None]:
    """By name, the ratio under which each tensor is stored (None: as it is): the least noise that ``nbytes`` allow.

    If no bounds take so little, those that take the least.
    """

    def taken(level: float) -> float:
        return sum(item.nbytes(_ratio(item, level)) for item in tensors)

    level = _bisect(lambda level: taken(level) - nbytes, -400.0, 400.0)
    chosen: dict[str, float | None] = {item.name: _ratio(item, level) for item in tensors}
    spare = nbytes - taken(level)
    # Room to spare under the finest bounds: some tensors can be kept as they are, the noisiest for their bytes first.
    for item in sorted(tensors, key=lambda item: -item.noise(_ratio(item, level)) / max(item.raw, 1)):
        extra = item.raw - item.nbytes(_ratio(item, level))
        if item.may_be_kept and extra <= spare:
            chosen[item.name] = None
            spare -= extra
    return chosen


def _ratio(item: Stored, level: float) -> float:
    """eb / std for c = 2^level."""
    if item.cost <= 0:
        return item.most
    exponent = (level + math.log2(3 * item.numel) - math.log2(item.cost)) / 2
    return min(max(2.0 ** min(max(exponent, -100.0), 100.0), item.least), item.most)


def _bisect(excess: Callable[[float], float], low: float, high: float) -> float:
    """The lowest level without an excess; ``excess`` falls with the level."""
    if excess(low) <= 0:
        return low
    for _ in range(60):
        middle = (low + high) / 2
        if excess(middle) > 0:
            low = middle
        else:
            high = middle
    return high


def entropy(ratio: float) -> float:
    """Bits of a normal variable's dithered codes; ``ratio`` is the bound over the standard deviation."""
    levels, bits = _table()
    at = math.log2(ratio)
    if at <= levels[0]:
        return bits[0] + levels[0] - at
    if at >= levels[-1]:
        return bits[-1]
    index = bisect_right(levels, at)
    weight = (at - levels[index - 1]) / (levels[index] - levels[index - 1])
    return bits[index - 1] * (1 - weight) + bits[index] * weight


@cache
def _table() -> tuple[list[float], list[float]]:
    levels = [octave + part / _PER_OCTAVE for octave in _OCTAVES for part in range(_PER_OCTAVE)]
    return levels, [_entropy(2 * 2.0**level) for level in levels]


def _entropy(step: float) -> float:
    """Code q = floor(x / step + u), u uniform: its probability is a second difference of the integral of Phi."""

    def integral(t: float) -> float:
        return t * 0.5 * (1 + math.erf(t / math.sqrt(2))) + math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    bits = 0.0
    for code in range(math.ceil(9 / step) + 2):
        at = code * step
        share = (integral(at + step) - 2 * integral(at) + integral(at - step)) / step
        if share > 1e-15:
            bits -= (1 if code == 0 else 2) * share * math.log2(share)
    return bits
