"""Log-probabilities as probabilities: what backward of a log-softmax reads of them is their exponential.

    gradient of the logits = g - exp(y) * sum(g)

Of many thousand classes all but a few have next to no probability, and an error there that is small against 1 does
gradients no harm. Logarithms under a bound take as many bits for them as for any other; probabilities that are rounded
to multiples of a step, at random so that each keeps its mean, are zero almost everywhere. A zero comes back as minus
infinity, whose exponential it is. Rounding with dither would make some of them negative, which have no logarithm.

In a row whose probabilities sum to 1 the variances of all roundings sum to one step at most: a value far below the step
has the value times the step, and none has more.
"""

from __future__ import annotations

import torch
from torch import Tensor


def of_logs(y: Tensor) -> Tensor:
    """In float32, laid out as ``y``."""
    return torch.exp(y.float())


def to_logs(p: Tensor, dtype: torch.dtype) -> Tensor:
    """The logarithms of ``p``, which is overwritten."""
    return p.log_().to(dtype)
