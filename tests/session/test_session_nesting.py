"""Blocks: what they cover, and what happens when they meet other hooks, other sessions, and each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu

import lowtide
from lowtide.errors import AttachError, UnknownNameError

KIB = 1024
NESTED = "other saved-tensor hooks"


def test_a_block_is_bit_equal_and_leaves_no_hooks(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    with lowtide.compress(model, "exact") as session:
        assert_same(expected, gradients(model, x))
    assert session.ledger.raw_peak > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert_same(expected, gradients(model, x))


def test_backward_may_come_after_the_block(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    model.zero_grad()
    with lowtide.compress(model, "exact") as session:
        loss = model(x).square().sum()
    assert session.ledger.held > 0
    loss.backward()
    assert_same(expected, [parameter.grad for parameter in model.parameters()])
    assert session.ledger.held == session.ledger.raw == 0


def test_a_loss_outside_the_model_is_covered(mlp, x):
    model, target = mlp(), torch.arange(64)
    attached = lowtide.attach(model, "exact")
    F.cross_entropy(model(x), target).backward()
    attached.detach()
    with lowtide.compress(model, "exact") as session:
        F.cross_entropy(model(x), target).backward()
    loss = 16 * KIB + 64 * 8 + 4  # log-probabilities, targets, their total weight
    assert session.ledger.raw_peak == attached.ledger.raw_peak + loss


def test_a_block_without_a_model_covers_everything(x):
    weight = torch.randn(64, 64, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ weight).tanh().relu().sum(), weight)
    with lowtide.compress(method="exact") as session:
        (got,) = torch.autograd.grad((x @ weight).tanh().relu().sum(), weight)
    assert torch.equal(expected, got)
    assert session.ledger.raw_peak == 3 * 16 * KIB  # x, tanh, relu


def test_options_of_a_block_are_checked(mlp):
    with pytest.raises(UnknownNameError, match="unknown method 'none'"), lowtide.compress(mlp(), "none"):
        pass


def test_two_blocks_one_after_the_other(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    for _ in range(2):
        with lowtide.compress(model, "exact"):
            assert_same(expected, gradients(model, x))


def test_a_block_around_an_attached_model_is_refused(mlp):
    model = mlp()
    lowtide.attach(model)
    with pytest.raises(AttachError, match="attached already"), lowtide.compress(model):
        pass


def test_a_block_inside_a_block_of_the_same_model_is_refused(mlp):
    model = mlp()
    with lowtide.compress(model), pytest.raises(AttachError, match="attached already"), lowtide.compress(model):
        pass


def test_the_inner_of_two_blocks_wins_and_says_so(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    with lowtide.compress(None, "exact") as outer:
        with pytest.warns(lowtide.LowtideWarning, match=NESTED) as caught, lowtide.compress(model, "exact") as inner:
            assert_same(expected, gradients(model, x))
        counted = outer.ledger.raw_peak
        torch.randn(64, 64, requires_grad=True).tanh().sum().backward()
    assert len(caught) == 1
    assert inner.ledger.raw_peak > 0
    assert counted == 0
    assert outer.ledger.raw_peak == 16 * KIB  # the outer block is back when the inner one ends


def test_an_attached_model_inside_a_block_warns_once(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    session = lowtide.attach(model, "exact")
    with lowtide.compress(None, "exact"), pytest.warns(lowtide.LowtideWarning, match=NESTED) as caught:
        for _ in range(3):
            assert_same(expected, gradients(model, x))
    assert len(caught) == 1
    assert session.ledger.raw_peak == 2 * 16 * KIB


def test_two_attached_models_do_not_meet(mlp, x):
    """One after the other in the same graph; each has its own session and its own ledger."""
    first, second = mlp(), mlp()
    plain = torch.autograd.grad(second(first(x)).sum(), list(first.parameters()))
    sessions = lowtide.attach(first, "exact"), lowtide.attach(second, "exact")
    coded = torch.autograd.grad(second(first(x)).sum(), list(first.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))
    assert [session.ledger.raw_peak for session in sessions] == [2 * 16 * KIB, 3 * 16 * KIB]  # and its input
    assert [session.ledger.raw for session in sessions] == [0, 0]


def test_an_attached_model_inside_another(x):
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.hidden = nn.Linear(64, 64), [inner]  # in a list: no submodule

        def forward(self, x):
            return self.linear(self.hidden[0](x.sigmoid() * self.linear.weight)).tanh()

    outer = Outer()
    parameters = [*outer.parameters(), *inner.parameters()]
    plain = torch.autograd.grad(outer(x).sum(), parameters)
    sessions = lowtide.attach(outer, "exact"), lowtide.attach(inner, "exact")
    with pytest.warns(lowtide.LowtideWarning, match=NESTED):
        coded = torch.autograd.grad(outer(x).sum(), parameters)
    assert all(torch.equal(one, other) for one, other in zip(plain, coded, strict=True))
    assert all(session.ledger.raw_peak > 0 and session.ledger.raw == 0 for session in sessions)


def test_attaching_inside_save_on_cpu(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    with save_on_cpu():
        session = lowtide.attach(model, "exact")
        with pytest.warns(lowtide.LowtideWarning, match=NESTED):
            assert_same(expected, gradients(model, x))
    assert_same(expected, gradients(model, x))
    assert session.ledger.raw_peak > 0


def test_save_on_cpu_inside_a_block(mlp, x, gradients, assert_same):
    """The other way round, theirs win: nothing is counted, and nothing is wrong."""
    model = mlp()
    expected = gradients(model, x)
    with lowtide.compress(None, "exact") as session, save_on_cpu():
        assert_same(expected, gradients(model, x))
    assert session.ledger.raw_peak == 0


def test_transforms_of_torch_func_inside_a_block(mlp, x):
    """A block has its hooks on all the time, so the transform refuses, and says who is in the way."""
    model = mlp()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loss = lambda weights: torch.func.functional_call(model, weights, (x,)).sum()  # noqa: E731
    with lowtide.compress(model), pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(loss)(weights)


def test_disabled_hooks_stay_disabled(mlp, x):
    """Who forbids hooks hears about ours at the first forward."""
    model = mlp()
    lowtide.attach(model)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        model(x)
    model(x).sum().backward()
