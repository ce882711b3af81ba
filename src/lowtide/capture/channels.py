"""What AC-GC's rule for batch norm reads, for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.sums import count_nonzero


@dataclass(frozen=True, slots=True)
class Channels:
    """Known in forward: the largest magnitude of the input, the scale, the inverse standard deviation."""

    absmax: Tensor
    scale: Tensor
    inverse_std: Tensor

    @classmethod
    def of(cls, node: Any, x: Tensor) -> Channels | None:
        """None for a norm without a scale, or in evaluation."""
        scale, inverse_std = node._saved_weight, node._saved_result2
        if scale is None or not inverse_std.numel():
            return None
        rest = [axis for axis in range(x.dim()) if axis != 1]
        return cls(torch.linalg.vector_norm(x, torch.inf, rest), scale.detach(), inverse_std)

    def measure(self, grad_inputs: Sequence[Tensor | None], gy: Tensor) -> dict[str, Tensor]:
        """With what backward adds: the largest |gY|, the number of its non-zeros, the gradient of the scale."""
        rest = tuple(axis for axis in range(gy.dim()) if axis != 1)
        found = {
            "absmax": self.absmax,
            "scale": self.scale.clone(),  # when the numbers are sent its memory may be gone (FSDP)
            "inverse_std": self.inverse_std,
            "gradient_peak": torch.linalg.vector_norm(gy, torch.inf, rest),
            "gradient_nonzero": count_nonzero(gy, rest),
        }
        if grad_inputs[1] is not None:
            found["scale_gradient"] = grad_inputs[1].detach()
        return found
