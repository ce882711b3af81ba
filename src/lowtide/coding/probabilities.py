"""Log-probabilities as probabilities: what backward of a log-softmax reads of them is their exponential.

    gradient of the logits = g - exp(y) * sum(g)

Of many thousand classes all but a few have next to no probability, and an error there that is small against 1 does
gradients no harm. Logarithms under a bound take as many bits for them as for any other; probabilities that are rounded
to multiples of a step, at random so that each keeps its mean, are zero almost everywhere. A zero comes back as minus
infinity, whose exponential it is. Rounding with dither would make some of them negative, which have no logarithm.

In a row whose probabilities sum to 1 the variances of all roundings sum to one step at most: a value far below the step
has the value times the step, and none has more.

The codec's dither has 256 levels, so its mean is right to a 512th of the step only, and what is smaller than that would
never be seen. Of a hundred thousand words most are: nothing would ever push their logits down. So values are first
rounded to multiples of a 256th of the step, the codec's unit, at random as well and from 2**24 levels. The sum of both
errors is below a step: one unit, and the 255 that the codec can add to a whole number of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide.coding import dither, layout

_PIECE = 1 << 20  # values that are rounded at a time: what is needed beside them stays small


def of_logs(y: Tensor) -> Tensor:
    """In float32, laid out as ``y``."""
    return torch.exp(y.float())


def rounded_of_logs(y: Tensor, unit: float, seed: int, number: Tensor | None = None) -> Tensor:
    """The same as whole multiples of ``unit``, each one of the two around the probability, with that for its mean.

    ``y`` is dense. ``number``, in memory, shifts the stream of random numbers: another one in each replay of a graph.
    """
    p = of_logs(y)
    flat = layout.memory_view(p)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE]
        fractions = dither.fractions_between(seed, start, start + piece.numel(), y.device, number)
        piece.mul_(1 / unit).add_(fractions).floor_().mul_(unit)
    return p


def to_logs(p: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithms of ``p``, which is overwritten."""
    return p.log_().to(dtype)
