"""A snapshot puts back everything that a step changes, as the same objects, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import StateError
from lowtide.optim import LARS
from lowtide.snapshot import Snapshot


class Net(nn.Module):
    """Every kind of state that a module may have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("rebound", torch.zeros(2))
        self.register_buffer("expanded", torch.ones(1, 2).expand(4, 2))
        self.register_buffer("nothing", None)
        self.calls = {"count": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.hidden += 1
        self.rebound = self.rebound + 1
        self.calls["count"] += 1
        result: Tensor = nn.functional.dropout(self.last(self.norm(self.first(x)).relu()))
        return result

    def get_extra_state(self) -> dict[str, int]:
        return self.calls

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True),
    "adam, rate in a tensor": lambda p: torch.optim.Adam(p, torch.tensor(0.1)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=2),
    "lars": lambda p: LARS(p, 0.1),
}


class Run:
    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.state = [self.model, self.optimizer, self.scheduler]

    def step(self) -> None:
        x = torch.randn(8, 6) + random.random()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss: Tensor = self.model(x).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)
        self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        """All state by name; the tensors themselves."""
        found = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        for index, values in enumerate(self.optimizer.state.values()):
            found |= {f"{index} {name}": value for name, value in values.items() if isinstance(value, Tensor)}
        return found

    def facts(self) -> list[Any]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        numbers = [v for values in self.optimizer.state.values() for v in values.values() if isinstance(v, int)]
        return [str(groups), numbers, dict(self.model.calls), self.scheduler.last_epoch, random.getstate()]


@pytest.mark.parametrize("warm", [0, 2], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_after_a_snapshot_leave_no_trace(optimizer: str, warm: int) -> None:
    random.seed(0)
    run = Run(optimizer)
    for _ in range(warm):
        run.step()
    snapshot = Snapshot(run.state)
    objects, facts, rng = run.tensors(), run.facts(), torch.get_rng_state()
    before = {name: tensor.detach().clone() for name, tensor in objects.items()}
    ends = []
    for _ in range(2):
        for _ in range(3):
            run.step()
        ends.append({name: tensor.detach().clone() for name, tensor in run.tensors().items()})
        assert any(not torch.equal(ends[-1][name], before[name]) for name in before), "the steps changed nothing"
        snapshot.restore()
        after = run.tensors()
        assert list(after) == list(objects), "state was added or lost"
        assert all(after[name] is objects[name] for name in after), "state came back as another object"
        assert all(torch.equal(after[name], before[name]) for name in after)
        assert run.facts() == facts
        assert torch.equal(torch.get_rng_state(), rng)
        assert all(parameter.grad is None for parameter in run.model.parameters())
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0]), "something was not put back"


def test_an_optimizer_keeps_the_dtype_of_its_state() -> None:
    """Its own load_state_dict would cast a float32 momentum to the bfloat16 of the weights."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.full((4,), 1 / 3)
    snapshot = Snapshot([optimizer])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    snapshot.restore()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.full((4,), 1 / 3))
    assert torch.equal(weight, torch.ones(4, dtype=torch.bfloat16)), "an optimizer brings its parameters along"


def test_numpy_draws_the_same_again() -> None:
    numpy = pytest.importorskip("numpy")
    snapshot = Snapshot([])
    first = numpy.random.random(3)
    snapshot.restore()
    assert (numpy.random.random(3) == first).all()


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(StateError, match=r"state is a list of modules, optimizers and other objects.*it has function"):
        Snapshot([lambda: None])
