"""LARS: a learning rate for each layer, for batches so large that one rate for all of them makes training diverge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowtide.errors import OptimizerError


class LARS(Optimizer):
    """Layer-wise adaptive rate scaling (You, Gitman, Ginsburg 2017, algorithm 1).

    For the weights w of a layer with gradient g::

        rate = trust * |w| / (|g| + weight_decay * |w|)
        v    = momentum * v + lr * rate * (g + weight_decay * w)
        w    = w - v

    so that a step moves every layer by about the same share of its norm. Where a norm is zero the rate is 1. The
    learning rate stands inside the momentum, as in the paper: changing it does not change steps that are under way.

    Parameters with at most one dimension (biases, the scales and shifts of norms) have rate 1 and no weight decay,
    the usual practice since; ``exclude_1d=False`` treats them as all others. All options may be given by group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        exclude_1d: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, {**defaults, "exclude_1d": exclude_1d})
        for group in self.param_groups:
            for name in defaults:
                if not group[name] >= 0:
                    raise OptimizerError(f"LARS: {name} has to be 0 or more, got {group[name]!r}")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update; ``closure`` computes the loss anew, and is not needed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            raise OptimizerError("LARS does not take sparse gradients; make the embedding dense, or leave it to SGD")
        if not (group["exclude_1d"] and parameter.dim() <= 1):
            gradient = _scaled(parameter, gradient, group["weight_decay"], group["trust"])
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        velocity = state["momentum"]
        velocity.mul_(group["momentum"]).add_(gradient, alpha=group["lr"])
        parameter.sub_(velocity)


def _scaled(parameter: Tensor, gradient: Tensor, weight_decay: float, trust: float) -> Tensor:
    """rate * (g + weight_decay * w), without asking the device what the norms are."""
    weights, slope = torch.linalg.vector_norm(parameter), torch.linalg.vector_norm(gradient)
    rate = trust * weights / (slope + weight_decay * weights)
    rate = torch.where((weights > 0) & (slope > 0), rate, 1.0)
    return gradient.add(parameter, alpha=weight_decay).mul_(rate)
