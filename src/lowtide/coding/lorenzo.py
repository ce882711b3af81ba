"""Lorenzo prediction on integers: each one less what its neighbours before it let expect, and back, without loss.

In a row the neighbour to the left is the prediction; in an image left plus upper less upper left. Both are differences
along each axis, so that sums along each axis undo them, all planes at once.

Whether prediction helps is seen by the bits that integers need, before and after, on evenly spaced ones of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def difference(planes: Tensor) -> Tensor:
    """(n, height, width) integers to residuals; values before the first are zero."""
    for axis in (1, 2):
        planes = torch.diff(planes, dim=axis, prepend=torch.zeros_like(planes.narrow(axis, 0, 1)))
    return planes


def accumulate(residuals: Tensor) -> Tensor:
    """The inverse of ``difference``, in int32."""
    return residuals.cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)


def stride(count: int) -> int:
    """Of so many integers, each how manieth is looked at to see whether prediction helps."""
    return max(count >> 16, 1)


def cost(codes: Tensor) -> int:
    """Bits of the magnitudes of some of the integers: whole numbers, so that every device finds the same."""
    some = codes.flatten()[:: stride(codes.numel())]
    return int(torch.frexp(some.abs().float()).exponent.sum())
