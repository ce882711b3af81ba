"""Ops whose backward finds an error in one of the tensors that they saved: what formulas predict, drawn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BOUND = 0.05
VARIANCE = BOUND**2 / 3


@torch.no_grad()
def measured(gradient: Callable[[Tensor], Tensor], x: Tensor, unit: Tensor | float, draws: int) -> float:
    """The mean squared error of a gradient under uniform errors of at most ``BOUND`` units; zeros have none."""
    exact, total = gradient(x), 0.0
    for _ in range(draws):
        error = (torch.rand_like(x) * 2 - 1) * BOUND * unit * (x != 0)
        total += float((gradient(x + error) - exact).square().sum())
    return total / draws


class Disturbed:
    """One call of an op, and its backward, as often as is asked for."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._errors: dict[int, Tensor] = {}  # by the address of what was saved
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, self._unpack):
            self.y = function()
        self.node: Any = self.y.grad_fn
        self.gy = torch.randn(self.y.shape, generator=torch.Generator().manual_seed(1), dtype=self.y.dtype)

    def _unpack(self, x: Tensor) -> Tensor:
        error = self._errors.get(x.data_ptr())
        return x if error is None else x + error

    @property
    def saved(self) -> dict[str, Tensor]:
        """The tensors that the op saved, by field."""
        fields = [name.removeprefix("_saved_") for name in dir(self.node) if name.startswith("_saved_")]
        found = {field: getattr(self.node, f"_saved_{field}") for field in fields}
        return {field: value.detach() for field, value in found.items() if isinstance(value, Tensor)}

    @torch.no_grad()
    def gradients(self, field: str = "", error: Tensor | None = None) -> tuple[Any, ...]:
        """Of all inputs, with ``error`` in what was saved as ``field``."""
        at = self.saved[field].data_ptr() if error is not None else 0
        self._errors = {} if error is None else {at: error}
        grads = self.node(self.gy, *[None] * (len(self.node._input_metadata) - 1))
        self._errors = {}
        return grads if isinstance(grads, tuple) else (grads,)
