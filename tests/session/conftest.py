"""A small model, its gradients, and a check that no hook is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _hooks_are_off() -> Iterator[None]:
    """A test that leaves saved-tensor hooks on fails itself, and does not take the tests after it along."""
    yield
    left = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left += 1
    assert left == 0, f"the test left {left} pairs of saved-tensor hooks on"


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
def assert_same() -> Callable[[list[Tensor], list[Tensor]], None]:
    """Bit-equal, one by one, and not an empty comparison."""

    def check(expected: list[Tensor], got: list[Tensor]) -> None:
        assert len(expected) == len(got) > 0
        for index, (plain, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(plain, other), f"tensor {index} of shape {tuple(plain.shape)} differs"

    return check
