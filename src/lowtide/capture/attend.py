"""Attention that is run again in backward, from stored queries, keys and values: what it made need not be stored.

Backward of attention reads the output for one thing, D = rowsum(gY * out), which centres dS = P * (dP - D): the rows of
P sum to one, so that dS tells nothing of what all keys of a row have in common. With an output that is stored, or that
belongs to other values than those at hand, they do not cancel any more, and errors are as large as the keys' mean is.
An output that is made of the very values that backward reads has just the error that cancels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowtide.capture import attention, needs
from lowtide.records import TensorSpec

FIELDS = ("query", "key", "value")
_LONGEST = 2  # keys for each feature of all heads: running it again is then at most a twelfth of a step's products


@dataclass(frozen=True, slots=True)
class Attention:
    """The op and what it was told. ``order``: the output's axes as they lie in memory, the outermost first."""

    op: str
    is_causal: bool
    scale: float | None
    order: tuple[int, ...]

    @classmethod
    def of(cls, node: Any, query: TensorSpec, key: TensorSpec, output: TensorSpec) -> Attention | None:
        """None where it drops probabilities, which are drawn anew, where it would cost too much, or where sizes are not
        known before a graph runs."""
        sizes = (*query.shape, *key.shape, *output.shape, *output.stride)
        if len(query.shape) != 4 or not all(type(size) is int for size in sizes) or node._saved_dropout_p != 0:
            return None
        _, heads, _, size = query.shape
        is_causal = bool(node._saved_is_causal)  # half of the scores are not computed
        if key.shape[2] > _LONGEST * (1 + is_causal) * heads * size:
            return None
        order = sorted(range(4), key=lambda axis: (-output.stride[axis], axis))
        op = needs.snake(needs.op_of(type(node).__name__))
        return cls(op, is_causal, node._saved_scale, tuple(order))

    def fits(self, sources: Sequence[TensorSpec], tensor: Tensor) -> bool:
        """Whether ``tensor`` has the numbers that it makes, in their order."""
        query, _, value = sources
        numel = math.prod(query.shape[:-1]) * value.shape[-1]
        return numel == tensor.numel() and all(source.device == tensor.device for source in sources)

    def run(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """The output, in the order in which it lay in memory."""
        op, told = getattr(torch.ops.aten, f"_{self.op}"), (0.0, self.is_causal)
        if self.op.endswith("flash_attention"):
            found = op(query, key, value, *told, scale=self.scale)
        elif self.op.endswith("for_cpu"):
            found = op(query, key, value, *told, attn_mask=bias, scale=self.scale)
        else:
            found = op(query, key, value, bias, True, *told, scale=self.scale)
        out: Tensor = found[0]
        return out.permute(self.order).contiguous()

    def gains(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> list[Tensor]:
        """How much of the variance of an error of each is there in what it makes."""
        saved = dict(zip(FIELDS, (query, key, value), strict=True))
        return attention.slopes(saved, self.scale, is_causal=self.is_causal, bias=bias)
