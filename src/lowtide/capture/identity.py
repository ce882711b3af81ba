"""Tell activations from what somebody else holds anyway: parameters, their views and casts, buffers, inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# One-input nodes between a parameter and a view or cast of it.
_VIEW_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        "T", "View", "UnsafeView", "Permute", "Transpose", "ReshapeAlias", "AsStrided", "Unsqueeze", "Alias",
        "Expand", "Slice", "Select", "Squeeze", "Detach",
    )
) | {"SqueezeBackward1"}  # fmt: skip
_CAST_NODE = "ToCopyBackward0"
_TRANSPOSE_NODE = "TBackward0"
_CAST_OF = "lowtide.cast_of"
DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int64})


@dataclass(frozen=True, slots=True)
class Left:
    """Why a tensor is passed through; ``owned`` if somebody other than autograd holds it, so that it costs nothing."""

    reason: str
    owned: bool = False
    parameter: nn.Parameter | None = None

    @property
    def leads_on(self) -> bool:
        """Whether the graph of such a tensor may lead to saves; that of a parameter's cast or view ends there."""
        return self.parameter is None and not self.owned


PARAMETER = Left("parameter", owned=True)
PARAMETER_VIEW = Left("view of a parameter", owned=True)
BUFFER = Left("buffer", owned=True)
MODEL_INPUT = Left("input of the model, held by the caller", owned=True)
SUBCLASS = Left("tensor subclass")
DTYPE = Left("dtype is not stored by any codec")
SMALL = Left("smaller than min_size")
LAZY = Left("lazily conjugated or negated view")
META = Left("meta tensor: there is nothing to store")
EXPANDED = Left("expanded view: a copy would be larger than its storage")
FROZEN_CAST = Left("cast of a frozen weight")
BACKWARD = Left("saved during backward")
OUTSIDE = Left("no gradient leads to it, and the model has not made it: the caller holds it, as a rule")  # a target


def parameter_kind(tensor: Tensor) -> Left | None:
    """Whether ``tensor`` is a parameter, a view of one, or a cast of one.

    ``parameter`` is set for what autocast makes: one cast of the parameter itself, transposed at most. Any other cast
    of a parameter is computed by the model and kept as it is.
    """
    if _is_parameter(tensor):
        return PARAMETER
    base = tensor._base
    if base is not None and _is_parameter(base):
        return PARAMETER_VIEW
    node: Any = tensor.grad_fn
    path: list[str] = []
    while node is not None:
        name = type(node).__name__
        if name == "AccumulateGrad":
            if not _is_parameter(node.variable):
                return None
            if _CAST_NODE not in path:
                return PARAMETER_VIEW
            plain = path in ([_CAST_NODE], [_TRANSPOSE_NODE, _CAST_NODE]) and not tensor._version
            return Left("cast of a parameter", parameter=node.variable if plain else None)
        if name != _CAST_NODE and name not in _VIEW_NODES:
            return None
        path.append(name)
        node = node.next_functions[0][0]
    return None


def cast_parameter(tensor: Tensor) -> nn.Parameter | None:
    """The parameter that ``tensor`` is a cast of, transposed at most, as autocast makes them; found by a short way.

    Autocast caches casts for as long as it is on: one made before the parameter's last change is stale, and None. The
    version of which a cast was seen first is noted on the node that made it, which lives as long as the cast.
    """
    node: Any = tensor.grad_fn
    name = type(node).__name__
    if name == _TRANSPOSE_NODE:
        node = node.next_functions[0][0]
        name = type(node).__name__
    if name != _CAST_NODE or tensor._version:
        return None
    leaf = node.next_functions[0][0]
    parameter = leaf.variable if type(leaf).__name__ == "AccumulateGrad" else None
    if parameter is None or not _is_parameter(parameter):
        return None
    version: int = parameter._version
    return parameter if node.metadata.setdefault(_CAST_OF, version) == version else None


def parameter_behind(node: Any) -> nn.Parameter | None:
    """The parameter whose gradient ``node`` is on the way to, through views and casts only."""
    while node is not None and (type(node).__name__ == _CAST_NODE or type(node).__name__ in _VIEW_NODES):
        node = node.next_functions[0][0]
    is_leaf = type(node).__name__ == "AccumulateGrad"
    return node.variable if is_leaf and _is_parameter(node.variable) else None


def _is_parameter(value: Tensor) -> bool:
    """``isinstance``, which runs Python code for parameters, only where the type alone does not say."""
    kind = type(value)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(value, nn.Parameter))


def unfit(tensor: Tensor, min_size: int) -> Left | None:
    """Whether ``tensor`` is of a kind that no codec takes, or too small to be worth one."""
    if type(tensor) is not Tensor:
        return SUBCLASS
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.dtype not in DTYPES:
        return DTYPE
    if tensor.is_neg():  # what may be conjugated is complex, and no codec takes that
        return LAZY
    if tensor.is_meta:
        return META
    if tensor.nbytes < min_size:
        return SMALL
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)):
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


_WITH_A_WEIGHT = frozenset(
    (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
)


def frozen_weight(tensor: Tensor, module: nn.Module) -> nn.Parameter | None:
    """The weight of a plain layer of which ``tensor``, that looks like it, is the cast; None where that is not certain.

    If no parameter of the layer is trained, a gradient leads to its input, or the layer would save nothing. So what it
    saves without a gradient is its weight, or the cast that autocast has made for this very call.
    """
    weight = module._parameters.get("weight")
    if type(module) not in _WITH_A_WEIGHT or type(weight) is not nn.Parameter or tensor._version:
        return None
    is_trained = any(part is not None and part.requires_grad for part in module._parameters.values())
    return None if is_trained or weight.dtype == tensor.dtype else weight


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is an ordinary one, with a storage that can be told from others."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested


def local_part(tensor: Tensor) -> Tensor | None:
    """The ordinary tensor whose storage this one holds: itself, or of a DTensor the part on this rank, which may be a
    result of communication that is under way."""
    part = getattr(tensor, "_local_tensor", tensor)
    part = getattr(part, "elem", part)
    return part if isinstance(part, Tensor) and is_plain(part) else None


def storages(value: Any) -> dict[int, StorageWeakRef]:
    """The storages of all tensors in a nest, by address; the weak references keep the addresses from being reused."""
    refs = (StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in(value) if is_plain(tensor))
    return {ref.cdata: ref for ref in refs}


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
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, item.name, None) for item in dataclasses.fields(value)]
    else:
        children = getattr(value, "__dict__", {}).values()
    return [tensor for child in list(children) for tensor in tensors_in(child, depth - 1)]
