"""The Triton kernel of ``lowtide.kernels._probabilities``: one pass, elements in memory order.

Only the last program masks what it reads and writes; the others move 16 bytes at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.coding import dither, layout
from lowtide.kernels._pieces import hash_word, key_of, widen

_BLOCK, _WARPS = 1024, 4
# Numbers that change from call to call: a kernel for each value of them would be compiled otherwise.
_RUNTIME = ["count", "low", "high", "unit", "inverse"]


def rounded_of_logs(y: Tensor, unit: float, seed: int, number: Tensor | None) -> Tensor:
    """``y`` is dense and not empty; ``number`` is read on the device."""
    p = torch.empty_like(y, dtype=torch.float32)
    count = y.numel()
    _round[(-(-count // _BLOCK),)](
        layout.memory_view(y), layout.memory_view(p), p if number is None else number,
        count, *dither.keys(seed), unit, 1 / unit, REPLAYED=number is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return p


@triton.jit(do_not_specialize=_RUNTIME)
def _round(y_ptr, p_ptr, number_ptr, count, low, high, unit, inverse, REPLAYED: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    low = key_of(low, number_ptr, REPLAYED)
    if start + BLOCK <= count:
        _round_block(y_ptr, p_ptr, start, count, low, high, unit, inverse, BLOCK, WHOLE=True)
    else:
        _round_block(y_ptr, p_ptr, start, count, low, high, unit, inverse, BLOCK, WHOLE=False)


@triton.jit
def _round_block(y_ptr, p_ptr, start, count, low, high, unit, inverse, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    at = tl.arange(0, BLOCK)
    left = tl.minimum(count - start, BLOCK).to(tl.int32)
    if WHOLE:
        y = tl.load(y_ptr + start + at)
    else:
        y = tl.load(y_ptr + start + at, mask=at < left, other=0.0)
    word = hash_word((start + at).to(tl.uint32), low, high)
    fraction = (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2**-24
    p = tl.floor(tl.exp(widen(y)) * inverse + fraction) * unit
    if WHOLE:
        tl.store(p_ptr + start + at, p)
    else:
        tl.store(p_ptr + start + at, p, mask=at < left)
