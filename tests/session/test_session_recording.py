"""``tide.recording()``: what a loss saves outside of the model is held like what the model saves."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.app import zoo
from lowtide.errors import AttachError, LowtideWarning

KIB = 1024
LABELS = torch.arange(64)
LOG_SOFTMAX = "(model):log_softmax.result"


def _hooks_left() -> tuple[object, int]:
    return torch._C._autograd._top_saved_tensors_default_hooks(False), torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def _nothing_is_left_on():
    yield
    assert _hooks_left() == (None, 0)


def _sites(session: lowtide.Session) -> dict[str, str]:
    return {entry.name: entry.codec for entry in session.report().sites}


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
    found = _sites(tide)
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
        with tide.recording():
            loss = F.cross_entropy(model(x), LABELS)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
        tide.detach()
    plain = mlp()
    F.cross_entropy(plain(x), LABELS).backward()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert not torch.equal(results[0][-1], plain[4].bias.grad), "the bound of the loss is wide enough to be noticed"


@pytest.mark.parametrize("name", _losses())
@pytest.mark.filterwarnings("ignore:reduction")
def test_exact_is_bit_equal(mlp, x, name):
    loss_of = _losses()[name][0]
    plain, model = mlp(), mlp()
    loss_of(plain(x)).backward()
    tide = lowtide.attach(model, "exact", check=True)
    with tide.recording():
        loss = loss_of(model(x))
    loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    tide.detach()


def test_without_it_the_loss_is_not_recorded(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    outside = F.cross_entropy(model(x), LABELS)
    raw = tide.ledger.raw
    assert LOG_SOFTMAX not in _sites(tide)
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
    assert {LOG_SOFTMAX, f"{LOG_SOFTMAX}#1"} <= set(_sites(tide))
    loss.backward()
    tide.detach()


def test_a_loss_of_a_forward_that_came_before(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    output = model(x)
    with tide.recording():
        loss = F.cross_entropy(output, LABELS)
    assert _sites(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    tide.detach()


def test_the_outermost_of_nested_blocks_counts(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        with tide.recording():
            output = model(x)
        loss = F.cross_entropy(output, LABELS)  # the inner block has not ended the outer one
    assert _sites(tide)[LOG_SOFTMAX] == "sz"
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
        assert _sites(tide)[LOG_SOFTMAX] == "sz"
        assert tide.ledger.held < 16 * KIB
        loss.backward()
        del loss
    tide.detach()


def test_each_thread_has_its_own(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        thread = threading.Thread(target=lambda: F.cross_entropy(model(x), LABELS))
        thread.start()
        thread.join()
        assert LOG_SOFTMAX not in _sites(tide), "the block is this thread's"
        failures: list[BaseException] = []

        def record() -> None:
            try:
                with tide.recording():
                    F.cross_entropy(model(x), LABELS).backward()
                assert _hooks_left() == (None, 0)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
        assert not failures and LOG_SOFTMAX in _sites(tide)
        loss = F.cross_entropy(model(x), LABELS)
    loss.backward()
    del loss
    assert tide.ledger.held == 0
    tide.detach()


class _Failing(nn.Module):
    """Raises what it is given, in the middle of a model."""

    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        if self.error is not None:
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("caught", ["outside", "inside"])
def test_exceptions_leave_nothing(error, caught, x):
    model = nn.Sequential(nn.Linear(64, 64), _Failing(), nn.Linear(64, 64))
    tide = lowtide.attach(model, "fixed")
    model[1].error = error
    if caught == "outside":
        with pytest.raises(type(error)), tide.recording():
            model(x)
        assert _hooks_left() == (None, 0)
    with tide.recording():
        if caught == "inside":
            with pytest.raises(type(error)):
                model(x)
        model[1].error = None
        loss = F.cross_entropy(model(x), LABELS)
    assert _sites(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    error.__traceback__ = None
    del loss
    gc.collect()
    assert tide.ledger.held == tide.ledger.raw == 0
    tide.detach()


def test_a_loss_that_raises(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with pytest.raises(IndexError), tide.recording():
        F.cross_entropy(model(x), LABELS + 1)
    gc.collect()
    assert _hooks_left() == (None, 0) and tide.ledger.held == 0
    tide.detach()


def test_running_out_of_memory_at_the_end(mlp, x, monkeypatch):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with pytest.raises(MemoryError), tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
        monkeypatch.setattr(tide._pipeline, "_store", lambda *_: (_ for _ in ()).throw(MemoryError()))
    assert _hooks_left() == (None, 0)
    loss.backward()  # what was not coded is still there
    tide.detach()


def test_after_detach_it_does_nothing(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    tide.detach()
    with tide.recording():
        assert _hooks_left() == (None, 0)
        F.cross_entropy(model(x), LABELS).backward()
    assert tide.ledger.raw_peak == 0


def test_detach_ends_it(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
        tide.detach()
        assert _hooks_left() == (None, 0)
        raw = tide.ledger.raw
        other = F.cross_entropy(model(x), LABELS)
        assert tide.ledger.raw == raw
    (loss + other).backward()


def test_it_is_refused_where_hooks_are_forbidden(mlp, x):
    model = mlp()
    tide = lowtide.attach(model)

    def inside(x: Tensor) -> Tensor:
        with tide.recording():
            return x.square().sum()

    with pytest.raises(AttachError, match=r"torch\.func transform"):
        torch.func.grad(inside)(x)
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        inside(x)
    with tide.recording():  # and nothing has been left behind
        F.cross_entropy(model(x), LABELS).backward()
    assert LOG_SOFTMAX in _sites(tide)
    tide.detach()


def test_a_checkpoint_around_it_sees_all_saves(mlp, x):
    plain, model = mlp(), mlp()
    tide = lowtide.attach(model, "fixed")

    def run(model: nn.Module, x: Tensor) -> Tensor:
        with tide.recording():
            return F.cross_entropy(model(x), LABELS)

    checkpoint(run, model, x, use_reentrant=False).backward()
    assert tide.ledger.raw_peak == 0
    F.cross_entropy(plain(x), LABELS).backward()
    assert torch.equal(plain[0].weight.grad, model[0].weight.grad)
    tide.detach()


@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_in_it(mlp, x, inside):
    """Run again in backward, which may be inside of the block."""
    plain, model = mlp(), mlp()
    F.cross_entropy(plain(x), LABELS).backward()
    tide = lowtide.attach(model, "fixed", log_probability=1e-6)
    with tide.recording():
        loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), LABELS)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert _sites(tide)[LOG_SOFTMAX] == "sz"
    torch.testing.assert_close(plain[0].weight.grad, model[0].weight.grad, rtol=1e-4, atol=1e-7)
    tide.detach()


@pytest.mark.parametrize("inside", [True, False])
def test_with_modules_that_are_run_again(mlp, x, inside):
    plain, model = nn.Sequential(mlp(), mlp()), nn.Sequential(mlp(), mlp())
    F.cross_entropy(plain(x), LABELS).backward()
    tide = lowtide.attach(model, "exact", recompute=True)
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert {LOG_SOFTMAX, "1:recompute.input"} <= set(_sites(tide))
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    tide.detach()


def test_other_hooks_in_it(mlp, x):
    """As with ``attach`` alone: theirs apply outside of the model, ours inside of it, and one warning says so."""
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording(), save_on_cpu():
        with pytest.warns(LowtideWarning, match="other saved-tensor hooks"):
            output = model(x)
        loss = F.cross_entropy(output, LABELS)
    assert "1:tanh.result" in _sites(tide) and LOG_SOFTMAX not in _sites(tide)
    loss.backward()
    tide.detach()


def test_two_sessions(mlp, x):
    """Each model has its own saves; the loss belongs to the innermost block."""
    first, second = mlp(), mlp()
    tides = lowtide.attach(first, "fixed"), lowtide.attach(second, "fixed")
    with pytest.warns(LowtideWarning, match="other saved-tensor hooks"), tides[0].recording(), tides[1].recording():
        loss = F.cross_entropy(second(first(x)), LABELS)
    assert ["1:tanh.result" in _sites(tide) for tide in tides] == [True, True]
    assert [LOG_SOFTMAX in _sites(tide) for tide in tides] == [False, True]
    loss.backward()
    for tide in tides:
        tide.detach()


class _Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ["around", "inside"])
def test_function_modes_of_others_stay_on(mlp, x, order):
    model, mode = mlp(), _Counting()
    tide = lowtide.attach(model, "fixed")
    blocks = (mode, tide.recording()) if order == "around" else (tide.recording(), mode)
    with blocks[0], blocks[1]:
        loss = F.cross_entropy(model(x), LABELS)
    assert {F.tanh, torch.tanh} & set(mode.seen) and F.cross_entropy in mode.seen
    assert _sites(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    tide.detach()


def test_ops_of_the_model_are_not_watched(mlp, x, monkeypatch):
    """The mode would cost time for each of them."""
    seen: list[object] = []
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    watched = lowtide.capture.outputs.Watch.__torch_function__

    def watch(self, func, types, args=(), kwargs=None):
        seen.append(func)
        return watched(self, func, types, args, kwargs)

    monkeypatch.setattr(lowtide.capture.outputs.Watch, "__torch_function__", watch)
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
    loss.backward()
    assert seen == [F.cross_entropy], "nor are our own"
    tide.detach()


def test_rules_that_name_what_the_loss_saves(mlp, x, recwarn):
    """Whether a rule has matched is judged when the loss is there."""
    model = mlp()
    tide = lowtide.attach(model, "fixed", rules=[lowtide.Rule(op="log_softmax", keep=True)])
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
    assert _sites(tide)[LOG_SOFTMAX] == "kept" and not recwarn
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
    assert losses[-1] < losses[0] and LOG_SOFTMAX in _sites(tide)
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
        bounds.append(float(entry.bound.split()[0]))
        tide.detach()
    assert bounds[0] == pytest.approx(0.02, rel=0.2) and bounds[1] == pytest.approx(2 * bounds[0], rel=0.3)


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
