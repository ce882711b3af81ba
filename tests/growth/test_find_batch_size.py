"""The search around real training steps: they leave no trace, and running out of memory is a finding."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from live_memory import LiveMeter
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.growth import is_out_of_memory

MIB = 1 << 20


class Training:
    """A small conv net with a step of any size; with Lowtide if a method is named."""

    def __init__(self, method: str = "") -> None:
        torch.manual_seed(0)
        self._entry = zoo.describe("resnet18")
        self.model = self._entry.build(**self._entry.tiny)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.state: list[object] = [self.model, self.optimizer]
        if method:
            self.session = lowtide.attach(self.model, method, optimizer=self.optimizer)
            self.state.append(self.session)

    def step(self, size: int) -> None:
        inputs, target = self._entry.example(size, **self._entry.tiny)
        self.optimizer.zero_grad()
        self._entry.loss(self.model(inputs), target).backward()
        self.optimizer.step()

    def facts(self) -> dict[str, Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, values in enumerate(self.optimizer.state.values()):
            found[f"momentum {index}"] = values["momentum_buffer"].clone()
        return found | {"rng": torch.get_rng_state()}


@pytest.mark.parametrize("method", ["", "exact", "fixed"])
def test_training_goes_on_as_if_there_had_been_no_search(method: str) -> None:
    traces = []
    for searches in (False, True):
        training = Training(method)
        for _ in range(2):
            training.step(4)
        if searches:
            meter = LiveMeter(6 * MIB, cap=6 * MIB)
            result = lowtide.find_batch_size(
                training.step, state=training.state, start=4, maximum=32, steps=2, meter=meter
            )
            assert result.batch >= 4 and meter.cleaned > len(result.tried) > 1
            assert all(parameter.grad is None for parameter in training.model.parameters())
        for _ in range(2):
            training.step(4)
        traces.append(training.facts())
    assert list(traces[0]) == list(traces[1])
    assert [name for name in traces[0] if not torch.equal(traces[0][name], traces[1][name])] == []


class DeepTraining(Training):
    """Forty layers of which each saves its output: what is held outweighs what any one layer needs to work."""

    def __init__(self, method: str = "") -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(40) for layer in (nn.Linear(16, 16, bias=False), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)
        self.state = [self.model, self.optimizer]
        if method:
            self.session = lowtide.attach(self.model, method, optimizer=self.optimizer)
            self.state.append(self.session)

    def step(self, size: int) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(size, 16)).square().mean().backward()
        self.optimizer.step()


def test_compression_makes_room_for_a_larger_batch() -> None:
    """And the peak that a search reports is the peak of a step of that size."""
    found = {}
    for method in ("", "fixed"):
        training = DeepTraining(method)
        result = lowtide.find_batch_size(
            training.step, state=training.state, start=256, maximum=8192, meter=LiveMeter(2 * MIB)
        )
        for _ in range(2):
            training.step(result.batch)
        again = LiveMeter(0).peak(partial(training.step, result.batch))
        assert again == pytest.approx(result.peak, rel=0.05)
        assert result.peak is not None and result.peak <= result.allowed == int(2 * MIB * 0.95)
        found[method] = result.batch
    assert found["fixed"] >= 2 * found[""], found


ERRORS: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "old torch": lambda: RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0)"),
    "driver": lambda: RuntimeError("CUDA error: out of memory"),
    "HIP": lambda: RuntimeError("HIP out of memory. Tried to allocate"),
    "cuBLAS": lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cuDNN": lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cuDNN plan": lambda: RuntimeError("GET was unable to find an engine to execute this computation"),
    "host": lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    "Windows host": lambda: RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    "Python": lambda: MemoryError(),
}


class SmallDevice:
    """Fails with ``error`` above 20 samples, in the step that is asked for."""

    def __init__(self, make: Callable[[], BaseException], fails_at: int = 1) -> None:
        self.make, self.fails_at = make, fails_at
        self.calls, self.size, self.cleaned = 0, 0, 0
        self.weight = nn.Parameter(torch.zeros(4))
        self.optimizer = torch.optim.SGD([self.weight], 0.1)
        self.activations: list[weakref.ref[Tensor]] = []

    def step(self, size: int) -> None:
        self.calls = self.calls + 1 if size == self.size else 1
        self.size = size
        activation = torch.ones(size, 4)
        self.activations.append(weakref.ref(activation))
        (activation * self.weight).sum().backward()
        if size > 20 and self.calls >= self.fails_at:
            raise self.make()
        self.optimizer.step()

    def limit(self) -> int:
        return 10**6

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return 1000 * self.size

    def clean(self) -> None:
        self.cleaned += 1
        held = [ref for ref in self.activations if ref() is not None]
        assert not held, "memory is given back only if nothing holds it: an exception still does"


@pytest.mark.parametrize("kind", ERRORS)
def test_running_out_of_memory_is_recognised_in_all_its_forms(kind: str) -> None:
    assert is_out_of_memory(ERRORS[kind]())


@pytest.mark.parametrize(("kind", "fails_at"), [("torch", 1), ("torch", 3), ("driver", 3), ("Python", 3)])
def test_running_out_of_memory_is_caught_in_any_step(kind: str, fails_at: int) -> None:
    device = SmallDevice(ERRORS[kind], fails_at)
    gc.disable()  # what is held must go by itself, or by the search's own collection
    try:
        result = lowtide.find_batch_size(
            device.step, state=[device.optimizer], start=8, maximum=64, granularity=4, meter=device
        )
    finally:
        gc.enable()
    assert result.batch == 20 and result.why == "24 runs out of memory"
    assert any(trial.outcome == "out of memory" and trial.peak is None for trial in result.tried)
    assert device.weight.grad is None and torch.equal(device.weight, torch.zeros(4))


@pytest.mark.parametrize("error", [ValueError("out of memory"), RuntimeError("shapes differ"), KeyboardInterrupt()])
def test_other_errors_are_raised_and_the_state_is_as_before(error: BaseException) -> None:
    device = SmallDevice(lambda: error, fails_at=2)
    with pytest.raises(type(error)):
        lowtide.find_batch_size(device.step, state=[device.optimizer], start=4, maximum=64, meter=device)
    assert torch.equal(device.weight, torch.zeros(4)) and device.weight.grad is None


def test_what_is_no_lack_of_memory_is_not_taken_for_it() -> None:
    assert not is_out_of_memory(ValueError("out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_inside_a_session_leaves_it_usable(where: str) -> None:
    """Scopes are closed, nothing stays held, and the session goes on from where it was."""
    training = DeepTraining("fixed")
    session = training.session

    def fail(tensor: Tensor) -> None:
        if len(tensor) > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def after(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if where == "forward":
            fail(output)
        else:
            output.register_hook(fail)

    training.model[40].register_forward_hook(after)
    training.step(256)
    before = copy.deepcopy(session.state_dict())
    result = lowtide.find_batch_size(
        training.step, state=training.state, start=256, maximum=1024, steps=1, meter=LiveMeter(100 * MIB)
    )
    assert result.batch == 512 and result.why == "1024 runs out of memory"
    assert session.ledger.held == 0
    assert str(session.state_dict()) == str(before)
    training.step(256)
    assert session.ledger.step == 2 and session.ledger.held == 0
