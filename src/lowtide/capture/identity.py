"""Tell activations from what somebody else holds anyway: parameters, their views and casts, buffers, inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# One-input nodes between a parameter and a view or cast of it.
_VIEW_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        "T", "View", "UnsafeView", "Permute", "Transpose", "ReshapeAlias", "AsStrided", "Unsqueeze", "Alias",
        "Expand", "Slice", "Select", "Squeeze", "Detach",
    )
) | {"SqueezeBackward1"}  # fmt: skip
_CAST_NODE = "ToCopyBackward0"
_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int64})


@dataclass(frozen=True, slots=True)
class Left:
    """Why a tensor is passed through; ``owned`` if somebody other than autograd holds it, so that it costs nothing."""

    reason: str
    owned: bool = False
    parameter: nn.Parameter | None = None


PARAMETER = Left("parameter", owned=True)
PARAMETER_VIEW = Left("view of a parameter", owned=True)
BUFFER = Left("buffer", owned=True)
MODEL_INPUT = Left("input of the model, held by the caller", owned=True)
SUBCLASS = Left("tensor subclass")
DTYPE = Left("dtype is not stored by any codec")
SMALL = Left("smaller than min_size")
EXPANDED = Left("expanded view: a copy would be larger than its storage")
FROZEN_CAST = Left("cast of a frozen weight")
BACKWARD = Left("saved during backward")


def parameter_kind(tensor: Tensor) -> Left | None:
    """Whether ``tensor`` is a parameter, a view of one, or a cast of one (then ``parameter`` is set)."""
    if isinstance(tensor, nn.Parameter):
        return PARAMETER
    if isinstance(tensor._base, nn.Parameter):
        return PARAMETER_VIEW
    node: Any = tensor.grad_fn
    casts = 0
    while node is not None:
        name = type(node).__name__
        if name == "AccumulateGrad":
            if not isinstance(node.variable, nn.Parameter):
                return None
            if not casts:
                return PARAMETER_VIEW
            return Left("cast of a parameter, made again in backward", owned=True, parameter=node.variable)
        if name == _CAST_NODE:
            casts += 1
        elif name not in _VIEW_NODES:
            return None
        node = node.next_functions[0][0]
    return None


def unfit(tensor: Tensor, min_size: int) -> Left | None:
    """Whether ``tensor`` is of a kind that no codec takes, or too small to be worth one."""
    if type(tensor) is not Tensor:
        return SUBCLASS
    if tensor.layout is not torch.strided or tensor.dtype not in _DTYPES or tensor.is_quantized:
        return DTYPE
    if tensor.numel() * tensor.element_size() < min_size:
        return SMALL
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return EXPANDED
    return None


def is_frozen_cast(tensor: Tensor, module: nn.Module | None) -> bool:
    """A frozen weight cast by autocast is a fresh leaf with no trace of the weight: recognise it by dtype and shape."""
    if module is None or tensor.grad_fn is not None or tensor.requires_grad:
        return False
    shape = tuple(tensor.shape)
    return any(
        parameter is not None
        and not parameter.requires_grad
        and parameter.dtype != tensor.dtype
        and tuple(parameter.shape) in (shape, shape[::-1])
        for parameter in module._parameters.values()
    )


def storages(value: Any) -> set[int]:
    """Identities of the storages of all tensors in a nest of tuples, lists, dicts and dataclass-like objects."""
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(value) if type(tensor) is Tensor}


def tensors_in(value: Any, depth: int = 6) -> list[Tensor]:
    """All tensors in a nest of tuples, lists, dicts and objects with a ``__dict__`` (model outputs)."""
    if isinstance(value, Tensor):
        return [value]
    if depth == 0 or isinstance(value, str | bytes | int | float | nn.Module) or value is None:
        return []
    if isinstance(value, dict):
        children: Any = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    else:
        children = getattr(value, "__dict__", {}).values()
    return [tensor for child in list(children) for tensor in tensors_in(child, depth - 1)]
