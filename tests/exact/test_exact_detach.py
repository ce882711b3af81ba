"""Attaching leaves nothing behind: not on the modules, not in the state, not in what a model computes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from networks import PICTURES, problem
from sequences import SEQUENCES, WIDTH
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from train import Problem, assert_bit_equal, assert_exact, attached, train

import lowtide
from lowtide import Session
from lowtide.app import zoo
from lowtide.codecs.bitmask import BitMask

HOOKS = [name for name in vars(nn.Module()) if "hooks" in name]
PICTURE = (4, 3, 12, 12)


def hooks_on(model: nn.Module) -> list[str]:
    """Every hook on every module, by module and kind."""
    return [
        f"{path}.{kind}" for path, module in model.named_modules() for kind in HOOKS if len(getattr(module, kind) or ())
    ]


def make(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor], zoo.ZooEntry]:
    entry = zoo.describe(name)
    torch.manual_seed(5)
    return entry.build(**entry.tiny), entry.example(3, **entry.tiny), entry


@pytest.mark.parametrize("name", zoo.names())
def test_a_model_is_the_same_attached_and_detached(name: str) -> None:
    """The same text, state and output (dropout drawn from the same seed), before, during and after."""
    plain, (inputs, _), _ = make(name)
    model, *_ = make(name)
    session = lowtide.attach(model, "exact", min_size=64, check=True)
    assert {"._forward_hooks", "._forward_pre_hooks"} <= set(hooks_on(model)), "the helper must see what it looks for"
    for stage in ("attached", "detached"):
        torch.manual_seed(6)
        expected = plain(inputs)
        torch.manual_seed(6)
        assert_bit_equal({"output": model(inputs)}, {"output": expected})
        assert_bit_equal(model.state_dict(), plain.state_dict())
        assert repr(model) == repr(plain)
        session.detach()
        assert hooks_on(model) == hooks_on(plain) == [], stage
        assert vars(model).keys() == vars(plain).keys()


@contextmanager
def attached_for_two_steps(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    """Detaches in the middle of training, at the second step of the optimizer."""
    session = lowtide.attach(model, "exact", optimizer=optimizer, min_size=64, check=True)
    steps = iter(range(10))

    def leave(*_: object) -> None:
        if next(steps) == 1:
            session.detach()
            session.ledger.sites.clear()

    handle = optimizer.register_step_post_hook(leave)
    yield session
    handle.remove()
    assert not session.ledger.sites, "saves were recorded after detach"
    assert session.ledger.step == 2
    assert hooks_on(model) == []


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["in-place ReLU after batch norm", "functional calls only", "frozen layers"])
def test_training_goes_on_after_detach(name: str, bf16: bool) -> None:
    assert_exact(problem(PICTURES[name][0], *PICTURE, bf16=bf16), attached_for_two_steps)


@contextmanager
def attached_anew_each_step(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    sessions = [lowtide.attach(model, "exact", min_size=64, check=True)]

    def renew(*_: object) -> None:
        sessions[-1].detach()
        sessions.append(lowtide.attach(model, "exact", min_size=64, check=True))

    handle = optimizer.register_step_post_hook(renew)
    yield sessions[0]
    handle.remove()
    sessions[-1].detach()
    assert len(sessions) > 3 and hooks_on(model) == []


def test_attaching_anew_each_step() -> None:
    build, coded = PICTURES["functional calls only"]
    assert_exact(problem(build, *PICTURE), attached_anew_each_step, coded=coded)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_detach_between_forward_and_backward(bf16: bool) -> None:
    """Graphs that are built keep what they need."""
    sessions: list[Session] = []

    @contextmanager
    def collecting(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
        with attached()(model, optimizer) as session:
            sessions.append(session)
            yield session

    def step(problem: Problem, model: nn.Module, batch: tuple[Tensor, ...]) -> list[Tensor]:
        loss = problem.forward(model, batch)
        for session in sessions:
            session.detach()
        loss.backward()
        return [loss.detach()]

    build, coded = PICTURES["functional calls only"]
    assert_exact(problem(build, *PICTURE, bf16=bf16), collecting, step=step, steps=1, coded=coded)


def load(model: nn.Module) -> nn.Module:
    loaded: nn.Module = pickle.loads(pickle.dumps(model))
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, load], ids=["copied", "loaded"])
def test_copies_of_an_attached_model_are_plain(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    """Once they have been called, down to the containers, which nobody calls."""
    plain, (inputs, target), entry = make("unet")
    session = lowtide.attach(plain, "exact", min_size=64, check=True)
    copied = duplicate(plain)
    session.ledger.sites.clear()
    entry.loss(copied(inputs), target).backward()
    assert not session.ledger.sites and hooks_on(copied) == []
    assert hooks_on(plain), "the original stays attached"
    entry.loss(plain(inputs), target).backward()
    grads = [{name: weight.grad for name, weight in model.named_parameters()} for model in (plain, copied)]
    assert_bit_equal(*grads)


def test_a_loaded_model_takes_hooks_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are numbered from zero in each process, so that a new one may get the number that ours had."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    model = nn.Sequential(nn.Linear(4, 4))
    lowtide.attach(model, "exact")
    stored = pickle.dumps(model)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    loaded = pickle.loads(stored)
    seen: list[Tensor] = []
    loaded.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    loaded(torch.ones(2, 4))
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["in-place ReLU after batch norm", "nested outputs"])
def test_a_codec_that_raises_leaves_no_hooks_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it happens: when a later op saves, or when the outermost module ends."""

    def fail(*args: object, **options: object) -> None:
        raise ArithmeticError("no code for this")

    build, _ = PICTURES[name]
    model = build()
    lowtide.attach(model, "exact", min_size=64)
    monkeypatch.setattr(BitMask, "encode", fail)
    with pytest.raises(ArithmeticError, match="no code for this"):
        model(torch.randn(PICTURE))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize(
    "name", ["TransformerEncoder, ReLU", "TransformerEncoder, GELU, norm first", "MultiheadAttention", "LSTM"]
)
def test_modules_with_a_fast_path_take_the_same_path(name: str, grad: bool, training: bool) -> None:
    """torch.nn's transformer layers look for hooks when they choose how to compute."""
    outputs = []
    for attach in (False, True):
        torch.manual_seed(7)
        model = SEQUENCES[name][0]().train(training)
        x = torch.randn(4, 10, WIDTH)
        session = lowtide.attach(model, "exact", min_size=64) if attach else None
        with torch.set_grad_enabled(grad):
            output = model(x)
        outputs.append(output[0] if isinstance(output, tuple) else output)
        if session is not None:
            session.detach()
    assert_bit_equal({"output": outputs[1].detach()}, {"output": outputs[0].detach()})


def test_the_comparison_notices_a_lossy_method() -> None:
    """What the tests of this folder rest on: training that is not exact is told from training that is."""
    build, _ = PICTURES["functional calls only"]
    exact, _ = train(problem(build, *PICTURE), attached())
    lossy, _ = train(problem(build, *PICTURE), attached("fixed"))
    with pytest.raises(AssertionError, match="gradient of w1"):
        assert_bit_equal(lossy, exact)
    negated = {name: -value if name.startswith("step 0: gradient") else value for name, value in exact.items()}
    with pytest.raises(AssertionError, match="step 0: gradient of w1"):
        assert_bit_equal(negated, exact)
    assert_bit_equal({"zero": torch.zeros(2)}, {"zero": torch.zeros(2)})
    with pytest.raises(AssertionError, match="2 of 2 elements"):
        assert_bit_equal({"zero": torch.zeros(2)}, {"zero": -torch.zeros(2)})
