"""Log-probabilities to probabilities that are whole units of the codec's grid, in one pass over them."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.coding import probabilities

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rounded_of_logs(y: Tensor, unit: float, seed: int, number: Tensor | None = None) -> Tensor:
    """As ``probabilities.rounded_of_logs``; a device's own exponential may differ from another's in its last bits.

    A ``unit`` of zero is that of a bound under which everything is stored as it is.
    """
    if not unit:
        return probabilities.of_logs(y)
    on_device = y.is_cuda or kernels.interpreted()
    if on_device and y.dtype in _DTYPES and y.numel() and kernels.available():
        from lowtide.kernels import _probabilities_triton

        return _probabilities_triton.rounded_of_logs(y, unit, seed, number)
    return probabilities.rounded_of_logs(y, unit, seed, number)
