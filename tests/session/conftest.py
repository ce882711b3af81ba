"""A small model, its gradients; a look at what a block has left on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from recorded_losses import hooks_left
from torch import Tensor, nn


@pytest.fixture
def mlp() -> Callable[[], nn.Sequential]:
    """Makes the same model every time: what it saves are the outputs of tanh (16 KiB) and of relu (16 KiB)."""

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    return make


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def gradients() -> Callable[..., list[Tensor]]:
    """Gradients of the parameters for the sum of the squared output."""

    def run(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(*inputs).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    return run


@pytest.fixture
def _nothing_is_left_on() -> Iterator[None]:
    yield
    assert hooks_left() == (None, 0)
