"""Steps: who counts them, and what many forwards, accumulated gradients and threads make of them."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn

import lowtide

KIB = 1024


def _train(model, optimizer, batches) -> None:
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_optimizer_counts_steps(mlp, x, kind):
    model = mlp()
    optimizer = kind(model.parameters(), lr=1e-3)
    session = lowtide.attach(model, optimizer=optimizer)
    _train(model, optimizer, (x + shift for shift in range(3)))
    assert session.report().totals["step"] == session.ledger.step == session.state_dict()["step"] == 3


def test_the_session_need_not_be_kept(mlp, x):
    """``lowtide.attach(model, optimizer=optimizer)`` as a statement of its own goes on counting."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    ledger = lowtide.attach(model, optimizer=optimizer).ledger
    _train(model, optimizer, [x, x])
    assert ledger.step == 2


def test_steps_by_hand(mlp, x):
    model = mlp()
    session = lowtide.attach(model)
    for number in range(3):
        assert session.ledger.step == number
        model(x).sum().backward()
        session.step()
    assert session.state_dict()["step"] == 3


def test_a_closure_is_one_step(mlp, x):
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    session = lowtide.attach(model, "exact", optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert session.ledger.step == 1


def test_after_detach_steps_are_not_counted(mlp, x):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = lowtide.attach(model, optimizer=optimizer)
    session.detach()
    _train(model, optimizer, [x])
    assert session.ledger.step == 0


@pytest.mark.parametrize("method", ["exact", "fixed"])
def test_training_is_close_or_equal_to_plain(mlp, x, method):
    def run(attached: bool) -> torch.Tensor:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached:
            lowtide.attach(model, method, optimizer=optimizer, check="full")
        _train(model, optimizer, (x + shift / 8 for shift in range(5)))
        return model(x).square().mean().detach()

    plain, coded = run(False), run(True)
    if method == "exact":
        assert torch.equal(plain, coded)
    else:
        assert 0 < abs(coded - plain) < 0.02 * plain


def test_accumulated_gradients(mlp, x, assert_same):
    """Several forwards before one step; each backward frees its own."""

    def run(model):
        for shift in range(3):
            model(x + shift).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    expected, model = run(mlp()), mlp()
    session = lowtide.attach(model, "exact")
    assert_same(expected, run(model))
    assert session.ledger.raw_peak == 2 * 16 * KIB
    assert [entry.saves for entry in session.report().sites if entry.name == "1:tanh.result"] == [3]


def test_several_forwards_before_one_backward(mlp, x, assert_same):
    def run(model):
        sum(model(x + shift).square().mean() for shift in range(3)).backward()
        return [parameter.grad for parameter in model.parameters()]

    expected, model = run(mlp()), mlp()
    session = lowtide.attach(model, "exact")
    assert_same(expected, run(model))
    assert session.ledger.raw_peak == 3 * 2 * 16 * KIB
    assert session.ledger.held == 0


def test_each_step_and_each_repeat_has_its_own_dither(mlp, x):
    """The same tensor at the same site is coded with other offsets each time, or errors would add up."""
    model = mlp()
    session = lowtide.attach(model)

    def saved():
        output = model(x)
        return output.grad_fn._saved_mat1

    first, repeat = saved(), saved()
    session.step()
    later = saved()
    assert not torch.equal(first, repeat)
    assert not torch.equal(first, later)
    again = mlp()
    lowtide.attach(again)
    assert torch.equal(again(x).grad_fn._saved_mat1, first)  # and a new session repeats the old one


def test_a_seed_changes_the_dither_and_nothing_else(mlp, x):
    decoded = []
    for seed in (0, 0, 1):
        model = mlp()
        lowtide.attach(model, seed=seed)
        decoded.append(model(x).grad_fn._saved_mat1)
    assert torch.equal(decoded[0], decoded[1])
    assert not torch.equal(decoded[0], decoded[2])


def test_two_threads_at_once(mlp, x, gradients, assert_same):
    """Each thread runs its own forward and backward through the one attached model."""
    model = mlp()
    parameters = list(model.parameters())
    expected = [torch.autograd.grad(model(x * scale).square().sum(), parameters) for scale in (1, 2)]
    session = lowtide.attach(model, "exact")
    failures = []

    def work(scale: int) -> None:
        try:
            for _ in range(10):
                got = torch.autograd.grad(model(x * scale).square().sum(), parameters)
                assert_same(list(expected[scale - 1]), list(got))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert session.ledger.held == session.ledger.raw == 0


def test_a_graph_from_another_thread_does_not_hide_ours(x):
    """Nodes are numbered per thread: an input made in one thread may carry the numbers of the next one's nodes."""
    front, model = nn.Sequential(*(nn.Tanh() for _ in range(20))), nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    session = lowtide.attach(model, "exact")
    outputs = [x.clone().requires_grad_()]
    for stage in (front, model):
        thread = threading.Thread(target=lambda stage=stage: outputs.append(stage(outputs[-1])))
        thread.start()
        thread.join()
    assert sorted(entry.name for entry in session.report().sites) == ["0:addmm.mat1", "1:tanh.result"]


@pytest.mark.parametrize("forwards", [1, 3])
def test_compressed_nothing_is_said_once(forwards):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(8, 8)
    session = lowtide.attach(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(forwards):
            model(x).sum().backward()
            session.step()
    assert [warning.category for warning in caught] == [lowtide.LowtideWarning]
    message = str(caught[0].message)
    assert "compressed none of them (smaller than min_size). See session.report()" in message


def test_compressed_nothing_is_not_said_where_nothing_was_asked(x):
    """The exact method may find nothing to do; a model may save nothing; and a first idle forward is not the rule."""
    lowtide.attach(exact := nn.Sequential(nn.Linear(64, 64), nn.Tanh()), "exact")
    exact(x).sum().backward()
    lowtide.attach(silent := nn.Flatten())
    silent(x.clone().requires_grad_()).sum().backward()


def test_compressed_nothing_is_said_of_inputs_and_weights_too(x):
    model = nn.Linear(64, 64)
    lowtide.attach(model)
    with pytest.warns(lowtide.LowtideWarning, match="all are parameters, buffers or inputs"):
        model(x)
