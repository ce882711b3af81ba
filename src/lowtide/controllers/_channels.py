"""A bound for each channel, as numbers that a controller has set."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.records import Bound, Need


@dataclass(frozen=True, slots=True)
class ChannelBounds:
    """Absolute bounds along axis 1. A channel that the controller has not seen yet gets the smallest of them."""

    values: tuple[float, ...]

    def resolve(self, x: Tensor, need: Need) -> Bound:
        axes = need.axes(x.dim())
        if axes == (1,) and x.shape[1] == len(self.values):
            return Bound(torch.tensor(self.values, dtype=torch.float64, device=x.device), axes)
        sizes = [x.shape[axis] for axis in axes]
        return Bound(torch.full(sizes, min(self.values), dtype=torch.float64, device=x.device), axes)

    def __str__(self) -> str:
        digest = zlib.crc32(struct.pack(f"<{len(self.values)}d", *self.values))
        return f"{min(self.values):.3g} to {max(self.values):.3g} by channel ({digest:08x})"
