"""Compiled models on a device, by Inductor: what is held, the noise, the peak, no waiting, flat memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from no_waiting import no_waiting
from torch import Tensor

import lowtide
from lowtide.app import zoo

# Inductor says that TF32 is off; backward of some attention cannot repeat itself, and says so.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*determinis.*"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]

# Of the zoo: large enough that tensors outweigh what is there anyway.
SIZES = {
    "resnet18": ({"width": 32, "num_classes": 10}, {"image_size": 64}, 32),
    "llama": ({"vocab_size": 512, "context": 256, "depth": 4, "width": 256, "heads": 4, "kv_heads": 2}, {}, 8),
    "gpt": ({"vocab_size": 512, "context": 256, "depth": 4, "width": 256, "heads": 4}, {}, 8),
}


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Training:
    """A model on the device, plain or with Lowtide, eager or compiled; one batch."""

    def __init__(
        self, name: str, method: str | None, *, compiled: bool, bf16: bool, times: int = 1, **options: object
    ) -> None:
        """With batches ``times`` as large."""
        entry = zoo.describe(name)
        build, data, batch = SIZES[name]
        batch *= times
        torch.manual_seed(0)
        self.model = entry.build(**build).cuda()
        self.inputs, self.target = (part.cuda() for part in entry.example(batch, **build, **data))
        if self.inputs.dim() == 4 and bf16:
            self.model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        self.bf16, self.loss = bf16, entry.loss
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.tide = lowtide.attach(self.model, method, optimizer=self.optimizer, **options) if method else None
        if compiled:
            (self.tide or self.model).compile(fullgraph=True)

    def forward(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.bf16):
            output = self.model(self.inputs)
        return self.loss(output.float(), self.target)

    def gradients(self) -> list[Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().backward()
        return [part.grad.clone() for part in self.model.parameters()]

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward().backward()
        self.optimizer.step()

    def peak(self) -> int:
        """Bytes above what is there before a step."""
        self.optimizer.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.forward().backward()
        return torch.cuda.max_memory_allocated() - before


def noise(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = list(zip(found, exact, strict=True))
    error = sum(float((a - b).double().square().sum()) for a, b in pairs)
    return error / sum(float(b.double().square().sum()) for _, b in pairs)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_it_holds_what_an_eager_session_holds(name: str, bf16: bool) -> None:
    plain = Training(name, None, compiled=False, bf16=bf16).gradients()
    found = []
    for compiled in (False, True):
        training = Training(name, "fixed", compiled=compiled, bf16=bf16, check=True)
        for _ in range(4):
            gradients = training.gradients()
        assert training.tide is not None
        sites = {name for name, site in training.tide.ledger.sites.items() if site.need in ("values", "mask")}
        found.append((noise(gradients, plain), training.tide.ledger.held_peak, sites))
        training.tide.detach()
    (eager, held, sites), (compiled_noise, held_by_graph, sites_of_graph) = found
    assert compiled_noise < 3 * eager + 1e-4
    assert held_by_graph <= 1.05 * held
    # A graph calls batch norms by the name of an eager session before it, if there was one.
    sites = {site.replace("cudnn_batch_norm", "native_batch_norm") for site in sites}
    assert {site for site in sites_of_graph - sites if "dropout" not in site} == set()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_the_peak_is_lower(name: str, bf16: bool) -> None:
    """Of batches far larger than the tensors that wait for the device (rule 15). On an H200: 0.65 times as high for
    ResNet-18, whose graph keeps copies of weights; others are below 0.6."""
    peaks = []
    for method in (None, "fixed"):
        training = Training(name, method, compiled=True, bf16=bf16, times=64 if name == "resnet18" else 16)
        for _ in range(8):
            training.step()
        peaks.append(training.peak())
    assert peaks[1] < (0.7 if name == "resnet18" else 0.6) * peaks[0], peaks


@pytest.mark.parametrize("method", ["fixed", "budget"])
@pytest.mark.parametrize("name", SIZES)
def test_nothing_waits(name: str, method: str) -> None:
    """After steps enough that no site has a measurement due; `budget` measures in steps 12, 16 and 24."""
    training = Training(name, method, compiled=True, bf16=True)
    for _ in range(20):
        training.step()
    with no_waiting():
        training.step()


def test_memory_stays_flat() -> None:
    training = Training("resnet18", "budget", compiled=True, bf16=True)
    for _ in range(70):
        training.step()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(200):
        training.step()
    assert torch.cuda.memory_allocated() <= before[0] + (1 << 20)
    assert torch.cuda.memory_reserved() <= before[1] + (64 << 20)
    assert training.tide is not None and training.tide.ledger.held == 0


def test_sizes_that_change() -> None:
    training = Training("gpt", "fixed", compiled=True, bf16=True)
    inputs, target = training.inputs, training.target
    for size in (8, 6, 4, 7):
        training.inputs, training.target = inputs[:size], target[:size]
        training.step()
    assert all(bool(part.isfinite().all()) for part in training.model.parameters())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SIZES)
def test_a_compiled_step_can_be_captured(name: str, bf16: bool) -> None:
    """Replays have the noise of eager steps of the same method, dither of their own, and wait for nothing."""
    plain = Training(name, None, compiled=False, bf16=bf16).gradients()
    eager = Training(name, "fixed", compiled=False, bf16=bf16)
    for _ in range(4):
        by_eager = eager.gradients()
    training = Training(name, "fixed", compiled=True, bf16=bf16)
    assert training.tide is not None

    def forward_backward(inputs: Tensor, target: Tensor) -> Tensor:
        training.inputs, training.target = inputs, target
        loss = training.forward()
        loss.backward()
        return loss

    step = training.tide.graph(forward_backward)
    inputs, target, found = training.inputs, training.target, []
    for _ in range(24):
        training.optimizer.zero_grad(set_to_none=True)
        step(inputs, target)
        found.append([part.grad.clone() for part in training.model.parameters()])
        training.tide.step()
    assert step.captures and step.replays > 8
    assert all(noise(one, plain) < 3 * noise(by_eager, plain) + 1e-4 for one in found[-4:])
    assert noise(found[-1], found[-2]) > 0
    with no_waiting():
        training.optimizer.zero_grad(set_to_none=True)
        step(inputs, target)
