"""The real gradient error of one layer: what its weight gradient is with what was stored, less what it would have been.

The error is linear in x' - x, so it is computed from that difference: no second gradient, no loss of digits. A part of
the tensor is kept exactly for the purpose, as many samples (batch norm: channels) as a few million values allow; the
noise of a part is compared with the prediction for that part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.producer import weigher, weight_edge
from lowtide.capture.sensitivity import probes
from lowtide.capture.sums import Arrived, square, working
from lowtide.records import Site

_ENOUGH = 1 << 22  # values that are kept exactly


@dataclass(frozen=True, slots=True)
class SpotCheck:
    """Holds part of ``x``. ``weigh(error, gY)`` is the gradient that an error leads to, ``sensitivity(gY)`` its S."""

    axis: int
    part: Tensor
    weigh: Callable[[Tensor, Tensor], Tensor]
    sensitivity: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, site: Site, node: Any, x: Tensor, *, even: bool = False) -> SpotCheck | None:
        """None where the op's weight gradient is not one that can be computed here. ``even``: as for sensitivities."""
        axis = 1 if "batch_norm" in site.op else 0
        if x.dim() < 2 or not x.numel():
            return None
        part = x.narrow(axis, 0, min(x.shape[axis], max(1, _ENOUGH * x.shape[axis] // x.numel()))).clone()
        if weight_edge(site) is not None:
            probe = probes(site, "linear", node, part)[0]
            return cls(axis, part, weigher(site, node), lambda gy: probe.measure((), Arrived(gy)))
        if site.op in _INVERSE_STD and getattr(node, "_saved_training", True):
            result = getattr(node, f"_saved_result{_INVERSE_STD[site.op]}")
            scaled = _scaled(site.op, result, part, x.shape[0])
            over = 0 if site.op not in _BATCH_NORMS else tuple(axis for axis in range(x.dim()) if axis != 1)
            sensitivity = (lambda gy: square(scaled(gy))) if even else square
            return cls(axis, part, lambda error, gy: scaled(gy * error).sum(over), sensitivity)
        return None

    def variance(self, stored: Tensor, gy: Tensor, felt: Tensor | None = None) -> Tensor:
        """The variance of a stored value's error that the gradient's squared error amounts to; none if there is no
        gradient.

        ``felt`` is the gradient that predictions are made with, if that is another one: where errors have different
        variances.
        """
        count = self.part.shape[self.axis]
        dtype = working(stored)
        error = stored.narrow(self.axis, 0, count).to(dtype) - self.part
        gy, felt = (part.narrow(self.axis, 0, count).to(dtype) for part in (gy, gy if felt is None else felt))
        found, reaction = square(self.weigh(error, gy)), self.sensitivity(felt)
        return torch.where((found == 0) & (reaction == 0), 0, found / reaction)


_INVERSE_STD = {
    "native_batch_norm": 2,
    "cudnn_batch_norm": 2,
    "native_layer_norm": 2,
    "fused_rms_norm": 1,
}
_BATCH_NORMS = ("native_batch_norm", "cudnn_batch_norm")


def _scaled(op: str, inverse_std: Tensor, part: Tensor, samples: int) -> Callable[[Tensor], Tensor]:
    """Times r, by channel or row; rows come as the first axis. Sums of it are gradients of the norm's scale."""
    if op in _BATCH_NORMS:
        factor = inverse_std[: part.shape[1]].view(-1, *[1] * (part.dim() - 2))
        return lambda x: x * factor
    rows = inverse_std.numel() * part.shape[0] // samples
    factor = inverse_std.flatten()[:rows].unsqueeze(1)
    return lambda x: x.reshape(rows, -1) * factor
