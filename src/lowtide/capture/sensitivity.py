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
| grouped_mm | weights | as linear: which rows belong to which weight does not matter to the sum |
| pointwise f | input | mean f''(x)^2 * |gY|^2 (``pointwise.py``) |
| product, quotient, variance, norm | other factor, or input | ``products.py`` |
| attention, softmax | inputs | ``attention.py`` |
| log-softmax | input | ``log_probabilities.py``: for several bounds, since it is not linear in the variance |

Bounds of norm inputs are multiples of the spread 1 / r of each channel or row, and so is e in their rows: r drops out.
Where a norm's input is made again from another tensor, e is of one size all over it, and r^2 stays in each sum.

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

from lowtide.capture import attention, pointwise, products
from lowtide.capture.log_probabilities import measure_log_softmax
from lowtide.capture.producer import ROWS, Producer
from lowtide.capture.sums import Arrived, count_nonzero, square, working
from lowtide.records import Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT

Grads = Sequence[Tensor | None]
_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_FEW_CHANNELS = 8  # in a group: counting non-zeros window by window would need as much memory as the tensor


@dataclass(frozen=True, slots=True)
class Probe:
    """One gradient to watch: that of input ``edge`` of the node. ``measure(grad_inputs, gY)`` gives S; of
    log-probabilities the added variance under each of ``STEPS``.

    ``weight`` is given where the gradient that counts is that of a parameter farther down, ``reads`` are edges whose
    gradients the formula takes beside.
    """

    kind: str
    edge: int
    measure: Callable[[Grads, Arrived], Tensor]
    weight: nn.Parameter | None = None
    reads: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in the published formulas: channels of gY, and how many windows read a value (taps / strides)."""

    outputs: int = 1
    reuse: float = 1.0


def probes(
    site: Site,
    family: str,
    node: Any,
    x: Tensor,
    below: Producer | None = None,
    *,
    again: bool = False,
    even: bool = False,
) -> list[Probe]:
    """The gradients that an error in ``x``, which ``node`` saved, reaches; none if no formula is known.

    ``below`` is the layer that made ``x``, if it is known; a batch norm's errors reach its weight. ``again``: what
    attention made is made again.
    A probe holds small tensors and never the node: hooks that hold their own node would keep the graph alive.
    """
    op, field = site.op, site.field
    if op == "convolution":
        return [Probe(WEIGHT, 1, _convolution(node, x))]
    if (op, field) in ROWS:
        factor, count = float(getattr(node, "_saved_alpha", 1)) ** 2, count_nonzero(x, -1).flatten()
        if factor != 1:
            count *= factor
        return [Probe(WEIGHT, ROWS[op, field], lambda _, gy: torch.dot(gy.squares(-1).flatten(), count))]
    if op in _NORMS:
        return _norm(op, node, x, below, even)
    if attention.is_attention(op, field):
        measure = attention.measure_attention(node, field, again=again)
        return [] if measure is None else [Probe(PROPAGATED, attention.edge_of(node), measure)]
    if op in ("softmax", "safe_softmax") and field == "result":
        return [Probe(PROPAGATED, 0, attention.measure_softmax(node, x))]
    if (op, field) == ("log_softmax", "result"):
        return [Probe(PROPAGATED, 0, measure_log_softmax(node, x))]
    if family == "product":
        found = products.measure_product(op, field, node, x)
        return [] if found is None else [Probe(PROPAGATED, *found)]
    curvature = pointwise.mean_curvature(op, field, node, x)
    if curvature is not None:
        return [Probe(PROPAGATED, 0, lambda _, gy: gy.square() * curvature)]
    return []


def unit_of(op: str) -> str:
    """The unit of bounds for what ``op`` saves."""
    if op == "log_softmax":
        return "probability"
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


def _convolution(node: Any, x: Tensor) -> Callable[[Grads, Arrived], Tensor]:
    groups, kernel = node._saved_groups, node._saved_weight.shape[2:]
    window = (node._saved_stride, node._saved_padding, node._saved_dilation)
    per_group = x.shape[1] // groups
    if per_group < _FEW_CHANNELS:  # as if non-zeros were spread evenly
        share = count_nonzero(x) / max(x.numel(), 1)
        nonzero = share * per_group * torch.ones(1, 1, *x.shape[2:], dtype=share.dtype, device=x.device)
    elif groups == 1:
        nonzero = count_nonzero(x, 1).unsqueeze(1)
    else:
        nonzero = count_nonzero(x.unflatten(1, (groups, per_group)), 2)
    inside = [slice(size) for size in x.shape[2:]]
    taps = None if node._saved_transposed else _per_window(nonzero, kernel, *window)

    def measure(_: Grads, gy: Arrived) -> Tensor:
        energy = gy.squares_by_group(groups)
        if taps is None:
            return (_per_window(energy, kernel, *window)[:, :, *inside] * nonzero).sum()
        if taps.shape == energy.shape:
            return torch.dot(energy.flatten(), taps.flatten())
        return (energy * taps).sum()

    return measure


def _per_window(values: Tensor, kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Sums over the window of each output position; ``values`` is (batch, groups, *positions)."""
    if len(kernel) == 2 and max(dilation) == 1 and 2 * max(padding) <= min(kernel):
        return F.avg_pool2d(values, tuple(kernel), stride, padding, divisor_override=1)
    flat = values.flatten(0, 1).unsqueeze(1)
    summed = _CONVOLVE[len(kernel)](flat, flat.new_ones(1, 1, *kernel), None, stride, padding, dilation)
    return summed.squeeze(1).unflatten(0, values.shape[:2])


_BATCH_NORMS = frozenset(
    ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm_legit", "batch_norm_with_update")
)
_ROW_NORMS = {"native_layer_norm": 2, "fused_rms_norm": 1, "native_group_norm": 2}  # which result is r
_NORMS = _BATCH_NORMS | _ROW_NORMS.keys()


def _norm(op: str, node: Any, x: Tensor, below: Producer | None, even: bool) -> list[Probe]:
    """The scale comes last: by then squares of gY by channel are known, and their sum needs no second look at gY."""
    scale = []
    if len(node.next_functions) > 1 and node.next_functions[1][0] is not None:
        scale.append(Probe(SCALE, 1, norm_scale(op, node) if even else lambda _, gy: gy.square()))
    if op in _ROW_NORMS:
        return [Probe(PROPAGATED, 0, _row_norm_input(op, node, even)), *scale]
    if scale and getattr(node, "_saved_training", True):
        return [*_batch_norm(node, x, below, even), *scale]
    return scale


def norm_scale(op: str, node: Any) -> Callable[[Grads, Arrived], Tensor]:
    """S of a norm's scale, for errors that are of one size all over its input."""
    inverse_std = getattr(node, f"_saved_result{_ROW_NORMS.get(op, 2)}").flatten()

    def measure(_: Grads, gy: Arrived) -> Tensor:
        if op in _ROW_NORMS:
            energy = square(gy.gradient.reshape(inverse_std.numel(), -1), 1)
        else:
            energy = gy.squares(_all_but_channels(gy.gradient))
        return torch.dot(inverse_std.square().to(energy.dtype), energy)

    return measure


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return tuple(axis for axis in range(x.dim()) if axis != 1)


def _batch_norm(node: Any, x: Tensor, below: Producer | None, even: bool) -> list[Probe]:
    """Weights are read in backward, not here: in between they may be without their memory (FSDP)."""
    inverse_std, count = node._saved_result2.to(working(x)), x.numel() // x.shape[1]
    rest, weight = _all_but_channels(x), node._saved_weight.detach()
    reaction = inverse_std.square() if even else inverse_std  # to an error of one unit, but for the scale

    def onward(grads: Grads, gy: Arrived) -> Tensor:
        gscale = grads[1]
        assert gscale is not None, "the formula is not asked without it"
        gscale = gscale.to(inverse_std.dtype)
        weighed = gscale if gy.evenness is None else gscale * gy.evenness
        reach = torch.addcmul(gy.squares(rest), gscale, weighed, value=1 + 2 / count)
        return torch.dot((weight * reaction).square_(), reach) / count

    found = [Probe(PROPAGATED, 0, onward, reads=(1,))]
    if below is not None:
        mixed = reaction * inverse_std * _mix(node, x, below)
        found.append(
            Probe(BELOW, 0, lambda _, gy: torch.dot((weight * mixed).square_(), gy.squares(rest)), below.weight)
        )
    return found


def _mix(node: Any, x: Tensor, below: Producer) -> Tensor:
    """|C| / r by channel, from the first samples: the mean of x - mean(x) times the window below."""
    samples, per_channel = below.part.shape[0], (-1, *[1] * (x.dim() - 2))
    centred = x[:samples].to(working(x)) - node._saved_result1.view(per_channel)
    mixed = below.weigh(centred)
    norms = torch.linalg.vector_norm(mixed, 2, tuple(range(1, mixed.dim())))
    return norms.div_(centred.numel() // centred.shape[1])


def _row_norm_input(op: str, node: Any, even: bool) -> Callable[[Grads, Arrived], Tensor]:
    """(h . xhat)^2 / D is what the norm takes out of h: |h|^2 less its mean's part less |gX|^2 / r^2. Needs no xhat."""
    inverse_std = getattr(node, f"_saved_result{_ROW_NORMS[op]}").flatten()
    scale = node._saved_weight
    if scale is not None:
        scale = scale.detach()

    def measure(grads: Grads, arrived: Arrived) -> Tensor:
        gy, gx, rows = arrived.gradient, grads[0], inverse_std.numel()
        if gx is None:
            return inverse_std.new_zeros(())
        factor = scale if scale is None or op != "native_group_norm" else scale.view(-1, *[1] * (gy.dim() - 2))
        h = (gy if factor is None else gy * factor).reshape(rows, -1)
        size = h.shape[1]
        energy = square(h, 1)
        removed = energy - square(gx.reshape(rows, -1), 1) / inverse_std.square()
        if op != "fused_rms_norm":
            removed -= h.sum(1, dtype=energy.dtype).square() / size
        reaction = inverse_std.square().square_() if even else inverse_std.square()
        return (reaction * (removed.clamp_(min=0) * (1 + 2 / size) + energy / size)).sum()

    return measure
