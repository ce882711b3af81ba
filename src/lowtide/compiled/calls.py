"""Which calls of a model run compiled: all but those in which a controller wants something measured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_dispatch_stack

from lowtide.compiled.backend import Backend
from lowtide.errors import LowtideWarning


class Calls:
    """Stands in for ``Module.__call__`` of a compiled model.

    ``is_measured`` says whether this step's saves are looked at, which only an eager forward lets us do. ``aside``
    takes Lowtide's hooks off the model and off autograd: what is compiled must not see them.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Backend,
        is_measured: Callable[[], bool],
        aside: Callable[[], AbstractContextManager[None]],
        options: dict[str, Any],
    ) -> None:
        self._model, self._backend = model, backend
        self._is_measured, self._aside = is_measured, aside
        self._run = torch.compile(_alone(model._call_impl), backend=backend, **options)
        self.compiled = self.eager = 0
        self._has_looked = self._gave_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_training = torch.is_grad_enabled()
        # Under a dispatch mode, which wants to see every op, torch.compile steps aside by itself.
        if self._gave_up or (is_training and self._is_measured()) or _len_torch_dispatch_stack():
            self.eager += 1
            return self._model._call_impl(*args, **kwargs)
        before = self._backend.ran
        with self._aside():
            result = self._run(*args, **kwargs)
        self.compiled += 1
        self._backend.desk.pipeline.let_go()
        if is_training:
            self._look(self._backend.ran - before)
        return result

    def _look(self, pieces: int) -> None:
        """Say so if torch.compile has not made one graph of the model, or nothing in its graphs is held; once."""
        if pieces == 0:
            self._gave_up = True
            self._warn(
                "torch.compile ran nothing of this forward as a graph (recurrent layers are left out, for instance, or "
                "the limit of recompilations is reached: see TORCH_LOGS=recompiles). From now on the model runs eagerly"
            )
        if self._has_looked:
            return
        self._has_looked = True
        policy = self._backend.desk.pipeline.policy
        policy.warn_unmatched(self._backend.places.paths)
        if pieces > 1:
            self._warn(
                f"torch.compile divided this forward into {pieces} graphs. What is saved between them is kept as it "
                "is; compile(fullgraph=True) says where they part"
            )
        if pieces and not self._backend.held and policy.values is not None and not policy.is_waiting:
            self._warn("nothing that this forward saves for backward is held compressed. See session.report()")

    @staticmethod
    def _warn(text: str) -> None:
        warnings.warn(text, LowtideWarning, stacklevel=5)

    def describe(self) -> str:
        backend = self._backend
        return (
            f"compiled by {backend.name}: {self.compiled} calls, {self.eager} eager ones; "
            f"{backend.graphs} graphs, {backend.held} tensors held in them"
        )


def _alone(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` as a function with code of its own: torch.compile counts recompilations by the code, and does not look
    into that of ``nn.Sequential`` and its like if it is handed them as they are."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
