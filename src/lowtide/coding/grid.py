"""The quantiser of ``sz``: integer codes on a grid of steps, fixed-point dither, reconstruction within a proven bound.

With s = step / 256, an element x and its dither byte b (0 .. 255):

    X  = rint(x / s)                      the element in units of s; x / s is x times the float32 nearest to 256 / step
    q  = floor((X + b) / 256)             its code
    x' = (256 q + 127.5 - b) * s          what it comes back as: one rounding to float32, one to its dtype

Why |x' - x| <= bound: X + b = 256 q + r with 0 <= r <= 255, so x' / s = X + 127.5 - r is at most 127.5 from X, X is
at most 0.5 from x / s, and 128 s = step / 2. The roundings of 256 / step, of x' to float32 and to its dtype are covered
by ``margin``: step is 2 * bound * (1 - margin), its mantissa cut to the 8 bits in which it is stored. For float32 that
covers every code; for a 16-bit dtype codes of up to ``reach`` steps. Beyond, and in float64, an element is compared
with what it would come back as, and is stored exactly (``lost``) if the promise would be broken, like NaN, inf and
whatever is more than 2046 steps from zero.

Codes are counted from a ``centre``, a whole number of steps near the mean of what a step governs: a channel far from
zero has small codes, too. x' does not depend on it.

Over b, r is uniform: E[x'] = X * s, within step / 512 of x, and the error is uniform with variance step**2 / 12.
Without dither b is 128 and x' is 256 q * s: nearest rounding.

``stochastic`` rounding (of float32) adds b and does not take it off again: x' = 256 q * s, a whole number of steps, so
that what is zero stays zero and no sign changes. E[x'] = X * s as well. x' / s = X + b - r is at most 255 from X, so
the step is half as large: bound * (1 - margin). The variance is (x - l) (h - x), with l and h the multiples around x:
of a value far below the step it is the value times the step, where that of dither is a twelfth of the step squared.
What is below s / 2 is always zero; who cannot do without it rounds to multiples of s before (probabilities.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.coding import dither, layout
from lowtide.records import Bound, TensorSpec

MAX_CODE = 2046
_SMALLEST = 2.0**-100  # steps below are taken as zero: so s and every x' near a step are normal float32 numbers
_MARGIN = {torch.float32: 2.0**-10, torch.float64: 2.0**-10, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
_MARGIN_NEAREST = 2.0**-7  # on top: then X / 256 is rounded where X was rounded before
_REACH = {torch.float32: MAX_CODE, torch.float16: 7, torch.bfloat16: 8}
_SMALLEST_HALF = 2.0**-12  # of float16: its subnormal numbers have fewer bits than the margin assumes


_KINDS = (torch.bfloat16, torch.float32, torch.float32)  # of step, inverse and promised

_Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Grid:
    """One step for the tensor, or one for each index along ``axes`` (bfloat16), and what encoders want beside it.

    ``centre`` goes with ``step`` (bfloat16; None: zero everywhere). ``inverse`` is 256 / step in float32, inf where the
    step is zero; ``promised`` is what an element is compared with: a decoder has neither.
    """

    axes: tuple[int, ...]
    rounding: str
    step: Tensor
    centre: Tensor | None = None
    inverse: Tensor | None = None
    promised: Tensor | None = None

    @classmethod
    def of(
        cls, bound: Bound, dtype: torch.dtype, device: torch.device, rounding: str, mean: Tensor | None = None
    ) -> Grid:
        """The grid of a bound; ``mean`` has a number for each of its values."""
        value = bound.value.to(device=device, dtype=torch.float64).flatten()
        value = value.nan_to_num(nan=0.0).clamp_(min=0.0)
        step = _step(value, dtype, rounding)
        centre = None if mean is None else _centre(mean.flatten(), step, dtype)
        return cls(bound.axes, rounding, step.to(torch.bfloat16), centre, 256.0 / step, _down32(value))

    @classmethod
    def uniform(cls, value: float, dtype: torch.dtype, device: torch.device, rounding: str) -> Grid:
        """The same for one bound that the host knows: it does the arithmetic, and a device is told the results."""
        numbers = _numbers(value, dtype, rounding)
        step, inverse, promised = (
            torch.full((1,), number, dtype=kind, device=device) for number, kind in zip(numbers, _KINDS, strict=True)
        )
        return cls((), rounding, step, None, inverse, promised)

    def quantise(self, x: Tensor, index: Tensor | range, spec: TensorSpec, seed: int) -> tuple[Tensor, Tensor]:
        """Codes (int32) and which elements must be stored exactly, for the elements at ``index`` in memory order.

        Codes are counted from the centre.
        """
        pick = self._picker(index, spec)
        shift = 128 if self.rounding == "nearest" else _bytes(index, spec, seed)
        assert self.inverse is not None and self.promised is not None, "a decoder's grid does not encode"
        units = torch.round(x.double() * pick(self.inverse.double()))
        in_range = units.abs() < 2.0**22  # false for NaN; inf * 0 and x * inf are not in range either
        units = torch.nan_to_num(units).clamp_(-(2.0**22), 2.0**22).to(torch.int32)
        q = (units + shift) >> 8
        kept = in_range & (q.abs() <= MAX_CODE)
        if reach(spec.dtype) < MAX_CODE:
            promised = pick(self.promised).double()
            kept &= (self._value(q, shift, pick, spec.dtype).double() - x.double()).abs() <= promised
        if self.centre is not None:
            q = q - pick(self.centre).int()
            kept &= q.abs() <= MAX_CODE
        return q * kept, ~kept  # a product, here and elsewhere: torch.where takes many times as long on a CPU

    def value(self, q: Tensor, index: Tensor | range, spec: TensorSpec, seed: int) -> Tensor:
        """x' of codes counted from the centre."""
        pick = self._picker(index, spec)
        if self.centre is not None:
            q = q + pick(self.centre).int()
        shift = _bytes(index, spec, seed) if self.rounding == "dither" else 128
        return self._value(q, shift, pick, spec.dtype)

    def _picker(self, index: Tensor | range, spec: TensorSpec) -> _Pick:
        """How elements find their number in a table: the table itself when one number serves all."""
        terms = layout.index_terms(spec, self.axes)
        if not terms:
            return lambda table: table
        if isinstance(index, range):
            if len(terms) == 1 and terms[0][2] == 1:
                term, start, stop = terms[0], index.start, index.stop
                return lambda table: layout.spread(table, term, start, stop)
            index = torch.arange(index.start, index.stop, device=spec.device)
        entries = layout.entries_at(terms, index)
        return lambda table: table[entries]

    def _value(self, q: Tensor, shift: Tensor | int, pick: _Pick, dtype: torch.dtype) -> Tensor:
        work = torch.float64 if dtype == torch.float64 else torch.float32
        units = (q * 256 - shift).to(work)
        units += 127.5 if self.rounding == "dither" else 128.0
        return (units * pick(self.step.to(work) / 256)).to(dtype)


def _bytes(index: Tensor | range, spec: TensorSpec, seed: int) -> Tensor:
    if isinstance(index, range):
        return dither.bytes_between(seed, index.start, index.stop, spec.device)
    return dither.bytes_at(seed, index)


def reach(dtype: torch.dtype) -> int:
    """Codes up to this magnitude keep their promise by construction."""
    return _REACH.get(dtype, -1)


def farthest_centre(dtype: torch.dtype) -> int:
    """In steps: few enough to be exact in bfloat16 and, for 16-bit dtypes, to leave codes within the reach."""
    return 256 if dtype.itemsize > 2 else 4


def unit_of(value: float, dtype: torch.dtype, rounding: str) -> float:
    """The s of a bound that the host knows."""
    return _numbers(value, dtype, rounding)[0] / 256


@lru_cache(maxsize=1024)
def _numbers(value: float, dtype: torch.dtype, rounding: str) -> tuple[float, float, float]:
    """Step, inverse and promise of one bound; bounds that follow statistics come from a coarse grid of numbers."""
    bound = Bound(torch.tensor(value, dtype=torch.float64, device="cpu"))  # whatever device a user has made the default
    grid = Grid.of(bound, dtype, bound.value.device, rounding)
    assert grid.inverse is not None and grid.promised is not None
    return grid.step.item(), grid.inverse.item(), grid.promised.item()


def _centre(mean: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    most = farthest_centre(dtype)
    centre = (mean.float() / step).round_().nan_to_num_(0.0, 0.0, 0.0)
    return centre.clamp_(-most, most).to(torch.bfloat16)


def scale(dtype: torch.dtype, rounding: str) -> tuple[float, float, float]:
    """Steps are made for bounds up to the first number, by the second one; those below the third are zero."""
    margin = _MARGIN[dtype] + (_MARGIN_NEAREST if rounding == "nearest" else 0.0)
    # So that no x' overflows: whatever lies near the largest number is out of range, or (float16) beyond the reach.
    largest = 2.0**11 if dtype == torch.float16 else 2.0**114
    factor = (1 if rounding == "stochastic" else 2) * (1 - margin)
    return largest, factor, _SMALLEST_HALF if dtype == torch.float16 else _SMALLEST


def _step(value: Tensor, dtype: torch.dtype, rounding: str) -> Tensor:
    """The step that serves each bound, exact in bfloat16; zero where no grid can keep the promise."""
    largest, factor, smallest = scale(dtype, rounding)
    wanted = value.clamp(max=largest).mul_(factor)
    step = (wanted.view(torch.int64) & -(1 << 45)).view(torch.float64)  # 7 of 52 bits, as in bfloat16: towards zero
    return torch.threshold(step, math.nextafter(smallest, 0), 0.0).float()


def _down32(value: Tensor) -> Tensor:
    """Towards zero, for values from zero on: the float before it is the one whose bits are one less."""
    narrow = value.float()
    return torch.add(narrow.view(torch.int32), narrow > value, alpha=-1).view(torch.float32)
