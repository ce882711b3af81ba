"""A forward or backward that fails leaves no hooks, holds no memory, and the next step is as if nothing had been."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import lowtide
from lowtide.codecs.bitmask import BitMask
from lowtide.codecs.sz import Sz


def _top():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


class _Fails(nn.Module):
    """Raises what it is told to, once."""

    error: BaseException | None = None

    def forward(self, x):
        error, self.error = self.error, None
        if error is not None:
            raise error
        return x


@pytest.fixture
def fragile(mlp):
    """A model that fails behind its fourth layer, and what it is when nothing fails."""

    def make() -> nn.Sequential:
        return nn.Sequential(*list(mlp())[:4], _Fails(), nn.Linear(64, 64))

    return make


def _fail(model: nn.Sequential, x: torch.Tensor, error: BaseException) -> None:
    """In a function of its own, so that no traceback holds the frames of the forward afterwards."""
    model[4].error = error
    with pytest.raises(type(error)):
        model(x)
    error.__traceback__ = None


@pytest.fixture
def same_step(fragile, x, gradients, assert_same):
    """Checks that an attached model's next step is bit-equal to that of a plain one, and that nothing is held."""

    def check(model: nn.Sequential, session: lowtide.Session) -> None:
        torch.manual_seed(0)
        plain = fragile()
        plain.load_state_dict(model.state_dict())
        assert_same(gradients(plain, x), gradients(model, x))
        assert session.ledger.held == session.ledger.raw == 0
        assert session.ledger.raw_peak > 0

    return check


def test_an_exception_in_a_submodule(fragile, x, same_step):
    model = fragile()
    session = lowtide.attach(model, "exact")
    _fail(model, x, ValueError("no"))
    assert _top() is None
    gc.collect()
    assert session.ledger.held == 0
    same_step(model, session)


@pytest.mark.parametrize("where", ["root", "part"])
def test_an_exception_in_a_hook_that_runs_before_ours(fragile, x, same_step, where):
    """Our exit hook is called although our entry hook never was."""
    model = fragile()
    session = lowtide.attach(model, "exact")
    victim = model if where == "root" else model[2]

    def refuse(module, inputs):
        raise ValueError("no")

    handle = victim.register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="no"):
        model(x)
    assert _top() is None
    handle.remove()
    same_step(model, session)


def test_an_exception_in_a_hook_after_forward(fragile, x, same_step):
    model = fragile()
    session = lowtide.attach(model, "exact")

    def refuse(module, inputs, output):
        raise ValueError("no")

    handle = model[2].register_forward_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        model(x)
    assert _top() is None
    handle.remove()
    same_step(model, session)


def test_an_exception_in_backward(fragile, x, same_step):
    model = fragile()
    session = lowtide.attach(model, "exact")
    seen = []
    handle = model[2].register_forward_hook(lambda module, inputs, output: seen.append(output.register_hook(_refuse)))
    loss = model(x).square().sum()
    with pytest.raises(ValueError, match="no"):
        loss.backward()
    handle.remove()
    seen.clear()
    del loss
    gc.collect()
    same_step(model, session)


def _refuse(gradient):
    raise ValueError("no")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), GeneratorExit()], ids=lambda e: type(e).__name__)
def test_an_interrupt_in_forward(fragile, x, same_step, error):
    """torch calls no exit hook for what is no Exception: the next save anywhere finds the forward's frames dead."""
    model = fragile()
    session = lowtide.attach(model, "exact")
    _fail(model, x, error)
    other = torch.randn(8, 8, requires_grad=True).tanh()
    assert _top() is None
    gc.collect()
    assert session.ledger.held == session.ledger.raw == 0
    other.sum().backward()
    same_step(model, session)


@pytest.mark.parametrize("levels", range(10))
def test_an_interrupt_and_then_a_save_from_as_deep(fragile, x, levels):
    """Frames are looked for where they were found before: what runs there now is not the module."""

    def save(levels):
        return save(levels - 1) if levels else torch.randn(8, 8, requires_grad=True).tanh()

    model = fragile()
    session = lowtide.attach(model, "exact")
    for _ in range(2):
        model(x).sum().backward()
    _fail(model, x, KeyboardInterrupt())
    save(levels)
    assert _top() is None
    gc.collect()
    assert session.ledger.held == session.ledger.raw == 0


def test_an_interrupt_and_then_the_next_forward(fragile, x, same_step):
    model = fragile()
    session = lowtide.attach(model, "exact")
    _fail(model, x, KeyboardInterrupt())
    same_step(model, session)
    assert _top() is None


def test_an_interrupt_and_then_an_evaluation(fragile, x, same_step):
    model = fragile()
    session = lowtide.attach(model, "exact")
    _fail(model, x, KeyboardInterrupt())
    with torch.no_grad():
        model(x)
    assert _top() is None
    gc.collect()
    assert session.ledger.held == 0
    same_step(model, session)


def test_an_interrupt_and_then_other_hooks(fragile, x, gradients, assert_same):
    """The hooks that are taken off must be ours, and not those that somebody pushed in the meantime."""
    model = fragile()
    expected = gradients(model, x)
    lowtide.attach(model, "exact")
    _fail(model, x, KeyboardInterrupt())
    with save_on_cpu(), pytest.warns(lowtide.LowtideWarning, match="other saved-tensor hooks"):
        mine = _top()
        assert_same(expected, gradients(model, x))
        assert _top() == mine
    assert _top() is None


def test_an_interrupt_in_a_part_that_the_model_catches(x, gradients, assert_same):
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.fails = nn.Linear(64, 64), _Fails()

        def forward(self, x):
            y = self.linear(x).tanh()
            with contextlib.suppress(KeyboardInterrupt):
                self.fails(y.sigmoid())
            return y.relu() * self.linear(y)

    model = Careful()
    expected = gradients(model, x)
    session = lowtide.attach(model, "exact")
    model.fails.error = KeyboardInterrupt()
    assert_same(expected, gradients(model, x))
    names = {entry.name for entry in session.report().sites}
    assert "(model):relu.result" in names  # and not fails:relu.result
    gc.collect()  # the exception and the frame that made it hold each other
    assert session.ledger.held == session.ledger.raw == 0


def test_an_exception_in_a_block(fragile, x, same_step):
    model = fragile()
    for error in (ValueError("no"), KeyboardInterrupt()):
        model[4].error = error
        with pytest.raises(type(error)), lowtide.compress(model, "exact") as session:
            model(x)
        error.__traceback__ = None
        assert _top() is None
        assert not model._forward_hooks
    gc.collect()
    assert session.ledger.held == 0


@pytest.mark.parametrize("last", [False, True], ids=["in the middle", "at the end"])
def test_running_out_of_memory_while_coding(mlp, x, monkeypatch, last):
    """A codec may fail in a pack hook, or in the exit hook, where the last saves are coded."""
    model = nn.Sequential(mlp(), nn.ReLU() if last else nn.Linear(64, 64))
    session = lowtide.attach(model)

    def fail(self, x, bound=None, **options):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(BitMask if last else Sz, "encode", fail)
        with pytest.raises(MemoryError):
            model(x)
    assert _top() is None
    model(x).sum().backward()
    gc.collect()
    assert session.ledger.held == session.ledger.raw == 0


def test_a_warning_turned_into_an_error_leaves_no_hooks(mlp):
    model = mlp()
    with pytest.raises(lowtide.LowtideWarning), save_on_cpu(), lowtide.compress(model):
        pass
    assert not model._forward_hooks
