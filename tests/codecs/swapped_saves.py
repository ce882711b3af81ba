"""Runs an op twice: once as it is, once with what it saved replaced by what a codec makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.capture import needs
from lowtide.codecs import Codec
from lowtide.records import Need, TensorSpec


@dataclass(frozen=True)
class Saved:
    """A saved tensor as the table of needs sees it."""

    spec: TensorSpec
    is_leaf: bool = False


@dataclass(frozen=True)
class Swapped:
    """Gradients of the original and of the stand-in, the saved tensor, what backward needs of it and who coded it."""

    expected: Tensor
    got: Tensor
    saved: Tensor
    need: Need
    codec: Codec


def run(op: Callable[[Tensor], Tensor], x: Tensor, make: Callable[[Need], Codec], field: str) -> Swapped:
    """The gradient of ``op`` at ``x`` from autograd, and from the decoded stand-in for its saved ``field``."""
    gradient = torch.linspace(1, 2, op(x.detach()).numel(), device=x.device).to(x.dtype)
    plain = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    result = op(plain)
    (expected,) = torch.autograd.grad(result, plain, gradient.view_as(result))

    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach())
        return len(packed) - 1

    other = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda at: packed[at]):
        result = op(other)
    node = _node_with(result, field)
    at, saved, fields = _find(node, packed, field)
    need = needs.of(needs.op_of(type(node).__name__), node, field, fields[field].spec.dtype, fields)
    codec = make(need)
    packed[at] = codec.decode(codec.encode(saved.clone(memory_format=torch.preserve_format)))
    (got,) = torch.autograd.grad(result, other, gradient.view_as(result))
    return Swapped(expected, got, saved, need, codec)


def _node_with(result: Tensor, field: str) -> torch.autograd.graph.Node:
    """The first node from the result backwards that saved ``field`` (an op may wrap itself in views)."""
    node = result.grad_fn
    while node is not None and not hasattr(node, f"_raw_saved_{field}"):
        node = node.next_functions[0][0]
    assert node is not None, f"nothing saved {field!r}"
    return node


def _find(node: torch.autograd.graph.Node, packed: list[Tensor], field: str) -> tuple[int, Tensor, dict[str, Saved]]:
    names = [name.removeprefix("_raw_saved_") for name in dir(node) if name.startswith("_raw_saved_")]
    held = {name: getattr(node, f"_saved_{name}") for name in names}
    fields = {name: Saved(TensorSpec.of(tensor)) for name, tensor in held.items()}
    at = next(i for i, tensor in enumerate(packed) if tensor.data_ptr() == held[field].data_ptr())
    return at, packed[at], fields
