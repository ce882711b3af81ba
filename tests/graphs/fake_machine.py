"""Stands in for a GPU: what is captured is run again at each replay, into the tensors that the capture has made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from fake_generator import FakeGenerator
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class FakeGraph:
    nbytes = 1000

    def __init__(self, parameters: list[Tensor], body: Callable[[], Any], output: Any) -> None:
        self._parameters, self._body, self._output = parameters, body, output
        self._static = [item.grad for item in parameters]

    def replay(self) -> None:
        with _without_gradients(self._parameters):
            output = self._body()
            for item, static in zip(self._parameters, self._static, strict=True):
                if static is not None:
                    static.copy_(item.grad)
        for static, new in zip(pytree.tree_leaves(self._output), pytree.tree_leaves(output), strict=True):
            static.copy_(new)


class FakeAside:
    """Beside the step means right away."""

    def __init__(self) -> None:
        self.joins = self.failures = 0

    def begin(self) -> int:
        return 0

    def hold(self, *tensors: Tensor) -> None:
        pass

    def join(self) -> None:
        self.joins += 1

    def forget(self) -> None:
        self.failures += 1


class FakeMachine:
    """Random numbers are the CPU's, and none come from ``generator``; memory is there as long as ``is_roomy``."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.generator = FakeGenerator()
        self.is_roomy = True
        self.captures = self.waits = 0
        self.handed_on: list[FakeGraph | None] = []  # graphs whose pools captures have taken over
        self.besides: list[FakeAside] = []

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        yield

    def aside(self) -> FakeAside:
        self.besides.append(FakeAside())
        return self.besides[-1]

    def capture(
        self, body: Callable[[], Any], before: FakeGraph | None, generators: Sequence[Any] = ()
    ) -> tuple[FakeGraph, Any]:
        """Nothing has run afterwards: gradients hold nothing yet, buffers are as they were."""
        self.captures += 1
        self.handed_on.append(before)
        buffers = [buffer.clone() for buffer in self._model.buffers()]
        state = torch.get_rng_state()
        output = body()
        torch.set_rng_state(state)
        for buffer, before in zip(self._model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        parameters = list(self._model.parameters())
        graph = FakeGraph(parameters, body, output)
        for item in parameters:
            if item.grad is not None:
                item.grad.fill_(torch.nan)
        return graph, output

    def random(self) -> Any:
        return torch.get_rng_state()

    def set_random(self, offset: Any) -> None:
        torch.set_rng_state(offset)

    def has_room_beside(self, graph: Any) -> bool:
        return self.is_roomy

    def can_hand_on(self, graph: Any) -> bool:
        return self.is_roomy

    def wait(self) -> None:
        self.waits += 1


@contextlib.contextmanager
def _without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    kept = [(item, item.grad) for item in parameters]
    for item, _ in kept:
        item.grad = None
    yield
    for item, gradient in kept:
        item.grad = gradient
