"""Gradients and buffers after replays, and after a replay that was taken back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.errors import GraphError
from lowtide.graphs.state import Buffers, Gradients


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 3)).sum().backward()


@pytest.fixture
def gradients(model: nn.Linear) -> Gradients:
    """After a capture."""
    made = Gradients([*model.parameters(), *model.parameters()])
    with made.captured():
        backward(model)
        assert model.weight.grad is not None
    assert model.weight.grad is None and len(made._static) == 2, "each parameter once"
    return made


def replay(gradients: Gradients, value: float) -> None:
    gradients.begin_replay()
    for _, static in gradients._static:
        static.fill_(value)
    gradients.end_replay()


def test_a_replay_sets_gradients_and_adds_to_those_that_are_there(model, gradients):
    replay(gradients, 2.0)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    replay(gradients, 3.0)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 5.0)), "nobody has set them to zero"
    model.zero_grad(set_to_none=False)
    replay(gradients, 3.0)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 3.0))
    model.zero_grad()
    replay(gradients, 4.0)
    assert torch.equal(model.bias.grad, torch.full((2,), 4.0))
    model.weight.grad, model.bias.grad = torch.ones(2, 3), None
    replay(gradients, 1.0)
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0)) and torch.equal(model.bias.grad, torch.ones(2))


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_replay_that_is_taken_back(model, gradients, accumulates):
    replay(gradients, 2.0)
    if not accumulates:
        model.zero_grad()
    gradients.begin_replay()
    for _, static in gradients._static:
        static.fill_(torch.nan)
    gradients.undo()
    if accumulates:
        assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    else:
        assert model.weight.grad is None and model.bias.grad is None


@pytest.mark.parametrize("how", ["not at all", "to none", "to zero"])
def test_a_step_that_resets_gradients_itself(model, how):
    gradients = Gradients(model.parameters())
    for _ in range(2):
        with gradients.watched():
            if how != "not at all":
                model.zero_grad(set_to_none=how == "to none")
            backward(model)
            backward(model)
    with gradients.captured():
        backward(model)
    replay(gradients, 2.0)
    replay(gradients, 3.0)
    earlier = 4.0 + 2.0 if how == "not at all" else 0.0
    assert torch.equal(model.bias.grad, torch.full((2,), earlier + 3.0))


def test_buffers_that_change_are_put_back():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("constant", torch.ones(2))
    buffers = Buffers(model)
    with buffers.watched():
        model(torch.randn(8, 3))
    assert sorted(buffers._changed) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers.prepare()
    buffers.save()
    model(torch.randn(8, 3))
    assert int(model[1].num_batches_tracked) == 2
    buffers.undo()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_buffers_are_compared_until_they_are_known_to_change(monkeypatch: pytest.MonkeyPatch):
    """Each comparison waits for the device."""
    model = nn.BatchNorm1d(4)
    model.register_buffer("constant", torch.ones(2))
    buffers, looks, equal = Buffers(model), [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda one, other: looks.append(one) or equal(one, other))
    for count in (4, 1):
        with buffers.watched():
            model(torch.randn(8, 4))
        assert len(looks) == count
        looks.clear()
    assert not buffers.are_covered
    buffers.prepare()
    assert buffers.are_covered
    model.running_mean = torch.zeros(4)
    with buffers.watched():
        model(torch.randn(8, 4))
    assert len(looks) == 2 and not buffers.are_covered, "another tensor has taken its place"


def test_buffers_are_copied_in_lists_of_one_dtype(monkeypatch: pytest.MonkeyPatch):
    """Or each would be a launch of its own."""
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(3)))
    buffers, lists = Buffers(model), []
    with buffers.watched():
        model(torch.randn(8, 4))
    copy = torch._foreach_copy_
    monkeypatch.setattr(
        torch, "_foreach_copy_", lambda to, of: lists.append([x.dtype for x in to + of]) or copy(to, of)
    )
    buffers.save()
    assert not lists and not buffers.nbytes, "there is nowhere to save them"
    buffers.prepare()
    assert buffers.nbytes == 3 * (2 * 4 * 4 + 8)
    for act in (buffers.save, buffers.undo):
        lists.clear()
        act()
        assert sorted((len(item), *map(str, set(item))) for item in lists) == [
            (6, "torch.int64"),
            (12, "torch.float32"),
        ]


def test_a_buffer_that_is_replaced_is_refused():
    model = nn.BatchNorm1d(4)
    with pytest.raises(GraphError, match="place of the buffer running_mean"), Buffers(model).captured():
        model.running_mean = torch.zeros(4)
