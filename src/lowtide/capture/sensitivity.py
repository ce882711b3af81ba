"""How strongly an op's gradients react to an error in a tensor that it saved: one formula for each op.

With x' = x + e, the errors e independent, of mean zero and variance v (zero where x is exactly zero), the gradient that
the op computes from x' has the added variance v * S. For convolutions and matrix products that is exact, since their
weight gradient is linear in x; for norms it is exact but for terms of order v^2, for pointwise functions it is the
first order. gY is the gradient that arrives, gX the one that goes on.

| op | gradient | S |
|---|---|---|
| linear, mm | weight | sum over rows of |gY|^2 * (non-zeros in the row of x) |
| convolution | weight | sum over windows of |gY|^2 * (non-zeros in the window), by group |
| batch, group, layer, RMS norm | scale | |gY|^2 |
| batch norm | input | sum over channels of scale^2 r^2 / M * (gscale^2 (1 + 2 / M) + |gY|^2) |
| batch norm | weight below | sum over channels of scale^2 r^2 |gY|^2 |C|^2, C the mean of xhat times the window below |
| layer, RMS, group norm | input | sum over rows of r^2 / D * ((h . xhat)^2 (1 + 2 / D) + |h|^2), h = gY * scale |
| pointwise f | input | mean f''(x)^2 * |gY|^2 |
| product | other factor | |gY|^2 (times the inner size for batched matrices) |

Bounds of norm inputs are multiples of the spread 1 / r of each channel or row, and so is e in their rows: r drops out.

The row "weight below" is needed because batch norm subtracts xhat * (gY . xhat) / M: an error in that product is one
number for a whole channel. It adds little to the energy of gX, but all of it along xhat, and xhat is made of what the
layer below reads, so that its weight's gradient does not average it away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import bounds
from lowtide.capture.producer import ROWS, Producer
from lowtide.records import Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT

Grads = Sequence[Tensor | None]
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_FEW_CHANNELS = 8  # in a group: counting non-zeros window by window would need as much memory as the tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """One gradient to watch: that of input ``edge`` of the node. ``measure(grad_inputs, gY)`` gives S.

    ``weight`` is given where the gradient that counts is that of a parameter farther down.
    """

    kind: str
    edge: int
    measure: Callable[[Grads, Tensor], Tensor]
    weight: nn.Parameter | None = None


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in the published formulas: channels of gY, and how many windows read a value (taps / strides)."""

    outputs: int = 1
    reuse: float = 1.0


def probes(site: Site, family: str, node: Any, x: Tensor, below: Producer | None = None) -> list[Probe]:
    """The gradients that an error in ``x``, which ``node`` saved, reaches; none if no formula is known.

    ``below`` is the layer that has just run; a batch norm asks whether it is the one that made ``x``.
    A probe holds small tensors and never the node: hooks that hold their own node would keep the graph alive.
    """
    op, field = site.op, site.field
    if op == "convolution":
        return [Probe(WEIGHT, 1, _convolution(node, x))]
    if (op, field) in ROWS:
        factor = float(getattr(node, "_saved_alpha", 1)) ** 2
        count = count_nonzero(x, -1) * factor
        return [Probe(WEIGHT, ROWS[op, field], lambda _, gy: (square(gy, -1) * count).sum())]
    if op in _NORMS:
        return _norm(op, node, x, below)
    if (op, field) in _CURVATURES:
        curvature = _mean_curvature(_CURVATURES[op, field], node, x)
        return [Probe(PROPAGATED, 0, lambda _, gy: square(gy) * curvature)]
    if family == "product" and (op, field) in _PRODUCTS:
        share = count_nonzero(x) / max(x.numel(), 1)
        edge, factor = _PRODUCTS[op, field], _inner(op, field, node, x)
        return [Probe(PROPAGATED, edge, lambda _, gy: square(gy) * (share * factor))]
    return []


def unit_of(op: str) -> str:
    """The unit of bounds for what ``op`` saves."""
    return "std" if op in _NORMS else "absolute"


def geometry(op: str, node: Any) -> Geometry:
    if op != "convolution":
        shape = node._input_metadata[0].shape
        return Geometry(int(shape[-1]) if len(shape) else 1)
    weight = node._saved_weight
    outputs = weight.shape[1] * node._saved_groups if node._saved_transposed else weight.shape[0]
    taps = math.prod(weight.shape[2:])
    strides = math.prod(node._saved_stride)
    return Geometry(int(outputs), taps * strides if node._saved_transposed else taps / strides)


def square(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of squares along ``dim``, without a copy of ``x``."""
    return torch.linalg.vector_norm(x, 2, dim, dtype=_working(x)).square_()


def count_nonzero(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Number of non-zeros along ``dim``, as floats and without a copy of ``x``."""
    return torch.linalg.vector_norm(x, 0, dim, dtype=_working(x))


def _working(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _convolution(node: Any, x: Tensor) -> Callable[[Grads, Tensor], Tensor]:
    groups, kernel = node._saved_groups, node._saved_weight.shape[2:]
    window = {"stride": node._saved_stride, "padding": node._saved_padding, "dilation": node._saved_dilation}

    def per_window(values: Tensor) -> Tensor:
        """Sums over the window of each output position; ``values`` is (batch, groups, *positions)."""
        flat = values.flatten(0, 1).unsqueeze(1)
        summed = _CONVOLVE[len(kernel)](flat, flat.new_ones(1, 1, *kernel), **window)
        return summed.squeeze(1).unflatten(0, values.shape[:2])

    per_group = x.shape[1] // groups
    if per_group < _FEW_CHANNELS:  # as if non-zeros were spread evenly
        share = count_nonzero(x) / max(x.numel(), 1)
        nonzero = share * per_group * torch.ones(1, 1, *x.shape[2:], dtype=share.dtype, device=x.device)
    else:
        nonzero = count_nonzero(x.unflatten(1, (groups, per_group)), 2)
    inside = [slice(size) for size in x.shape[2:]]
    taps = None if node._saved_transposed else per_window(nonzero)

    def measure(_: Grads, gy: Tensor) -> Tensor:
        energy = square(gy.unflatten(1, (groups, -1)), 2)
        if taps is not None:
            return (energy * taps).sum()
        return (per_window(energy)[:, :, *inside] * nonzero).sum()

    return measure


_BATCH_NORMS = frozenset(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm_legit", "batch_norm_with_update")
)
_ROW_NORMS = {"native_layer_norm": 2, "fused_rms_norm": 1, "native_group_norm": 2}  # which result is r
_NORMS = _BATCH_NORMS | _ROW_NORMS.keys()


def _norm(op: str, node: Any, x: Tensor, below: Producer | None) -> list[Probe]:
    found = []
    if len(node.next_functions) > 1 and node.next_functions[1][0] is not None:
        found.append(Probe(SCALE, 1, lambda _, gy: square(gy)))
    if op in _ROW_NORMS:
        found.append(Probe(PROPAGATED, 0, _row_norm_input(op, node)))
    elif found and getattr(node, "_saved_training", True):
        if below is not None and below.is_below(node):
            found.append(Probe(BELOW, 0, _batch_norm_below(node, x, below), below.weight))
        found.append(Probe(PROPAGATED, 0, _batch_norm_input(node)))
    return found


def _batch_norm_below(node: Any, x: Tensor, below: Producer) -> Callable[[Grads, Tensor], Tensor]:
    mean, inverse_std = node._saved_result1, node._saved_result2
    per_channel = (1, -1, *[1] * (x.dim() - 2))
    part = x[: below.part.shape[0]]
    xhat = (part.to(_working(x)) - mean.view(per_channel)) * inverse_std.view(per_channel)
    mixed = below.weigh(xhat).flatten(1) / (xhat.numel() // xhat.shape[1])
    factor = (node._saved_weight.detach() * inverse_std).square() * square(mixed, 1)

    def measure(_: Grads, gy: Tensor) -> Tensor:
        return (square(gy, tuple(axis for axis in range(gy.dim()) if axis != 1)) * factor).sum()

    return measure


def _batch_norm_input(node: Any) -> Callable[[Grads, Tensor], Tensor]:
    scale, inverse_std = node._saved_weight.detach(), node._saved_result2

    def measure(grads: Grads, gy: Tensor) -> Tensor:
        gscale = grads[1]
        assert gscale is not None, "the scale needs a gradient"
        rest = tuple(axis for axis in range(gy.dim()) if axis != 1)
        count = gy.numel() // gy.shape[1]
        reach = gscale.to(inverse_std.dtype).square() * (1 + 2 / count) + square(gy, rest)
        return ((scale.to(inverse_std.dtype) * inverse_std).square() * reach).sum() / count

    return measure


def _row_norm_input(op: str, node: Any) -> Callable[[Grads, Tensor], Tensor]:
    """(h . xhat)^2 / D is what the norm takes out of h: |h|^2 less its mean's part less |gX|^2 / r^2. Needs no xhat."""
    inverse_std = getattr(node, f"_saved_result{_ROW_NORMS[op]}").flatten()
    scale = node._saved_weight
    if scale is not None:
        scale = scale.detach()

    def measure(grads: Grads, gy: Tensor) -> Tensor:
        gx, rows = grads[0], inverse_std.numel()
        if gx is None:
            return inverse_std.new_zeros(())
        factor = scale if scale is None or op != "native_group_norm" else scale.view(-1, *[1] * (gy.dim() - 2))
        h = (gy if factor is None else gy * factor).reshape(rows, -1)
        size = h.shape[1]
        energy = square(h, 1)
        removed = energy - square(gx.reshape(rows, -1), 1) / inverse_std.square()
        if op != "fused_rms_norm":
            removed -= h.sum(1, dtype=energy.dtype).square() / size
        return (inverse_std.square() * (removed.clamp_(min=0) * (1 + 2 / size) + energy / size)).sum()

    return measure


def _gelu(node: Any, x: Tensor) -> Tensor:
    """phi(x) (2 - x^2); the tanh form differs from it by less than a hundredth."""
    return torch.exp(-x.square() / 2) * (2 - x.square()) / math.sqrt(2 * math.pi)


def _silu(node: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _softplus(node: Any, x: Tensor) -> Tensor:
    s = torch.sigmoid(x * float(node._saved_beta))
    return s * (1 - s) * float(node._saved_beta)


# The derivative, by what was saved, of the factor that backward multiplies gY with.
_CURVATURES: dict[tuple[str, str], Callable[[Any, Tensor], Tensor]] = {
    ("gelu", "self"): _gelu,
    ("silu", "self"): _silu,
    ("softplus", "self"): _softplus,
    ("tanh", "result"): lambda _, y: 2 * y,
    ("sigmoid", "result"): lambda _, y: 1 - 2 * y,
    ("sin", "self"): lambda _, x: torch.sin(x),
    ("cos", "self"): lambda _, x: torch.cos(x),
}


def _mean_curvature(curvature: Callable[[Any, Tensor], Tensor], node: Any, x: Tensor) -> Tensor:
    part = bounds.sample(x, ())
    return curvature(node, part.to(_working(x))).square_().mean()


# The edge of the other factor.
_PRODUCTS = {
    ("mul", "self"): 1,
    ("mul", "other"): 0,
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
    if op not in ("bmm", "baddbmm", "mm", "addmm"):
        return 1.0
    right = field in ("mat2", "batch2")
    return float(x.shape[-2 if right else -1]) * float(getattr(node, "_saved_alpha", 1)) ** 2
