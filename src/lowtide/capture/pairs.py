"""Pairs of tensors that one payload can hold: the input of a batch norm, and what ReLU made of the norm's output.

The norm saves the one, ReLU and the layer after it save the other, and half of the second follows from the first:
``lowtide.coding.fold`` has the arithmetic. Here such pairs are found, when the second tensor is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture.handles import Handle, Passed
from lowtide.capture.sharding import has_memory
from lowtide.coding.fold import Norm
from lowtide.records import Need, Per

_RELU = "ReluBackward0"
_VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))
_NORMS = frozenset(
    f"{name}Backward0" for name in ("NativeBatchNorm", "NativeBatchNormLegit", "CudnnBatchNorm", "MiopenBatchNorm")
)


FIELDS = ("input", "result1", "result2", "weight")


@dataclass(frozen=True, slots=True)
class Pair:
    """A batch norm that ReLU follows: ``source`` is the handle of its input, and here is what it made of it."""

    source: Handle
    mean: Handle | Passed
    inverse_std: Handle | Passed
    weight: Passed
    bias: Tensor

    def norm(self) -> Norm | None:
        """None where the memory of weights has been given back until backward, as FSDP does between layers."""
        weight, mean, inverse_std = self.weight.restore(), self.mean.restore(), self.inverse_std.restore()
        if not has_memory(weight) or not has_memory(self.bias):
            return None
        return Norm(mean, inverse_std, weight, self.bias.detach())


def find(tensor: Tensor) -> Pair | None:
    """The pair whose second tensor this is; None as well where something of the norm is not known, or not ours.

    Between ReLU and the norm there is nothing, and after ReLU a change of shape at most. ReLU may work in place.
    """
    norm = norm_behind(tensor)
    if norm is None:
        return None
    source, mean, inverse_std, weight = (getattr(norm, f"_raw_saved_{field}").data for field in FIELDS)
    bias = getattr(norm.next_functions[2][0], "variable", None)  # which no norm saves; frozen, it looks like none
    if type(source) is not Handle or type(weight) is not Passed or bias is None:
        return None
    if not isinstance(mean, Handle | Passed) or not isinstance(inverse_std, Handle | Passed):
        return None
    if is_rounded(inverse_std.spec.dtype):
        return None
    return Pair(source, mean, inverse_std, weight, bias)


def norm_behind(tensor: Tensor) -> Any | None:
    """The node of the norm that ``find`` would name, whoever owns what it has saved."""
    relu: Any = tensor.grad_fn
    if type(relu).__name__ in _VIEWS:
        relu = relu.next_functions[0][0]
    if type(relu).__name__ != _RELU:
        return None
    norm: Any = relu.next_functions[0][0]
    return norm if type(norm).__name__ in _NORMS and getattr(norm, "_saved_training", True) else None


def is_rounded(dtype: torch.dtype) -> bool:
    """Whether a norm's statistic of this dtype is not what the norm has computed with."""
    return dtype.itemsize < 4


def may_begin(need: Need | None) -> bool:
    """Whether a save may be the first one of a pair."""
    return need is not None and need.family == "norm" and need.per is Per.CHANNEL
