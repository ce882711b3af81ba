"""Models of the coder ``rans`` from a sample of codes: which alphabet, and what share each of its symbols has.

All that depends on single codes (which alphabets there are to choose from, what they leave out, the shares of symbols
of one value) follows from one count of the sample. Only symbols of several values are counted one alphabet at a time,
and only where so few values lie outside of it that it can be chosen.

A fit runs beside a training loop that needs the interpreter's lock for every launch. Torch lets go of that lock in each
call, and taking it back is what both threads then wait for: so there are few calls, on all of the sample at once, and
what is left, some hundred numbers, is worked out in Python between two of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from lowtide.coding.rans import LANES, ROW, SCALE, ZERO_CODE, Alphabet, Model

ROWS = {4: 128, 3: 96, 2: 64, 1: 32}  # a chunk, for 4, 3, 2 or 1 values a symbol
SAMPLE_ROWS = 3  # rows that hold whole symbols, whatever their size
PIECE = SAMPLE_ROWS * ROW
LARGEST = {4: 4, 3: 6, 2: 16, 1: 256}  # alphabets
_SIZES = (*range(2, 17), *range(20, 65, 4), *range(80, 257, 16))
_EDGE = 256  # in either direction, from zero or from where most codes are: no alphabet reaches as far
_FAR = 0.01  # of all values that lie beyond
_ZERO = ZERO_CODE + _EDGE  # the place of "exactly zero" where codes are counted from -_EDGE
_LEAST = 2.0**-21  # the share of a symbol of one value that the sample does not have
_ESCAPE_BITS = 32
_STATE_BITS = 24  # a lane: of the 32 that are stored, about 8 carry symbols
_MIXED = 0.03  # of shares: as if values were independent, for symbols that a sample has missed
_FEWEST_ROWS, _MANY_CHUNKS = 32, 2048
_GAIN, _KEPT_GAIN = 0.05, 0.02  # of bits, that prediction has to save to be chosen, and to be kept
_MANY_ESCAPES = {4: 2e-4, 3: 2e-4, 2: 4e-3}  # of all values: a lane that meets one keeps its warp waiting


def fit(
    codes: Tensor,
    count: int,
    before: Model | None = None,
    *,
    zero_code: bool,
    lasts: bool = True,
    predict: bool = False,
) -> Model:
    """The model for tensors of ``count`` values of which ``codes`` are a sample, in pieces of 384, on the CPU.

    ``ZERO_CODE`` among them is an exact zero; without a code of its own it is coded like any other code 0. More values
    a symbol are faster and fewer can be smaller: the most that cost at most 2 % over the least. As many as ``before``
    if that still does as well as it did: each number of values has kernels of its own to compile. And its very alphabet
    if another would gain less than 1 %: a captured graph can change its shares, but not its alphabet. ``lasts``: it is
    for tensors to come as well. ``predict``: values may be predicted from those before them, where that saves 5 % of
    the bits, or 2 % if they were so ``before``; where zero has a code of its own they never are.
    """
    sample = Sample(codes, zero_code, lasts=lasts)
    was_predicted = before is not None and before.alphabet.predicted
    plain = _fit(sample, count, None if was_predicted else before, predicted=False)
    if not predict or zero_code:
        return plain
    predicted = _fit(sample, count, before if was_predicted else None, predicted=True)
    gain = _KEPT_GAIN if was_predicted else _GAIN
    return predicted if predicted.bits <= (1 - gain) * plain.bits else plain


def _fit(sample: Sample, count: int, before: Model | None, *, predicted: bool) -> Model:
    if before is not None:
        model = sample.follow(before.alphabet, count)
        if model.bits <= before.bits * 1.1:
            return model
    alphabets = [replace(sample.alphabet(values, count), predicted=predicted) for values in LARGEST]
    models = [sample.model(one) for one in alphabets if sample.outside(one) <= _MANY_ESCAPES.get(one.values, 1.0)]
    least = min(model.bits for model in models)
    return next(model for model in models if model.bits <= least * 1.02 + 0.002)


class Sample:
    """Codes that have been counted."""

    def __init__(self, codes: Tensor, zero_code: bool, *, lasts: bool = True) -> None:
        self._zero_code, self._lasts = zero_code, lasts
        self._count = codes.numel()
        self._windows: list[tuple[int, int, float]] = []
        self._middle = 0  # what places are counted from
        self._take(codes)
        if not zero_code and 1.0 - sum(self._shares) > _FAR:
            codes = codes.masked_fill(codes == ZERO_CODE, 0)
            self._middle = int(codes.median())
            self._take(codes - self._middle)

    def _take(self, codes: Tensor) -> None:
        self._places = codes.clamp(min=-_EDGE).add_(_EDGE)
        counts = torch.bincount(self._places, minlength=_ZERO + 1)
        self._shares = [times / self._count for times in counts[1 : 2 * _EDGE].tolist()]  # of codes from 1 - _EDGE on
        self._zeros = int(counts[_ZERO]) / self._count
        if not self._zero_code:
            self._shares[_EDGE - 1] += self._zeros

    def follow(self, before: Alphabet, count: int) -> Model:
        """With as many values a symbol, and with that very alphabet if it suits and takes hardly more than the best."""
        values = before.values
        if (before.zero, before.rows) != (self._zero_code, _rows(values, count)):
            return self.model(replace(self.alphabet(values, count), predicted=before.predicted))
        kept = self.model(before)
        if self.outside(before) * _ESCAPE_BITS <= kept.bits * 0.005:  # about all that another alphabet would save
            return kept
        model = self.model(replace(self.alphabet(values, count), predicted=before.predicted))
        return kept if kept.bits <= model.bits * 1.01 else model

    def alphabet(self, values: int, count: int) -> Alphabet:
        """The best one with so many values a symbol."""
        largest = LARGEST[values]
        self._windows = self._windows or self._find_windows()
        # A digit more costs a little whether it is used or not; leaving values out costs them an escape each.
        _, size, low = min(
            (left_out * 4 * _ESCAPE_BITS + size * 0.002 * (16 / largest), size, low)
            for size, low, left_out in self._windows
            if size <= largest
        )
        if values == 1 and self._lasts:  # codes move on before the next fit, and digits to spare cost next to nothing
            spare = min(2 * size, largest - size)
            size, low = size + spare, low if self._zero_code else low - spare // 2
        alone = self._alone(size, low)
        return Alphabet(values, size, low, self._zero_code, alone.index(max(alone)), _rows(values, count))

    def _find_windows(self) -> list[tuple[int, int, float]]:
        """For each size of an alphabet the run of codes that leaves out the least: size, first code, what is left out.

        What no alphabet reaches counts as left out for none of them.
        """
        sums = torch.tensor([0.0, *accumulate(self._shares)], dtype=torch.float64, device="cpu")
        inside, start = (sums[_ends(self._zero_code)] - sums).max(1)
        within, found = sum(self._shares), zip(_SIZES, inside.tolist(), start.tolist(), strict=True)
        return [(size, first + 1 - _EDGE + self._middle, within - share) for size, share, first in found]

    def outside(self, alphabet: Alphabet) -> float:
        """The share of values without a digit."""
        return max(1.0 - sum(self._alone(alphabet.size, alphabet.low)), 0.0)

    def _alone(self, size: int, low: int) -> list[float]:
        """The share of each digit."""
        first = low - self._middle + _EDGE - 1
        last = first + size - self._zero_code
        inside = self._shares[max(first, 0) : max(last, 0)]
        alone = [0.0] * max(-first, 0) + inside if first < 0 else inside
        alone = [self._zeros, *alone] if self._zero_code else alone
        return (alone + [0.0] * size)[:size]

    def model(self, alphabet: Alphabet) -> Model:
        """The shares of the symbols of an alphabet; values outside of it stand as its ``fill``."""
        values, alone = alphabet.values, self._alone(alphabet.size, alphabet.low)
        outside = max(1.0 - sum(alone), 0.0)
        alone[alphabet.fill] += outside
        digits = self._digits(alphabet) if values > 1 or alphabet.predicted else None
        if alphabet.predicted and digits is not None:
            digits = _differences(digits, alphabet)
            alone = [times / self._count for times in torch.bincount(digits, minlength=alphabet.size).tolist()]
        share = [max(part, _LEAST) for part in alone] if values == 1 and self._lasts else alone
        if values > 1 and digits is not None:
            for _ in range(values - 1):  # digit 0 varies fastest
                share = [digit * rest for digit in alone for rest in share]
            joint = torch.bincount(_symbols(digits, alphabet), minlength=alphabet.symbols).tolist()
            seen = (1 - _MIXED) * values / self._count
            share = [seen * times + _MIXED * product for times, product in zip(joint, share, strict=True)]
        freqs = normalise(share, alphabet.fill_symbol, every=alphabet.predicted)
        bits = sum(
            part * (12 - math.log2(freq) if freq else _ESCAPE_BITS * values)
            for part, freq in zip(share, freqs, strict=True)
        )
        if outside > _MANY_ESCAPES.get(values, 1.0):
            outside = 1.0
        bits = bits / values + outside * _ESCAPE_BITS + LANES * _STATE_BITS / alphabet.chunk
        return Model(alphabet, torch.tensor(freqs, dtype=torch.int16, device="cpu"), bits)

    def _digits(self, alphabet: Alphabet) -> Tensor:
        """The digits of the sample (uint8), in memory order."""
        digit_at = bytearray([alphabet.fill]) * (_ZERO + 1)
        for digit in range(int(alphabet.zero), alphabet.size):
            if 0 < (place := alphabet.low - self._middle + _EDGE + digit - alphabet.zero) < 2 * _EDGE:
                digit_at[place] = digit
        digit_at[_ZERO] = 0 if alphabet.zero else digit_at[_EDGE]
        return torch.frombuffer(digit_at, dtype=torch.uint8).index_select(0, self._places.int())


def _differences(digits: Tensor, alphabet: Alphabet) -> Tensor:
    """As ``Alphabet.differences`` has them, in bytes, which wrap around at 256."""
    before = digits.roll(1)
    before[::ROW] = alphabet.fill
    differences = digits - before
    if alphabet.size < 256:
        differences += (digits < before).to(torch.uint8).mul_(alphabet.size)
    return differences


def _symbols(digits: Tensor, alphabet: Alphabet) -> Tensor:
    """The symbols of digits (uint8), several values each, in any order."""
    size = alphabet.size
    if alphabet.values == 3:  # others lie side by side in a row; these follow a lane, which has 4 values of each row
        lanes = digits.view(torch.int32).view(-1, SAMPLE_ROWS, LANES).transpose(1, 2).reshape(-1)
        digits = lanes.view(torch.uint8)
        return digits[::3].add(digits[1::3], alpha=size).add_(digits[2::3], alpha=size * size)
    pairs = digits[::2].add(digits[1::2], alpha=size)
    return pairs if alphabet.values == 2 else pairs[::2].add(pairs[1::2], alpha=size * size)


def _rows(values: int, count: int) -> int:
    """Of a chunk. Small tensors have short ones, which keep all of a GPU at work."""
    rows = ROWS[values]
    while rows // 2 >= _FEWEST_ROWS and count < rows * ROW * _MANY_CHUNKS:
        rows //= 2
    return rows


@cache
def _ends(zero_code: bool) -> Tensor:
    """Where the run of codes of each alphabet ends, for every place where it may begin."""
    codes = torch.tensor(_SIZES, device="cpu").unsqueeze(1) - int(zero_code)
    return (torch.arange(2 * _EDGE, device="cpu") + codes).clamp_(max=2 * _EDGE - 1)


def normalise(share: list[float], always: int, *, every: bool = False) -> list[int]:
    """Shares as integers that sum to 4096; what is rarer than 2**-22 gets none, except the symbol ``always``, or, with
    ``every``, all symbols."""
    freqs = [max(round(part * SCALE), 1) if every or part > 2.0**-22 else 0 for part in share]
    freqs[always] = freqs[always] or 1
    if len(freqs) - freqs.count(0) < 2:  # a single symbol would need all 4096, which 12 bits do not hold
        freqs[0 if always else 1] = 1
    while surplus := sum(freqs) - SCALE:
        largest = freqs.index(max(freqs))
        freqs[largest] -= min(surplus, freqs[largest] // 2) if surplus > 0 else surplus
    return freqs
