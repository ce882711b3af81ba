"""Scales of min-max quantisation: steps that are stored in few bits and still reach from the least to the most.

Codes are made with the rounded scale, never with the one before rounding: a decoder has no other.
"""

from __future__ import annotations

import torch
from torch import Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What values of ``dtype`` are computed with."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the scales of values of ``dtype`` are stored in."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def step_over(span: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """The step that covers each span in ``levels`` steps, rounded up as it will be stored, and which spans have one."""
    info = torch.finfo(span.dtype)
    sound = span < 1 / info.smallest_normal  # not where it is NaN
    return _round_up(torch.clamp(span * (1.0 / levels), min=info.smallest_normal)), sound


def stored_scale(step: Tensor, varies: Tensor, sound: Tensor) -> Tensor:
    """What is stored: zero where all values are equal, NaN (always the same one) where they cannot be coded."""
    if step.dtype == torch.float64:
        return torch.where(sound, torch.where(varies, step, 0), torch.nan)
    high = torch.where(varies, step.view(torch.int32) >> 16, 0)
    return torch.where(sound, high, 0x7FC0).to(torch.int16).view(torch.bfloat16)


def inverse(scale: Tensor) -> Tensor:
    """1 / scale to within 2**-22, by sums and products alone: a kernel repeats them for less than a division."""
    if scale.dtype == torch.float64:
        return 1 / scale
    guess = (0x7EF311C7 - scale.view(torch.int32)).view(torch.float32)
    for _ in range(3):
        guess = guess * (2.0 - scale * guess)
    return guess


def round_down(value: Tensor) -> Tensor:
    """To the bfloat16 value below or equal, as float32; float64 stays as it is."""
    if value.dtype == torch.float64:
        return value
    bits = value.view(torch.int32)
    return (torch.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).view(torch.float32)


def _round_up(scale: Tensor) -> Tensor:
    """To the next bfloat16 value, as float32; float64 stays as it is.

    Three units in the last place too much are forgiven: the product that led here may have added two of them.
    """
    if scale.dtype == torch.float64:
        return scale
    return ((scale.view(torch.int32) + 0xFFFC) & -0x10000).view(torch.float32)
