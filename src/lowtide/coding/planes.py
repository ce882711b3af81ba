"""Planes: a tensor as images of height x width, for codecs that look at neighbours.

Where a tensor has four dimensions or more, its last two make a plane: the maps of a convolution, one for each sample
and channel. Elsewhere, and where one of the two has size 1, a plane is a row of the last axis longer than 1: the
features of a linear layer, the samples of a 1-d convolution. Planes follow the order of the indices, not of memory, so
that what a codec makes of a tensor does not depend on its strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from lowtide.records import TensorSpec

# Elements worked on at a time, in whole planes: few enough for the cache of a CPU, many elsewhere to have few launches.
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24


@dataclass(frozen=True, slots=True)
class Planes:
    """How many planes a tensor has, and their size."""

    count: int
    height: int
    width: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Planes:
        if 0 in shape:
            return cls(0, 1, 1)
        if len(shape) >= 4 and shape[-2] > 1 and shape[-1] > 1:
            return cls(prod(shape[:-2]), shape[-2], shape[-1])
        width = next((size for size in reversed(shape) if size > 1), 1)
        return cls(prod(shape) // width, 1, width)

    @property
    def area(self) -> int:
        return self.height * self.width

    @property
    def is_image(self) -> bool:
        return self.height > 1

    def split(self, x: Tensor) -> Tensor:
        """(count, height, width); a copy only where memory has another order."""
        return x.reshape(self.count, self.height, self.width)

    def slabs(self, device: torch.device) -> Iterator[tuple[int, int]]:
        """Ranges of planes to work on one after the other."""
        size = max((_SLAB_CPU if device.type == "cpu" else _SLAB) // self.area, 1)
        for start in range(0, self.count, size):
            yield start, min(start + size, self.count)


def join(planes: Tensor, spec: TensorSpec) -> Tensor:
    """The inverse of ``split``, with the strides that the tensor had; ``planes`` is contiguous and may be returned."""
    tensor = planes.view(spec.shape)
    if tensor.stride() == spec.stride:
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).copy_(tensor)
