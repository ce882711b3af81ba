"""Compiled models and the same ones run eagerly, each with a session of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from compiled_nets import Net
from torch import Tensor, nn

import lowtide
from lowtide.session import Session


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def labels() -> Tensor:
    return torch.arange(8)


@pytest.fixture
def net() -> Callable[[], Net]:
    def make() -> Net:
        torch.manual_seed(0)
        return Net()

    return make


@pytest.fixture
def attach() -> Iterator[Callable[..., Session]]:
    """Attaches, and compiles if a backend is named; takes all sessions off at the end."""
    sessions = []

    def make(
        model: nn.Module, method: str = "fixed", *, backend: str | None = "aot_eager", fullgraph: bool = True, **options
    ) -> Session:
        session = lowtide.attach(model, method, min_size=1024, **options)
        sessions.append(session)
        if backend is not None:
            session.compile(backend=backend, fullgraph=fullgraph)
        return session

    yield make
    for session in sessions:
        session.detach()


@pytest.fixture
def gradients() -> Callable[..., list[Tensor]]:
    """Of the parameters, and of the inputs that want one, for the sum of the squared output."""

    def run(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(*inputs).square().sum().backward()
        return [leaf.grad.clone() for leaf in (*model.parameters(), *inputs) if leaf.grad is not None]

    return run
