"""Block means: the low frequencies of a plane, one number for each of its blocks.

A block of an image has side x side values, a block of a row side**2, so that a mean costs as much in either. At the
border a block holds what is left, and its mean is that of the values it holds. A sum adds neighbours, then neighbouring
sums, and so on, along a row first and then across rows, and a sum is multiplied by the reciprocal of their number: an
order that every device and kernel keeps, so that all get the same bits. Torch's own mean sums in another order on each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.coding.planes import Planes


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a tensor's planes: ``tall`` x ``wide`` values each, but for those at the border.

    With ``stretched``, the blocks of average pooling without padding instead: none is smaller, what is left at the
    border belongs to none, and each block stands for an equal share of the plane, as in nearest-neighbour
    interpolation.
    """

    planes: Planes
    tall: int
    wide: int
    stretched: bool = False

    @classmethod
    def of(cls, shape: tuple[int, ...], side: int, *, stretched: bool = False) -> Blocks:
        planes = Planes.of(shape)
        tall, wide = (side, side) if planes.is_image else (1, side * side)
        if stretched:
            tall, wide = min(tall, planes.height), min(wide, planes.width)
        return cls(planes, tall, wide, stretched)

    @property
    def rows(self) -> int:
        return self.planes.height // self.tall if self.stretched else -(-self.planes.height // self.tall)

    @property
    def columns(self) -> int:
        return self.planes.width // self.wide if self.stretched else -(-self.planes.width // self.wide)

    @property
    def per_plane(self) -> int:
        return self.rows * self.columns

    def means(self, planes: Tensor) -> Tensor:
        """(n, height, width) to (n, rows, columns)."""
        inside = self.rows * self.tall, self.columns * self.wide
        if self.stretched:
            whole, share = planes[:, : inside[0], : inside[1]], 1.0 / (self.tall * self.wide)
            return _add_up(_add_up(whole, self.wide, 2), self.tall, 1) * share
        padded = F.pad(planes, (0, inside[1] - self.planes.width, 0, inside[0] - self.planes.height))
        sums = _add_up(_add_up(padded, self.wide, 2), self.tall, 1)
        return sums * self.shares(planes.dtype, planes.device)

    def shares(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(rows, columns): 1 / the number of values of a block."""
        height, width = self._sizes(self.planes.height, self.tall), self._sizes(self.planes.width, self.wide)
        return 1.0 / (height.unsqueeze(1) * width).to(dtype).to(device)

    def spread(self, means: Tensor) -> Tensor:
        """(n, rows, columns) to (n, height, width): to each value the mean of its block."""
        down = self._owners(self.planes.height, self.tall, self.rows, means.device)
        across = self._owners(self.planes.width, self.wide, self.columns, means.device)
        return means.index_select(1, down).index_select(2, across)

    def _owners(self, size: int, side: int, blocks: int, device: torch.device) -> Tensor:
        place = torch.arange(size, device=device)
        return place * blocks // size if self.stretched else place // side

    @staticmethod
    def _sizes(size: int, side: int) -> Tensor:
        starts = torch.arange(0, size, side)
        return (size - starts).clamp(max=side)


def _add_up(x: Tensor, side: int, axis: int) -> Tensor:
    """Sums of ``side`` neighbours along an axis; a number of them that is no power of two is filled up with zeros."""
    parts = x.unflatten(axis, (-1, side)).movedim(axis + 1, -1)
    if side & (side - 1):
        parts = F.pad(parts, (0, (1 << side.bit_length()) - side))
    while parts.shape[-1] > 1:
        parts = parts[..., 0::2] + parts[..., 1::2]
    return parts.squeeze(-1)
