"""Tensors that can be made again in backward from what the op that made them has saved itself: its input.

GELU saves what it reads, and the linear layer after it saves what GELU made; a layer norm and the layer after it
likewise. One of the two is enough. What is made again from a stored input carries that input's error through the op:
it grows by 1.13 (GELU) or 1.1 (SiLU) at most, their steepest slopes. A norm is made with the statistics of the exact
input, which are kept anyway: each value's error is that of the input, divided by its row's spread, times the scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.capture.handles import Handle, Passed, Recast
from lowtide.capture.sharding import has_memory
from lowtide.capture.sums import working
from lowtide.coding import layout
from lowtide.kernels import _normalise
from lowtide.records import TensorSpec

_VIEWS, _CAST = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")), "ToCopyBackward0"
_MOST_STEPS = 4

Owned = Handle | Passed | Recast


@dataclass(frozen=True, slots=True)
class Maker:
    """The op that made a tensor. ``source`` is the handle of its input.

    ``run(x, dtype)`` is the op once more, for an input that was stored. ``gain(part)`` is the mean square of its slope,
    from a part of the input: the variance of an error is multiplied by it on the way (norms: of an error in units of
    its row's spread). ``is_exact`` if an exact input gives the same bits as in forward.
    """

    op: str
    source: Handle
    run: Callable[[Tensor, torch.dtype], Tensor]
    gain: Callable[[Tensor], Tensor]
    is_exact: bool


def find(tensor: Tensor, *, sharded: bool = False) -> Maker | None:
    """Who made ``tensor``, if it can be made again: with nothing in between but one cast and changes of shape.

    ``sharded``: weights may be without their memory when the tensor is asked for, since that is another layer's turn.
    """
    node = node_behind(tensor)
    return make(type(node).__name__, node, tensor, sharded=sharded) if node is not None else None


def node_behind(tensor: Tensor) -> Any | None:
    """The node of the op that ``find`` would name, whoever owns what it has saved."""
    node, casts = tensor.grad_fn, 0
    for _ in range(_MOST_STEPS):
        name = type(node).__name__
        if name in FIELDS:
            return node
        casts += name == _CAST
        if node is None or casts > 1 or (name != _CAST and name not in _VIEWS):
            return None
        node = node.next_functions[0][0]
    return None


def make(name: str, node: Any, tensor: Tensor, *, sharded: bool = False) -> Maker | None:
    """The maker of ``tensor``, by the name of a node and the node, or what has the same fields in its place."""
    if tensor._version or not tensor.is_contiguous():
        return None
    maker = _MAKERS[name](node, sharded)
    return maker if maker is not None and _is_alike(maker.source.spec, tensor) else None


def _is_alike(spec: TensorSpec, tensor: Tensor) -> bool:
    """Whether values of both lie in the same order, one for one."""
    return spec.numel == tensor.numel() and spec.device == tensor.device and layout.is_contiguous(spec)


def _gelu(node: Any, sharded: bool) -> Maker | None:
    return _pointwise("gelu", node, partial(F.gelu, approximate=node._saved_approximate), _gelu_slope)


def _silu(node: Any, sharded: bool) -> Maker | None:
    return _pointwise("silu", node, F.silu, _silu_slope)


def _pointwise(
    op: str, node: Any, function: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Maker | None:
    source = _handle(node, "self")
    if source is None:
        return None

    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        return function(x).to(dtype)

    def gain(part: Tensor) -> Tensor:
        return _mean_square(slope(part.to(working(part))))

    return Maker(op, source, run, gain, is_exact=True)


def _gelu_slope(x: Tensor) -> Tensor:
    """Phi(x) + x phi(x); the tanh form differs from it by less than a hundredth."""
    return torch.special.ndtr(x) + x * torch.exp(-x.square() / 2) / (2 * torch.pi) ** 0.5


def _silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def _layer_norm(node: Any, sharded: bool) -> Maker | None:
    source = _handle(node, "input")
    mean, inverse_std, weight, bias = (_owned(node, field) for field in ("result1", "result2", "weight", "bias"))
    if source is None or mean is None or inverse_std is None:
        return None
    if sharded:
        if not all(part is None or has_memory(part.restore()) for part in (weight, bias)):
            return None
        weight, bias = (
            None if part is None else Passed(part.restore().clone(), part.call_path) for part in (weight, bias)
        )

    def run(x: Tensor, dtype: torch.dtype) -> Tensor:
        scale, shift = (None if part is None else part.restore() for part in (weight, bias))
        return _normalise.rows(x, mean.restore(), inverse_std.restore(), scale, shift, dtype)

    def gain(part: Tensor) -> Tensor:
        return part.new_ones((), dtype=working(part)) if weight is None else _mean_square(weight.restore())

    return Maker("layer_norm", source, run, gain, is_exact=False)


def _handle(node: Any, field: str) -> Handle | None:
    saved = getattr(node, f"_raw_saved_{field}").data
    return saved if type(saved) is Handle else None


def _owned(node: Any, field: str) -> Owned | None:
    """What we hold of a tensor that the node saved; None if it saved none."""
    saved = getattr(node, f"_raw_saved_{field}").data
    return saved if isinstance(saved, Owned) else None


def _mean_square(x: Tensor) -> Tensor:
    return x.to(working(x)).square().mean()


FIELDS = {  # what a maker reads of its node: tensors, the source first, and scalars
    "GeluBackward0": (("self",), ("approximate",)),
    "SiluBackward0": (("self",), ()),
    "NativeLayerNormBackward0": (("input", "result1", "result2", "weight", "bias"), ()),
}
_MAKERS: dict[str, Callable[[Any, bool], Maker | None]] = {
    "GeluBackward0": _gelu,
    "SiluBackward0": _silu,
    "NativeLayerNormBackward0": _layer_norm,
}
