"""Rows less their means, times their inverse spreads, scaled and shifted: norms of rows whose statistics are given."""

from __future__ import annotations

import torch
from torch import Tensor

from lowtide import kernels

_LONGEST = 1 << 13  # values of a row that one program holds
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rows(
    x: Tensor,
    mean: Tensor | None,
    inverse_std: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """(x - mean) * inverse_std * weight + bias in ``dtype``; ``x`` is contiguous, a row for each spread.

    What is None is left out. Computed in float32 at least and rounded once.
    """
    count = inverse_std.numel()
    flat = x.view(count, -1)
    if _is_for_triton(flat, dtype):
        from lowtide.kernels import _normalise_triton

        scale, shift = (None if part is None else part.contiguous() for part in (weight, bias))
        return _normalise_triton.rows(flat, mean, inverse_std, scale, shift, dtype).view(x.shape)
    wide = torch.promote_types(flat.dtype, torch.float32)
    made = flat.to(wide) if mean is None else flat.to(wide) - mean.to(wide).view(count, 1)
    made = made * inverse_std.to(wide).view(count, 1)
    if weight is not None:
        made.mul_(weight.to(wide).flatten())
    if bias is not None:
        made.add_(bias.to(wide).flatten())
    return made.to(dtype).view(x.shape)


def groups(x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The same of groups of channels: ``x`` is (batch, channels, ...), dense, ``mean`` is (batch, groups).

    Lies in memory as ``x`` does. x * (inverse_std * weight) + (bias - mean * inverse_std * weight), in one pass: the op
    itself converts what it reads and writes, on a GPU without a copy.
    """
    batch, channels = x.shape[:2]
    wide, groups = torch.promote_types(x.dtype, torch.float32), mean.numel() // max(batch, 1)
    means, scales = (
        part.to(wide).view(batch, groups, 1).expand(-1, -1, channels // groups).reshape(batch, channels)
        for part in (mean, inverse_std)
    )
    scales = scales * weight.to(wide)
    shifts = bias.to(wide) - means * scales
    per_channel = (batch, channels, *[1] * (x.dim() - 2))
    made = torch.empty_like(x, dtype=dtype)
    return torch.addcmul(shifts.view(per_channel), x, scales.view(per_channel), out=made)


def _is_for_triton(x: Tensor, dtype: torch.dtype) -> bool:
    on_device = x.is_cuda or kernels.interpreted()
    fits = 0 < x.shape[1] <= _LONGEST and x.dtype in _DTYPES and dtype in _DTYPES
    return on_device and fits and x.numel() > 0 and kernels.available()
