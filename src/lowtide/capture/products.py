"""How gradients that are linear in a saved factor react to an error in it: products, quotients, squares, norms.

| op | saved | the gradient that reads it | S |
|---|---|---|---|
| a * b, a / b | a | gb = gY a, or gY a / b^2 | |gY|^2, or |gY / b^2|^2, over non-zeros |
| a @ b | a | gb = a^T gY | |gY|^2 times the rows of a that it is summed over |
| x^2, exp(x) | x, or y | 2 gY x, or gY y | 4 |gY|^2, or |gY|^2 |
| variance of N values | x | 2 gY (x - mean) / (N - correction) | 4 |gY|^2 (N - 1) / (N - correction)^2 |
| norm of N values | x | gY x / y | |gY / y|^2 N |
| deviation y of N values | x | gY (x - mean) / (y (N - correction)) | |gY / y|^2 (N - 1) / (N - correction)^2 |
| c + k a * b | a | gb = k gY a | k^2 |gY|^2 over non-zeros |
| a + w (b - a) | a, b, or w | gw = gY (b - a), or ga = gY (1 - w) | |gY|^2 over non-zeros |
| values at places | values | gY times differences of neighbours | |gY|^2 (sum of sizes^2) / 2 (2/3)^(dims - 1) |
| squared error | x, or the target | 2 gY (x - target), over N if it is a mean | 4 |gY|^2 times N, 1 or 1 / N |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.sums import Arrived, count_nonzero, square, working

Measure = Callable[[Sequence[Tensor | None], Arrived], Tensor]


def measure_product(op: str, field: str, node: Any, x: Tensor) -> tuple[int, Measure] | None:
    """The edge whose gradient is meant, and S; None if ``op`` is not known."""
    if (op, field) in _REDUCTIONS:
        return 0 if node.next_functions[0][0] is not None else 1, _REDUCTIONS[op, field](node, x)
    if (op, field) in _SAMPLED:
        return 1, _sampled(node, x)
    if (op, field) not in _FACTORS:
        return None
    share = count_nonzero(x) / max(x.numel(), 1)
    if op == "div":
        return 1, _quotient(node._saved_other, share)
    factor = share * _inner(op, field, node, x)
    return _FACTORS[op, field], lambda _, gy: gy.square() * factor


_SAMPLED = {("grid_sampler2d", "input"), ("grid_sampler3d", "input"), ("cudnn_grid_sampler", "input")}
# The edge of the other factor.
_FACTORS = {
    ("mul", "self"): 1,
    ("mul", "other"): 0,
    ("addcmul", "tensor1"): 2,
    ("addcmul", "tensor2"): 1,
    ("lerp", "self"): 2,
    ("lerp", "end"): 2,
    ("lerp", "weight"): 0,
    ("div", "self"): 1,
    ("bmm", "self"): 1,
    ("bmm", "mat2"): 0,
    ("baddbmm", "batch1"): 2,
    ("baddbmm", "batch2"): 1,
    ("mm", "mat2"): 0,
    ("addmm", "mat2"): 1,
    ("pow", "self"): 0,
    ("exp", "result"): 0,
}


def _inner(op: str, field: str, node: Any, x: Tensor) -> float:
    """What a product's gradient multiplies |gY|^2 with beside the non-zeros."""
    if op == "pow":
        return 4.0  # of powers only squares count as products: the gradient is 2 x gY
    if op == "addcmul":
        return float(node._saved_value) ** 2
    if op not in ("bmm", "baddbmm", "mm", "addmm"):
        return 1.0
    right = field in ("mat2", "batch2")
    return float(x.shape[-2 if right else -1]) * float(getattr(node, "_saved_alpha", 1)) ** 2


def _quotient(other: Tensor, share: Tensor) -> Measure:
    def measure(_: Sequence[Tensor | None], gy: Arrived) -> Tensor:
        divisor = other.to(working(other)).square()
        return square(torch.where(divisor == 0, 0, gy.gradient / divisor)) * share

    return measure


def _variance(node: Any, x: Tensor) -> Measure:
    correction = 1 if node._saved_correction is None else float(node._saved_correction)
    numel = x.numel()

    def measure(_: Sequence[Tensor | None], gy: Arrived) -> Tensor:
        count = numel / max(gy.gradient.numel(), 1)
        return gy.square() * (4 * (count - 1) / max(count - correction, 1e-12) ** 2)

    return measure


def _norm(node: Any, x: Tensor) -> Measure:
    y, numel = node._saved_result.detach(), x.numel()
    return lambda _, gy: _square_over(gy, y) * (numel / max(y.numel(), 1))


def _square_over(gy: Arrived, y: Tensor) -> Tensor:
    """|gY / y|^2, without those of which backward makes nothing."""
    return square(torch.where(y == 0, 0, gy.gradient.reshape(y.shape) / y))


def _deviation(node: Any, x: Tensor) -> Measure:
    y = getattr(node, "_saved_result", None)
    y = (node._saved_result0 if y is None else y).detach()
    correction = 1 if node._saved_correction is None else float(node._saved_correction)
    count = x.numel() / max(y.numel(), 1)
    factor = (count - 1) / max(count - correction, 1e-12) ** 2
    return lambda _, gy: _square_over(gy, y) * factor


def _sampled(node: Any, x: Tensor) -> Measure:
    """Places are anywhere between values, on average, and count from -1 to 1 along each axis."""
    sizes = [size - int(bool(getattr(node, "_saved_align_corners", True))) for size in x.shape[2:]]
    factor = sum(size * size for size in sizes) / 2 * (2 / 3) ** (len(sizes) - 1)
    return lambda _, gy: gy.square() * factor


def _squared_error(node: Any, x: Tensor) -> Measure:
    factor = (4.0, 4.0 / max(x.numel(), 1), 4.0 * x.numel())[int(node._saved_reduction)]  # none, mean, sum
    return lambda _, gy: gy.square() * factor


_REDUCTIONS: dict[tuple[str, str], Callable[[Any, Tensor], Measure]] = {
    ("var", "self"): _variance,
    ("var_mean", "self"): _variance,
    ("std", "self"): _deviation,
    ("std_mean", "self"): _deviation,
    ("linalg_vector_norm", "self"): _norm,
    ("norm", "self"): _norm,
    ("mse_loss", "self"): _squared_error,
    ("mse_loss", "target"): _squared_error,
}
