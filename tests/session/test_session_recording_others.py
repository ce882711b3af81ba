"""``tide.recording()`` among exceptions, threads, checkpoints, and hooks and modes of others: it leaves nothing on."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.nn.functional as F
from recorded_losses import LABELS, LOG_SOFTMAX, grads_of, hooks_left, run_recorded, sites_of
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import AttachError, LowtideWarning

pytestmark = pytest.mark.usefixtures("_nothing_is_left_on")


def test_each_thread_has_its_own(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        thread = threading.Thread(target=lambda: F.cross_entropy(model(x), LABELS))
        thread.start()
        thread.join()
        assert LOG_SOFTMAX not in sites_of(tide), "the block is this thread's"
        failures: list[BaseException] = []

        def record() -> None:
            try:
                with tide.recording():
                    F.cross_entropy(model(x), LABELS).backward()
                assert hooks_left() == (None, 0)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=record)
        thread.start()
        thread.join()
        assert not failures and LOG_SOFTMAX in sites_of(tide)
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
        assert hooks_left() == (None, 0)
    with tide.recording():
        if caught == "inside":
            with pytest.raises(type(error)):
                model(x)
        model[1].error = None
        loss = F.cross_entropy(model(x), LABELS)
    assert sites_of(tide)[LOG_SOFTMAX] == "sz"
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
    assert hooks_left() == (None, 0) and tide.ledger.held == 0
    tide.detach()


def test_running_out_of_memory_at_the_end(mlp, x, monkeypatch):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with pytest.raises(MemoryError), tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
        monkeypatch.setattr(tide._pipeline, "_store", lambda *_: (_ for _ in ()).throw(MemoryError()))
    assert hooks_left() == (None, 0)
    loss.backward()  # what was not coded is still there
    tide.detach()


def test_after_detach_it_does_nothing(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    tide.detach()
    with tide.recording():
        assert hooks_left() == (None, 0)
        F.cross_entropy(model(x), LABELS).backward()
    assert tide.ledger.raw_peak == 0


def test_detach_ends_it(mlp, x):
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
        tide.detach()
        assert hooks_left() == (None, 0)
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
    assert LOG_SOFTMAX in sites_of(tide)
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
    run_recorded(
        tide, lambda: F.cross_entropy(checkpoint(model, x, use_reentrant=False), LABELS), backward_inside=inside
    )
    assert sites_of(tide)[LOG_SOFTMAX] == "sz"
    torch.testing.assert_close(plain[0].weight.grad, model[0].weight.grad, rtol=1e-4, atol=1e-7)
    tide.detach()


@pytest.mark.parametrize("inside", [True, False])
def test_with_modules_that_are_run_again(mlp, x, inside, assert_same):
    plain, model = nn.Sequential(mlp(), mlp()), nn.Sequential(mlp(), mlp())
    F.cross_entropy(plain(x), LABELS).backward()
    tide = lowtide.attach(model, "exact", recompute=True)
    run_recorded(tide, lambda: F.cross_entropy(model(x), LABELS), backward_inside=inside)
    assert {LOG_SOFTMAX, "1:recompute.input"} <= set(sites_of(tide))
    assert_same(grads_of(plain), grads_of(model))
    tide.detach()


def test_other_hooks_in_it(mlp, x):
    """As with ``attach`` alone: theirs apply outside of the model, ours inside of it, and one warning says so."""
    model = mlp()
    tide = lowtide.attach(model, "fixed")
    with tide.recording(), save_on_cpu():
        with pytest.warns(LowtideWarning, match="other saved-tensor hooks"):
            output = model(x)
        loss = F.cross_entropy(output, LABELS)
    assert "1:tanh.result" in sites_of(tide) and LOG_SOFTMAX not in sites_of(tide)
    loss.backward()
    tide.detach()


def test_two_sessions(mlp, x):
    """Each model has its own saves; the loss belongs to the innermost block."""
    first, second = mlp(), mlp()
    tides = lowtide.attach(first, "fixed"), lowtide.attach(second, "fixed")
    with pytest.warns(LowtideWarning, match="other saved-tensor hooks"), tides[0].recording(), tides[1].recording():
        loss = F.cross_entropy(second(first(x)), LABELS)
    assert ["1:tanh.result" in sites_of(tide) for tide in tides] == [True, True]
    assert [LOG_SOFTMAX in sites_of(tide) for tide in tides] == [False, True]
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
    assert sites_of(tide)[LOG_SOFTMAX] == "sz"
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


class _Interrupted(nn.Module):
    """Interrupted in its first run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.runs = nn.Linear(64, 64), nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.runs == 1:
            raise KeyboardInterrupt
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize("wrapped", [False, True], ids=["outermost", "inside"])
def test_a_recomputed_module_that_was_interrupted_is_run_again_for_the_next_batch(x, wrapped, assert_same):
    """Its region must not take in what the next forward saves: that would be run again with the first batch."""

    class Patient(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.inner(x)
            except KeyboardInterrupt:
                return self.inner(x + 1)

    torch.manual_seed(0)
    module = _Interrupted()
    model = nn.Sequential(nn.Linear(64, 64), Patient(module) if wrapped else module, nn.Linear(64, 64))
    module.runs = 1
    expected_of = model[2](module(model[0](x) + 1)) if wrapped else model(x + 1)
    expected_of.sum().backward()
    expected = [gradient.clone() for gradient in grads_of(model)]
    model.zero_grad()
    module.runs = 0
    tide = lowtide.attach(model, "exact", recompute="1.inner" if wrapped else "1", min_size=1024)
    with tide.recording():
        if wrapped:
            loss = model(x).sum()
        else:
            with pytest.raises(KeyboardInterrupt):
                model(x)
            loss = model(x + 1).sum()
    loss.backward()
    assert_same(grads_of(model), expected)
    tide.detach()


def test_modes_of_others_that_are_on_while_the_model_runs_are_left_as_they_are(mlp, x):
    """One that a user's hooks put on and take off: the block's own is below it again, not on top."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, mode = mlp(), Mode()
    tide = lowtide.attach(model, "fixed")
    model.register_forward_pre_hook(lambda *_: mode.__enter__() and None)
    model.register_forward_hook(lambda *_: mode.__exit__(None, None, None))
    with tide.recording():
        loss = F.cross_entropy(model(x), LABELS)
    assert hooks_left() == (None, 0) and sites_of(tide)[LOG_SOFTMAX] == "sz"
    loss.backward()
    tide.detach()


def test_a_block_that_is_left_in_another_thread_ends_no_other(mlp, x):
    """A generator that holds one is closed wherever it is collected."""
    model, seen = mlp(), []
    tide = lowtide.attach(model, "fixed")

    def recorded():
        with tide.recording():
            yield F.cross_entropy(model(x), LABELS)

    generator = recorded()
    next(generator)

    def close() -> None:
        with tide.recording():
            before = hooks_left()
            generator.close()
            seen.append(hooks_left() == before)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert seen == [True]
    tide.detach()
    assert hooks_left() == (None, 0), "it ends with the session in its own thread"
