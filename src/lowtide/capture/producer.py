"""The layer that made a tensor: which weight, and what that weight's gradient is for a gradient of the tensor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.capture import identity
from lowtide.records import Site

ROWS = {("addmm", "mat1"): 2, ("mm", "self"): 1, ("linear", "input"): 1, ("grouped_mm", "self"): 1}  # the weight's edge
_ENOUGH = 1 << 20  # values of its input that are held for the next op, or eight samples


def weight_edge(site: Site) -> int | None:
    """Which input of the node is the weight whose gradient is linear in what was saved; None if there is none."""
    return 1 if site.op == "convolution" else ROWS.get((site.op, site.field))


def weigher(site: Site, node: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """``weigh(x, gy)``: the gradient of a convolution's or linear layer's weight. Does not hold the node."""
    if site.op != "convolution":
        return lambda x, gy: gy.flatten(0, -2).t() @ x.flatten(0, -2)
    shape = node._saved_weight.shape
    window = (node._saved_stride, node._saved_padding, node._saved_dilation)
    transposed = (node._saved_transposed, node._saved_output_padding, node._saved_groups)

    def weigh(x: Tensor, gy: Tensor) -> Tensor:
        weight = torch.empty(shape, dtype=x.dtype, device=x.device)
        with _without_trials():
            found: Tensor = torch.ops.aten.convolution_backward(
                gy, x, weight, None, *window, *transposed, (False, True, False)
            )[1]
        return found

    return weigh


@contextlib.contextmanager
def _without_trials() -> Iterator[None]:
    """``cudnn.benchmark`` tries every algorithm, those that want gigabytes of scratch memory too: not worth it here."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(frozen=True, slots=True)
class Producer:
    """A layer with a weight that has just run, and the first samples of what it read."""

    number: int
    weight: nn.Parameter
    part: Tensor
    gradient: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, site: Site, node: Any, x: Tensor) -> Producer | None:
        """None for other ops, for frozen or computed weights, and where outputs are not the weight's first axis."""
        edge = weight_edge(site)
        if edge is None or x.dim() < 2 or not x.numel() or getattr(node, "_saved_transposed", False):
            return None
        if site.op == "grouped_mm":  # several weights, each for some of the rows
            return None
        weight = identity.parameter_behind(node.next_functions[edge][0])
        if weight is None:
            return None
        samples = min(x.shape[0], max(8, _ENOUGH * x.shape[0] // x.numel()))
        return cls(node._sequence_nr(), weight, x[:samples].clone(), weigher(site, node))

    def weigh(self, gy: Tensor) -> Tensor:
        """The weight's gradient, from the first samples, for the gradient ``gy`` of what the layer has made."""
        return self.gradient(self.part.to(gy.dtype), gy)
