"""How a log-softmax's gradient reacts to what its probabilities are rounded to.

    gradient of the logits = gY - p * sum(gY)

Probabilities are rounded at random to one of the two multiples of a step s around them (lowtide.coding.probabilities).
With p = (k + f) s the variance of that is f (1 - f) s^2: p (s - p) where p is below the step, s^2 / 6 on average above
it, and nothing where p is too many steps from zero to have a code. So it grows with something between the first and the
second power of the step, and is told for several steps. A row counts with the square of its sum of gY. What the
gradient is beside that depends on the targets: where they are probabilities themselves, gY + p may be next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.graph import saved_dim
from lowtide.capture.sums import Arrived, working
from lowtide.coding.grid import MAX_CODE
from lowtide.statistics import STEPS

_ENOUGH = 1 << 22  # values that are looked at, or a few more
_LIKE_MANY = 0.75  # of a step: from here on the mean over fractions, so that no step is lucky for values all alike


def measure_log_softmax(node: Any, y: Tensor) -> Callable[[Sequence[Tensor | None], Arrived], Tensor]:
    """The added variance under each of ``STEPS``, from evenly spaced entries along the first axis."""
    dim = saved_dim(node) % max(y.dim(), 1)
    every = max(1, min(y.numel() // _ENOUGH, y.shape[0] // 8)) if dim else 1
    p = torch.exp(y[::every].to(working(y)) if y.dim() else y)
    rows = torch.stack([rounding(p, step).sum(dim) for step in STEPS]).flatten(1)
    left_out = y.shape[0] / len(p) if y.dim() else 1.0

    def measure(_: Sequence[Tensor | None], gy: Arrived) -> Tensor:
        sums = gy.gradient.sum(dim, dtype=rows.dtype)
        return rows @ (sums[::every] if every > 1 else sums).flatten().square() * left_out

    return measure


def rounding(p: Tensor, step: float) -> Tensor:
    """The variance of each probability's rounding."""
    steps = p / step
    found = torch.where(steps < _LIKE_MANY, steps - steps.square(), 1 / 6)
    return torch.where(steps <= MAX_CODE, found, 0).mul_(step * step)
