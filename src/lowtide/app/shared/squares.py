"""Energies of gradients and of their errors."""

from __future__ import annotations

import torch
from torch import Tensor


def squares(one: dict[str, Tensor], other: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Sums of squares by name, of the difference if there are two; one copy to the host for all."""
    parts = [part if other is None else part - other[name] for name, part in one.items()]
    sums = torch.stack([part.double().square().sum() for part in parts]).tolist()
    return dict(zip(one, sums, strict=True))
