"""The four ops of compiled graphs.

``saved`` marks, while a graph is traced, a tensor that backward reads, with what it could be made of again; none is
left in what is compiled. ``hold`` encodes tensors that belong together and gives a token: one byte in host memory that
owns what is held, and lets it go when the last reference to the token goes, backward or not. ``restore`` decodes one
of them, in the geometry that was traced. ``gate`` is ReLU's backward: a gradient passes through what is held, and
nobody has to write a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from lowtide.compiled.holding import Holder, group_of, holder_of

# Any layout will do, and nothing of this can be replayed: both ops run Python.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)

_library = torch.library.Library("lowtide", "DEF")
_library.define("saved(Tensor tensor, int number, Tensor[] beside) -> Tensor")
_library.define("hold(Tensor[] tensors, str key) -> Tensor", tags=_TAGS)
_library.define(
    "restore(Tensor token, int index, SymInt[] size, int[] order, ScalarType dtype, Device device) -> Tensor",
    tags=_TAGS,
)

_library.define("gate(Tensor gradient, Tensor token, int index) -> Tensor", tags=_TAGS)

SAVED = torch.ops.lowtide.saved.default
HOLD = torch.ops.lowtide.hold.default
RESTORE = torch.ops.lowtide.restore.default
GATE = torch.ops.lowtide.gate.default


def strides(size: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Of a dense tensor whose axes lie in memory as ``order`` says, the outermost first."""
    stride, step = [0] * len(size), 1
    for axis in reversed(order):
        stride[axis] = step
        step = step * max(size[axis], 1) if isinstance(size[axis], int) else step * size[axis]
    return tuple(stride)


_known_strides = lru_cache(maxsize=4096)(strides)


def _saved(tensor: Tensor, number: int, beside: list[Tensor]) -> Tensor:
    return tensor.clone()


def _saved_fake(tensor: Tensor, number: int, beside: list[Tensor]) -> Tensor:
    return torch.empty_like(tensor)


def _hold(tensors: list[Tensor], key: str) -> Tensor:
    return group_of(key).hold(tensors).token()


def _hold_fake(tensors: list[Tensor], key: str) -> Tensor:
    return torch.empty(Holder.NBYTES, dtype=torch.uint8, device="cpu")


def _restore(
    token: Tensor, index: int, size: list[int], order: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    tensor, stride = holder_of(token).restore(index), _known_strides(tuple(size), tuple(order))
    if tensor.stride() == stride:  # as a rule
        return tensor
    if all(count == 1 or at == step for count, at, step in zip(size, tensor.stride(), stride, strict=True)):
        return tensor.as_strided(size, stride)  # an axis of one may have had any stride
    # The compiler has laid the tensor out otherwise than it was traced.
    return torch.empty_strided(size, stride, dtype=dtype, device=device).copy_(tensor)


def _restore_fake(
    token: Tensor, index: int, size: list[int], order: list[int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty_strided(size, strides(size, order), dtype=dtype, device=device)


def _gate(gradient: Tensor, token: Tensor, index: int) -> Tensor:
    return holder_of(token).gate(index, gradient)


def _gate_fake(gradient: Tensor, token: Tensor, index: int) -> Tensor:
    return torch.empty_like(gradient)


for _name, _run, _fake in (
    ("saved", _saved, _saved_fake),
    ("hold", _hold, _hold_fake),
    ("restore", _restore, _restore_fake),
    ("gate", _gate, _gate_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowtide::{_name}", _fake, lib=_library)
