"""Exact questions about elements: which branch will backward take here?

Each test gives a small class number for every element and mirrors, comparison for comparison, what the op's backward
does, NaN included. The table in ``lowtide.capture.needs`` says which op asks which question.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.errors import UnknownNameError
from lowtide.records import Membership


def _wide(x: Tensor) -> Tensor:
    """Some kernels compare 16-bit values in float32, where a threshold is not rounded to the tensor's dtype."""
    return x.float() if x.dtype.itemsize == 2 else x


def _rounded(threshold: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(threshold, dtype=torch.float64).to(dtype))


def _truth(x: Tensor) -> Tensor:
    """Booleans as they are."""
    return x


def _not_le(x: Tensor, threshold: float) -> Tensor:
    """ReLU, threshold: the gradient passes unless x <= threshold (so it passes where x is NaN).

    CUDA's kernel rounds the threshold to the tensor's dtype first; the CPU's does not.
    """
    return ~(_wide(x) <= (_rounded(threshold, x.dtype) if x.is_cuda else threshold))


def _gt(x: Tensor, threshold: float) -> Tensor:
    """Leaky ReLU: full slope where x > threshold."""
    return x > threshold


def _inside_closed(x: Tensor, low: float, high: float) -> Tensor:
    """clamp: the gradient passes where low <= x <= high."""
    return (x >= low) & (x <= high)


def _inside_open(x: Tensor, low: float, high: float) -> Tensor:
    """hardsigmoid: slope where low < x < high."""
    return (x > low) & (x < high)


def _not_saturated(x: Tensor, low: float, high: float) -> Tensor:
    """hardtanh, ReLU6: the gradient passes unless x <= low or x >= high; at NaN torch's own kernels differ."""
    x = _wide(x)
    return ~((x <= low) | (x >= high))


def _not_shrunk(x: Tensor, low: float, high: float) -> Tensor:
    """hardshrink, softshrink: the gradient passes unless low <= x <= high; at NaN torch's own kernels differ."""
    return ~((x >= low) & (x <= high))


def _sign(x: Tensor) -> Tensor:
    """abs: 0 zero, 1 positive, 2 negative, 3 NaN."""
    return (x > 0).to(torch.uint8) + (x < 0).to(torch.uint8) * 2 + (x != x).to(torch.uint8) * 3


def _two_valued(x: Tensor, other: float) -> Tensor:
    """A dropout mask held as floats: 0 or one other value."""
    return x == other


TESTS: dict[str, Callable[..., Tensor]] = {
    "truth": _truth,
    "not_le": _not_le,
    "gt": _gt,
    "inside_closed": _inside_closed,
    "inside_open": _inside_open,
    "not_saturated": _not_saturated,
    "not_shrunk": _not_shrunk,
    "sign": _sign,
    "two_valued": _two_valued,
}


def classify(x: Tensor, membership: Membership) -> Tensor:
    """The class of every element, as uint8."""
    if membership.test not in TESTS:
        raise UnknownNameError("membership test", membership.test, TESTS)
    return TESTS[membership.test](x, *membership.params).to(torch.uint8)


@lru_cache(maxsize=256)
def stands(membership: Membership, dtype: torch.dtype) -> bool:
    """Whether the stand-in values, rounded to ``dtype``, still fall into the classes they stand for."""
    if dtype == torch.bool:
        return True
    values = torch.tensor(membership.values, dtype=torch.float64).to(dtype)
    return classify(values, membership).tolist() == list(range(len(membership.values)))


def gated(gradient: Tensor, mask: Tensor) -> Tensor:
    """What ReLU's backward makes of ``gradient``; ``mask``, which lies in memory as it does, says where ReLU was on."""
    mask = mask.as_strided(gradient.shape, gradient.stride(), mask.storage_offset())
    gated: Tensor = torch.ops.aten.threshold_backward(gradient, mask, 0)
    return gated
