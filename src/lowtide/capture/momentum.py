"""The momentum of weights, in the scale of a gradient: from the optimizer's state, or kept here where it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

SHADOW_BETA = 0.9


class Momentum:
    """Mean magnitudes of momentum.

    SGD's buffer sums gradients, m = beta m + (1 - dampening) g, so it is multiplied by (1 - beta) / (1 - dampening);
    Nesterov's is the same buffer. Adam's ``exp_avg`` is an average that starts at zero, so it is divided by
    1 - beta1^t. Other optimizers get a shadow, s = 0.9 s + 0.1 g, divided by 1 - 0.9^t, that lives for the steps in
    which it is asked for.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        self._shadows: dict[str, Tensor] = {}
        self._updates = 0

    def update(self, weights: Mapping[str, Tensor]) -> None:
        """One step of the shadows of those weights, by name, whose optimizer has no momentum."""
        self._updates += 1
        for name, weight in weights.items():
            if weight.grad is None or self._find(weight) is not None:
                continue
            before = self._shadows.get(name)
            shadow = torch.zeros_like(weight.grad) if before is None else before.to(weight.grad.device)
            self._shadows[name] = shadow.lerp_(weight.grad, 1 - SHADOW_BETA)

    def is_the_optimizers(self) -> bool:
        """Whether the optimizer has a momentum wherever it has a gradient: then no shadow would ever be made.

        That is the same for all weights of a group, so one of each is looked at.
        """
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        trained = [next((item for item in group["params"] if item.grad is not None), None) for group in groups]
        found = [self._find(item) is not None for item in trained if item is not None]
        return bool(found) and all(found)

    def mean(self, name: str, weight: Tensor) -> Tensor | None:
        """The mean of |m| as a device scalar; without a momentum or a shadow that of the gradient, if there is one."""
        found = self._find(weight)
        if found is None and name in self._shadows:
            found = self._shadows[name].to(weight.device), 1 / (1 - SHADOW_BETA**self._updates)
        if found is None and weight.grad is not None:
            found = weight.grad, 1.0
        if found is None:
            return None
        buffer, factor = found
        return torch.linalg.vector_norm(buffer, 1) / max(buffer.numel(), 1) * factor

    def end(self) -> None:
        """The shadows have been read and are let go."""
        self._shadows.clear()
        self._updates = 0

    def _find(self, weight: Tensor) -> tuple[Tensor, Any] | None:
        """The optimizer's own momentum of ``weight`` and the factor that gives it the scale of a gradient.

        Some optimizers count steps on the device; the factor is then a device scalar, so that nothing waits for it.
        """
        if self._optimizer is None or weight not in self._optimizer.state:
            return None
        state = self._optimizer.state[weight]
        group = next(group for group in self._optimizer.param_groups if any(p is weight for p in group["params"]))
        average, buffer = state.get("exp_avg"), state.get("momentum_buffer")
        if average is not None and "betas" in group and "step" in state:
            return average, 1 / (1 - float(group["betas"][0]) ** state["step"])
        if buffer is not None and group.get("dampening", 1) != 1:
            return buffer, (1 - group["momentum"]) / (1 - group["dampening"])
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "shadows": {name: item.clone() for name, item in self._shadows.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._updates = int(state["updates"])
        self._shadows = dict(state["shadows"])
