"""Copies of an attached model are plain models: they train, they save, and they shed the hooks they came with."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import lowtide


def _deepcopied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def _saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [_deepcopied, _pickled, _saved])
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


@COPIES
def test_a_copy_trains_as_a_plain_model(mlp, x, gradients, assert_same, copied):
    expected = gradients(mlp(), x)
    model = mlp()
    session = lowtide.attach(model)
    gradients(model, x)
    peak = session.ledger.raw_peak
    other = copied(model)
    assert_same(expected, gradients(other, x))
    assert session.ledger.raw_peak == peak  # nothing of the copy was counted
    assert session.ledger.held == 0


@COPIES
def test_a_copy_sheds_the_hooks(mlp, x, copied):
    model = mlp()
    lowtide.attach(model)
    other = copied(model)
    other(x)
    assert not any(getattr(module, kind) for module in other.modules() for kind in HOOKS)
    assert all(getattr(module, kind) for module in model.modules() for kind in HOOKS)


@COPIES
def test_a_hook_of_a_copy_inherits_nothing(mlp, x, copied):
    """Hooks are numbered from zero in every process: one that a user adds to a loaded model must not be taken for one
    of ours, which takes keyword arguments and runs after a failure. Ours have a key that is no number."""
    model = mlp()
    lowtide.attach(model)
    other = copied(model)
    assert not any(isinstance(key, int) for kind in (*HOOKS, *FLAGS) for key in getattr(other, kind))
    seen = []
    other.register_forward_pre_hook(lambda module, inputs: seen.append(inputs))
    output = other(x)
    assert not any(getattr(other, kind) for kind in FLAGS)
    assert [type(item) for item in seen[0]] == [torch.Tensor]
    assert torch.equal(output, model(x))


@COPIES
def test_a_copy_can_be_attached(mlp, x, gradients, assert_same, copied):
    expected = gradients(mlp(), x)
    model = mlp()
    lowtide.attach(model, "exact")
    other = copied(model)
    session = lowtide.attach(other, "exact")
    assert_same(expected, gradients(other, x))
    assert session.ledger.raw_peak == 2 * 16 * 1024
    session.detach()


@COPIES
def test_hooks_of_the_user_are_copied(mlp, x, copied):
    model = mlp()
    model.register_forward_hook(_double)
    expected = model(x)
    lowtide.attach(model)
    other = copied(model)
    assert torch.equal(other(x), expected)
    assert torch.equal(other(x), expected)


def _double(module, inputs, output):
    return output * 2


def test_a_copy_in_the_middle_of_training(mlp, x):
    """An exponential moving average copies the model between steps, a snapshot even between forward and backward."""
    model = mlp()
    session = lowtide.attach(model)
    loss = model(x).sum()
    average = copy.deepcopy(model)
    average(x)
    loss.backward()
    assert session.ledger.held == session.ledger.raw == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copied_optimizer_does_not_count_steps(mlp, x, copied):
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    session = lowtide.attach(model, optimizer=optimizer)
    model(x).sum().backward()
    optimizer.step()
    other = copied(optimizer)
    for group, original in zip(other.param_groups, optimizer.param_groups, strict=True):
        for parameter, source in zip(group["params"], original["params"], strict=True):
            parameter.grad = source.grad.clone()
    other.step()
    assert session.ledger.step == 1


def test_state_dicts_have_no_trace(mlp, x):
    model, file = mlp(), io.BytesIO()
    lowtide.attach(model)
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = mlp()
    fresh.load_state_dict(torch.load(file))
    assert torch.equal(fresh(x), model(x))
