"""How the gradients of pointwise functions react to an error in what was saved.

Backward multiplies gY with a slope that is computed from the saved value: f'(x), or the same in terms of y = f(x). An
error of variance v in that value adds v * |gY|^2 * (the mean square of the slope's own derivative, by what was saved).

Where the slope jumps (SELU and PReLU at zero, hardswish at three), it has no derivative. There, and where it has but
nobody needs to know its formula, torch's own backward gives slopes, and a difference of them takes the derivative's
place. A jump counts as it does under a bound of three times that distance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide import bounds
from lowtide.capture.graph import saved_dim
from lowtide.capture.sums import working

_APART = 0.05  # of the standard deviation: between the two points of a difference and their middle

Curvature = Callable[[Any, Tensor], Tensor]


def mean_curvature(op: str, field: str, node: Any, x: Tensor) -> Tensor | None:
    """The mean square of the slope's derivative, from a sample of ``x``; None if ``op`` is not known."""
    if (op, field) == ("glu", "self"):
        return _gated(node, x)
    curvature = _CURVATURES.get((op, field))
    return None if curvature is None else curvature(node, bounds.sample(x, ()).to(working(x))).square_().mean()


def _gelu(node: Any, x: Tensor) -> Tensor:
    """phi(x) (2 - x^2); the tanh form differs from it by less than a hundredth."""
    return torch.exp(-x.square() / 2) * (2 - x.square()) / math.sqrt(2 * math.pi)


def _silu(node: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _softplus(node: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(x * float(node._saved_beta))
    return s * (1 - s) * float(node._saved_beta)


def _erf(node: Any, x: Tensor) -> Tensor:
    return x * torch.exp(-x.square()) * (4 / math.sqrt(math.pi))


def _log_sigmoid(node: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s)


def _power(node: Any, x: Tensor) -> Tensor:
    exponent = float(node._saved_exponent)
    return x.double() ** (exponent - 2) * (exponent * (exponent - 1))  # squares of high powers leave float32


def _by_difference(slope: Curvature) -> Curvature:
    def curvature(node: Any, x: Tensor) -> Tensor:
        apart = x.std(correction=0) * _APART
        found = (slope(node, x + apart) - slope(node, x - apart)) / (2 * apart)
        return torch.where(apart > 0, found, 0)  # values that are all alike are stored exactly

    return curvature


def _elu(*, is_result: bool) -> Curvature:
    def slope(node: Any, x: Tensor) -> Tensor:
        scales = float(node._saved_alpha), float(node._saved_scale), float(node._saved_input_scale)
        return torch.ops.aten.elu_backward(torch.ones_like(x), *scales, is_result, x)

    return _by_difference(slope)


def _celu(*, is_result: bool) -> Curvature:
    def slope(node: Any, x: Tensor) -> Tensor:
        alpha = float(node._saved_alpha)
        return torch.ops.aten.elu_backward(torch.ones_like(x), alpha, 1, 1 / alpha, is_result, x)

    return _by_difference(slope)


def _prelu(node: Any, x: Tensor) -> Tensor:
    """The slope on the one side is 1; that on the other, on average over channels, makes for the same jumps."""
    weight = node._saved_weight
    jump = (1 - weight.to(working(weight))).square().mean().sqrt()
    return torch.where(x > 0, 1, 1 - jump.to(x.dtype))


# By what was saved.
_CURVATURES: dict[tuple[str, str], Curvature] = {
    ("gelu", "self"): _gelu,
    ("silu", "self"): _silu,
    ("softplus", "self"): _softplus,
    ("tanh", "result"): lambda _, y: 2 * y,
    ("sigmoid", "result"): lambda _, y: 1 - 2 * y,
    ("sin", "self"): lambda _, x: torch.sin(x),
    ("cos", "self"): lambda _, x: torch.cos(x),
    ("erf", "self"): _erf,
    ("log_sigmoid", "self"): _log_sigmoid,
    ("log_sigmoid", "buffer"): lambda _, z: (1 + z).square().reciprocal(),  # on a CPU: z = exp(-|x|)
    ("pow", "self"): _power,
    ("mish", "self"): _by_difference(lambda _, x: torch.ops.aten.mish_backward(torch.ones_like(x), x)),
    ("hardswish", "self"): _by_difference(lambda _, x: torch.ops.aten.hardswish_backward(torch.ones_like(x), x)),
    ("prelu_kernel", "self"): _by_difference(_prelu),
    ("elu", "self"): _elu(is_result=False),
    ("elu", "result"): _elu(is_result=True),
    ("celu", "self"): _celu(is_result=False),
    ("celu", "result"): _celu(is_result=True),
}


def _gated(node: Any, x: Tensor) -> Tensor:
    """GLU, y = a s(b) with both in ``x``: for an error in a and one in b, 2 s'(b)^2 + (a s''(b))^2."""
    a, b = (bounds.sample(half, ()).to(working(x)) for half in x.chunk(2, saved_dim(node)))
    s = torch.sigmoid(b)
    slope = s * (1 - s)
    return (slope.square() * (2 + (a * (1 - 2 * s)).square())).mean()
