"""Batch growth on a device with a cap on torch's allocator: memory really runs out, and the answer really fits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.growth import CudaMeter

pytestmark = pytest.mark.gpu
CAP = 2 << 30  # of which the 256 MiB that a session may keep until encoders have reported are not too much


@pytest.fixture(autouse=True)
def _capped() -> Iterator[None]:
    torch.use_deterministic_algorithms(False)  # filling memory would be most of the work
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction((CAP + before) / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


class Training:
    """Layers of 4 bytes x ``width`` a sample each in fp32, and more of what ReLU and its mask need."""

    def __init__(self, method: str = "", *, depth: int = 16, width: int = 1024) -> None:
        torch.manual_seed(0)
        self.width = width
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width, device="cuda"), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-4)
        self.state: list[object] = [self.model, self.optimizer]
        if method:
            self.state.append(lowtide.attach(self.model, method, optimizer=self.optimizer))

    def step(self, size: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.model(torch.randn(size, self.width, device="cuda")).square().mean().backward()
        self.optimizer.step()


def test_the_cap_is_the_limit() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    share = torch.cuda.get_per_process_memory_fraction(0)
    assert CudaMeter(torch.device("cuda", 0)).limit() <= int(share * total)


def test_the_answer_fits_and_twice_as_much_does_not() -> None:
    training = Training()
    training.step(256)
    weights = [parameter.detach().clone() for parameter in training.model.parameters()]
    rng = torch.cuda.get_rng_state()
    result = lowtide.find_batch_size(training.step, state=training.state, start=256, maximum=1 << 20)
    assert result.batch >= 512 and result.peak is not None and result.peak <= result.allowed
    for parameter, weight in zip(training.model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight) and parameter.grad is None
    assert torch.equal(torch.cuda.get_rng_state(), rng)
    training.step(result.batch)
    with pytest.raises(torch.OutOfMemoryError):
        training.step(4 * result.batch)


def test_memory_that_runs_out_for_real_is_caught() -> None:
    """Twice the largest batch as the start: the first trial fails, and the search goes down."""
    training = Training()
    largest = lowtide.find_batch_size(training.step, state=training.state, start=256, maximum=1 << 20).batch
    result = lowtide.find_batch_size(training.step, state=training.state, start=8 * largest, maximum=1 << 20)
    assert result.batch == largest
    assert result.tried[0].outcome == "out of memory"


def test_a_session_finds_room_for_more() -> None:
    """With many layers: what a few of them need while they are at work is the same with a session."""
    found = {}
    for method in ("", "fixed"):
        training = Training(method, depth=48, width=512)
        result = lowtide.find_batch_size(
            training.step, state=training.state, start=256, maximum=1 << 20, granularity=256
        )
        for _ in range(3):
            training.step(result.batch)
        found[method] = result.batch
        del training
        torch.cuda.empty_cache()
    assert found["fixed"] >= 2 * found[""], found
