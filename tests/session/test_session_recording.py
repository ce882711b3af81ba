"""``tide.recording()``: what a loss saves outside of the model is held like what the model saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from recorded_losses import LABELS, LOG_SOFTMAX, grads_of, run_recorded, sites_of
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo

pytestmark = pytest.mark.usefixtures("_nothing_is_left_on")

KIB = 1024


def _losses() -> dict[str, tuple[Callable[[Tensor], Tensor], dict[str, str]]]:
    """Losses, and how their saves are held with bounds."""
    target, teacher = torch.randn(64, 64), torch.randn(64, 64).softmax(-1)
    return {
        "cross entropy": (lambda y: F.cross_entropy(y, LABELS), {"log_softmax.result": "sz", "nll_loss.self": "shape"}),
        "smoothed": (
            lambda y: F.cross_entropy(y, LABELS, label_smoothing=0.1),
            {"log_softmax.result": "sz", "nll_loss.self": "shape"},
        ),
        "a module": (
            lambda y: nn.CrossEntropyLoss()(y, LABELS),
            {"log_softmax.result": "sz", "nll_loss.self": "shape"},
        ),
        "step by step": (
            lambda y: -y.log_softmax(-1)[torch.arange(64), LABELS].mean(),
            {"log_softmax.result": "sz"},
        ),
        "mean square": (lambda y: F.mse_loss(y, target), {"mse_loss.self": "sz"}),
        "by hand": (lambda y: (y - target).square().mean(), {"pow.self": "sz"}),
        "divergence": (lambda y: F.kl_div(y.log_softmax(-1), teacher), {"log_softmax.result": "sz"}),
        "a norm first": (
            lambda y: F.layer_norm(y, (64,)).exp().sum(),
            {"native_layer_norm.input": "sz", "exp.result": "sz"},
        ),
        "sigmoid": (lambda y: y.sigmoid().sum(), {"sigmoid.result": "sz"}),
    }


@pytest.mark.parametrize("place", ["inside", "after"])
@pytest.mark.parametrize("name", _losses())
@pytest.mark.filterwarnings("ignore:reduction")
def test_what_losses_save_is_held_under_bounds(mlp, x, name, place):
    """The last op, too, to which no later save leads; every promise is checked when backward asks for the tensor."""
    loss_of, expected = _losses()[name]
    model = mlp()
    tide = lowtide.attach(model, "fixed", check="full")
    with tide.recording():
        loss = loss_of(model(x))
        if place == "inside":
            loss.backward()
    found = sites_of(tide)
    assert {name: found.get(f"(model):{name}") for name in expected} == expected
    if place == "after":
        assert tide.ledger.held < tide.ledger.raw / 2
        loss.backward()
    del loss
    assert tide.ledger.held == tide.ledger.raw == 0
    tide.detach()


def test_where_backward_runs_changes_nothing(mlp, x):
    results = []
    for inside in (True, False):
        model = mlp()
        tide = lowtide.attach(model, "fixed", log_probability=0.5)
        run_recorded(tide, lambda model=model: F.cross_entropy(model(x), LABELS), backward_inside=inside)
        results.append(grads_of(model))
        tide.detach()
    plain = mlp()
    F.cross_entropy(plain(x), LABELS).backward()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not torch.equal(results[0][-1], plain[4].bias.grad), "the bound of the loss is wide enough to be noticed"


@pytest.mark.parametrize("name", _losses())
@pytest.mark.filterwarnings("ignore:reduction")
def test_exact_is_bit_equal(mlp, x, name, assert_same):
    loss_of = _losses()[name][0]
    plain, model = mlp(), mlp()
    loss_of(plain(x)).backward()
    tide = lowtide.attach(model, "exact", check=True)
    run_recorded(tide, lambda: loss_of(model(x)), backward_inside=False)
    assert_same(grads_of(plain), grads_of(model))
    tide.detach()


def test_without_it_the_loss_is_not_recorded(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    outside = F.cross_entropy(model(x), LABELS)
    raw = tide.ledger.raw
    assert LOG_SOFTMAX not in sites_of(tide)
    del outside
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
    assert tide.ledger.raw == raw + 16 * KIB + 64 * 8 + 4  # log-probabilities, labels, their total weight
    del loss
    tide.detach()


def test_targets_are_left_as_they_are(mlp, x):
    """Whoever computes the loss holds them: a payload beside them would only take more memory."""
    model, target = mlp(), torch.randn(64, 64)
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        loss = F.mse_loss(model(x), target)
    (entry,) = [entry for entry in tide.report().sites if "no gradient leads to it" in entry.name]
    assert (entry.codec, entry.held_nbytes) == ("kept", 16 * KIB)
    target.add_(1)
    with pytest.raises(lowtide.LowtideError, match="modified"):
        loss.backward()
    tide.detach()


def test_a_tiny_gpt_holds_less():
    """By the ledger, which counts what the loss saves only where it is recorded."""
    entry = zoo.describe("gpt2_small")
    inputs, target = entry.example(4, generator=torch.Generator().manual_seed(0), **{**entry.tiny, "vocab_size": 2000})
    torch.manual_seed(0)
    model = entry.build(**{**entry.tiny, "vocab_size": 2000})
    tide = lowtide.attach(model, "fixed", coder="rans")
    for _ in range(9):  # the coder has tables by then
        loss = entry.loss(model(inputs), target)
    alone = tide.ledger.raw, tide.ledger.held
    for _ in range(9):
        with tide.recording():
            loss = entry.loss(model(inputs), target)
    raw, held = tide.ledger.raw, tide.ledger.held
    log_probabilities = target.numel() * 2000 * 4
    assert raw >= alone[0] + log_probabilities
    assert held - alone[1] < log_probabilities / 3, "against all of it, had nobody compressed it"
    loss.backward()
    tide.detach()


def test_several_forwards_have_the_sites_of_one(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        losses = [F.cross_entropy(model(x), LABELS) for _ in range(3)]
    counts = {entry.name: entry.saves for entry in tide.report().sites if "log_softmax" in entry.name}
    assert counts == {LOG_SOFTMAX: 3}
    torch.stack(losses).sum().backward()
    tide.detach()


def test_forwards_before_and_losses_together(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        outputs = [model(x), model(x + 1)]
        loss = sum(F.cross_entropy(output, LABELS) for output in outputs)
    assert {LOG_SOFTMAX, f"{LOG_SOFTMAX}#1"} <= set(sites_of(tide))
    loss.backward()
    tide.detach()


def test_a_loss_of_a_forward_that_came_before(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    output = model(x)
    with tide.recording():
        loss = F.cross_entropy(output, LABELS)
    assert sites_of(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    tide.detach()


def test_the_outermost_of_nested_blocks_counts(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        with tide.recording():
            output = model(x)
        loss = F.cross_entropy(output, LABELS)  # the inner block has not ended the outer one
    assert sites_of(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    tide.detach()


def test_inside_of_a_forward_it_is_not_needed(x):
    """As models do that compute their loss themselves: it is recorded with or without the block."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tide = nn.Linear(64, 64), [None]

        def forward(self, x: Tensor) -> Tensor:
            if self.tide[0] is None:
                return F.cross_entropy(self.linear(x), LABELS)
            with self.tide[0].recording():
                output = self.linear(x)
            return F.cross_entropy(output, LABELS)

    model = WithLoss()
    tide = lowtide.attach(model, "fixed")
    for model.tide[0] in (None, tide):
        loss = model(x)
        assert sites_of(tide)[LOG_SOFTMAX] == "sz"
        assert tide.ledger.held < 16 * KIB
        loss.backward()
        del loss
    tide.detach()


def test_rules_that_name_what_the_loss_saves(mlp, x, recwarn):
    """Whether a rule has matched is judged when the loss is there."""
    model = mlp()
    tide = lowtide.attach(model, "fixed", rules=[lowtide.Rule(op="log_softmax", keep=True)])
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
    assert sites_of(tide)[LOG_SOFTMAX] == "kept" and not recwarn
    loss.backward()
    tide.detach()


@pytest.mark.parametrize("method", ["budget", "comet", "exact", "actnn", "gact", "cast"])
def test_methods_train_with_it(mlp, x, method):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    tide = lowtide.attach(model, method, optimizer=optimizer)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        with tide.recording():
            loss = F.cross_entropy(model(x), LABELS)
        loss.backward()
        tide.watch(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] and LOG_SOFTMAX in sites_of(tide)
    tide.detach()


def test_budget_has_a_rule_for_log_probabilities(mlp, x):
    """Its share of noise is not measured: the bound follows from the noise that is allowed."""
    bounds = []
    for noise in (0.01, 0.04):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        tide = lowtide.attach(model, noise=noise, optimizer=optimizer)
        for _ in range(4):
            with tide.recording():
                loss = F.cross_entropy(model(x), LABELS)
            loss.backward()
            optimizer.step()
        (entry,) = [entry for entry in tide.report().sites if entry.name == LOG_SOFTMAX]
        value, unit = entry.bound.split()
        bounds.append(float(value))
        assert unit == "probability"
        tide.detach()
    assert bounds[0] == pytest.approx(0.01 / 32, rel=0.2) and bounds[1] == pytest.approx(4 * bounds[0], rel=0.3)


def test_it_decorates_functions(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")

    @tide.recording()
    def loss_of(x: Tensor) -> Tensor:
        return F.cross_entropy(model(x), LABELS)

    for _ in range(2):
        loss_of(x).backward()
    assert {entry.name: entry.saves for entry in tide.report().sites}[LOG_SOFTMAX] == 2
    tide.detach()
