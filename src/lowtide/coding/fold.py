"""The input of a batch norm and what ReLU made of its output, folded into one tensor: at the threshold of ReLU.

With y = relu(a (x - mean) + bias), a = weight * inverse_std, ReLU is on on one side of x0 = mean - bias / a and off on
the other. Where it is on, y follows from x; where it is off, y is zero and x matters little. So one tensor tells of
both, finely on the one side and coarsely on the other:

    t = 1 + |x - x0| / fine        where y > 0
    t = -1.5 - |x - x0| / coarse   elsewhere

coarse is the bound of x, and fine the smaller one of that and the bound of y over |a|: a number each for a channel.
Stored under a bound below 1, t keeps its sign: ReLU's mask is exact. Then

    x' = x0 + v fine     and   y' = v |a| fine    where t' > 0, v = t' - 1         (for a < 0: x0 - v fine)
    x' = x0 - v coarse   and   y' = 0             elsewhere, v = -t' - 1.5         (           x0 + v coarse)

are within their bounds, but for roundings of their own dtype and, of v, of float32. Errors of both have mean zero where
those of t' have; y' is not cut off at zero, which would move its mean. (Anything from 1 on would do in place of 1.5.
Where few values are more than a step of the grid, about 2, from the end, it takes the fewest bits or nearly so.)

Roundings may put x a little on the wrong side of x0: less than ``_SLIP`` is taken as zero. A channel that is nearly all
on, or all off, has its x0 far away, or nowhere: x0 stays within ``_NEAR`` standard deviations of the mean. What lies
farther on the wrong side is told by |t| = ``_FAR`` * (1 + |x - x0| / fine), so large that codecs store it exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.coding.grid import scale
from lowtide.records import Bound

# Of a table: x0, fine and coarse with the sign of a, |a| fine, y at x0 (zero, unless x0 is limited), and what x - x0 is
# multiplied by where ReLU is on and where it is off: a division takes as long as the rest of the fold.
ROWS = 7
_ON, _OFF = 1.0, 1.5  # where t begins
_SLIP = 2.0**-10
_NEAR = 8.0
_FAR = 2.0**40
_FINEST = 2.0**-20  # of a standard deviation: what bounds of zero are taken as


class Norm(NamedTuple):
    """What a batch norm has computed its output with, by channel."""

    mean: Tensor
    inverse_std: Tensor
    weight: Tensor
    bias: Tensor


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype of t for tensors of ``dtype``."""
    return torch.promote_types(dtype, torch.float32)


def limit(dtype: torch.dtype) -> float:
    """The bound for t: 1, less what roundings of the fold take and, for 16-bit dtypes, those of x' and y'."""
    return min(scale(dtype, "dither")[1] / 2, 1 - 2.0**-9)


def table(norm: Norm, source: Bound, made: Bound | None, dtype: torch.dtype) -> Tensor:
    """What it takes to fold and unfold, a column for each channel: ``source`` and ``made`` are bounds of x and y.

    Computed in float64 and rounded once, to the working dtype of ``dtype``.
    """
    mean, inverse_std, weight, bias = (part.double() for part in norm)
    spread = 1 / inverse_std
    steep = weight.abs() * inverse_std
    sign = torch.where(weight < 0, -1.0, 1.0).to(steep)
    ahead = torch.where(steep > 0, bias / steep, torch.where(bias > 0, torch.inf, -torch.inf))  # of x0 is the mean
    is_near = ahead.abs() <= _NEAR * spread
    ahead = torch.where(is_near, ahead, torch.copysign(_NEAR * spread, ahead))
    coarse = torch.fmax(source.value.double(), _FINEST * spread)
    fine = coarse if made is None else torch.fmin(coarse, torch.fmax(made.value.double() / steep, _FINEST * spread))
    rows = (
        mean - sign * ahead,
        sign * fine,
        sign * coarse,
        steep * fine,
        torch.where(is_near, 0, bias - steep * ahead),
        sign / fine,
        -sign / coarse,
    )
    return torch.stack(rows).to(working(dtype))


def fold(x: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """t, laid out as ``x``; ``y`` has its shape, and channels are the second axis of both."""
    zero, *_, per_fine, per_coarse = _columns(table, x)
    is_on = ~(y <= 0)  # NaN passes, as in ReLU's own backward
    distance = (x.to(table.dtype) - zero).mul_(torch.where(is_on, per_fine, per_coarse))
    near = distance.clamp(min=0).add_(torch.where(is_on, _ON, _OFF).to(distance))
    distance = torch.where(distance >= -_SLIP, near, (1 - distance).mul_(_FAR))
    t = torch.empty_like(x, dtype=table.dtype)
    return torch.where(is_on, distance, distance.neg(), out=t)


def source(t: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """x', laid out as ``t``."""
    zero, fine, coarse, *_ = _columns(table, t)
    made = _distance(t, torch.where(t <= 0, _OFF, _ON).to(t)).mul_(torch.where(t <= 0, -coarse, fine)).add_(zero)
    return torch.empty_like(t, dtype=dtype).copy_(made)


def made(t: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """y', laid out as ``t``."""
    _, _, _, steep, lowest, *_ = _columns(table, t)
    made = _distance(t, _ON).mul_(steep).add_(lowest)
    return torch.empty_like(t, dtype=dtype).copy_(made.masked_fill_(t <= 0, 0.0))


def variances(t: Tensor, table: Tensor) -> Tensor:
    """Of the errors of x', value by value: as multiples of what they are on the coarse side."""
    _, fine, coarse, *_ = _columns(table, t)
    return torch.where(t <= 0, 1.0, (fine / coarse).square())


def mask(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that is positive, or NaN, where y was: t itself, where it has the dtype."""
    return t.to(dtype)


def gate(t: Tensor, gradient: Tensor) -> Tensor:
    """``gradient`` where y was positive, or NaN, and zero elsewhere; it is laid out as ``t``."""
    return torch.where(t <= 0, 0, gradient)


def _distance(t: Tensor, begin: Tensor | float) -> Tensor:
    """v, negative for what lies on the wrong side."""
    size = t.abs()
    return torch.where(size < _FAR / 2, size - begin, 1 - size / _FAR)


def _columns(table: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return table.view(ROWS, -1, *[1] * (x.dim() - 2)).unbind()
