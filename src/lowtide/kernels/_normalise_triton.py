"""The Triton kernel of ``lowtide.kernels._normalise``: one pass, each program some whole rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # values of a program, where rows are shorter


def rows(
    x: Tensor,
    mean: Tensor | None,
    inverse_std: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """``x`` has two axes."""
    count, length = x.shape
    made = torch.empty(count, length, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(length)
    tall = max(_TILE // block, 1)
    given = [inverse_std if part is None else part for part in (mean, weight, bias)]  # what is not there is not read
    _apply[(-(-count // tall),)](
        x, inverse_std, *given, made, count, length, HAS_MEAN=mean is not None, HAS_WEIGHT=weight is not None,
        HAS_BIAS=bias is not None, ROWS=tall, BLOCK=block, num_warps=4 if block <= _TILE else 8,
    )  # fmt: skip
    return made


@triton.jit(do_not_specialize=["count"])
def _apply(
    x_ptr, inverse_std_ptr, mean_ptr, weight_ptr, bias_ptr, made_ptr, count, length,
    HAS_MEAN: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there, inside = row < count, column < length
    at = row[:, None] * length + column[None, :]
    both = there[:, None] & inside[None, :]
    x = tl.load(x_ptr + at, mask=both, other=0).to(tl.float32)
    inverse_std = tl.load(inverse_std_ptr + row, mask=there, other=0).to(tl.float32)
    if HAS_MEAN:
        x = x - tl.load(mean_ptr + row, mask=there, other=0).to(tl.float32)[:, None]
    made = x * inverse_std[:, None]
    if HAS_WEIGHT:
        made = made * tl.load(weight_ptr + column, mask=inside, other=0).to(tl.float32)[None, :]
    if HAS_BIAS:
        made = made + tl.load(bias_ptr + column, mask=inside, other=0).to(tl.float32)[None, :]
    tl.store(made_ptr + at, made.to(made_ptr.dtype.element_ty), mask=both)
