"""Small codes of a fixed width (1, 2, 4 or 8 bits) into bytes, lowest bits first."""

from __future__ import annotations

import torch
from torch import Tensor

WIDTHS = (1, 2, 4, 8)


def width_for(classes: int) -> int:
    """The narrowest supported width that tells ``classes`` codes apart; 0 if there is none."""
    return next((width for width in WIDTHS if classes <= 1 << width), 0)


def packed_nbytes(count: int, width: int) -> int:
    return -(-count * width // 8)


def pack(codes: Tensor, width: int) -> Tensor:
    """A row of uint8 codes, each below 2**width, as bytes."""
    if width == 8:
        return codes.clone()
    per_byte = 8 // width
    missing = -codes.numel() % per_byte
    if missing:
        codes = torch.cat([codes, codes.new_zeros(missing)])
    lanes = codes.view(-1, per_byte)
    packed = lanes[:, 0].clone()
    for lane in range(1, per_byte):
        packed |= lanes[:, lane] << (lane * width)
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """The first ``count`` codes of ``pack``'s bytes."""
    if width == 8:
        return packed[:count].clone()
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
    lanes = (packed.unsqueeze(1) >> shifts) & ((1 << width) - 1)
    return lanes.flatten()[:count]
