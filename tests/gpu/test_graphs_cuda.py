"""Steps in CUDA graphs on a device: what a replay computes, what it does when a payload does not fit, what it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from no_waiting import no_waiting
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.errors import GraphError
from lowtide.graphs.step import GraphStep
from lowtide.session import Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
PRECISIONS = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
WARMUP = 5
FAMILIES = ("linear", "norm", "attention", "product", "pointwise", "log_probability")


class Run:
    """A model of the zoo in training; ``step`` is its forward and backward."""

    def __init__(self, name: str, *, bf16: bool, batch: int = 16, **options: Any) -> None:
        torch.manual_seed(0)
        entry = zoo.describe(name)
        self.model: nn.Module = entry.build(**{**entry.tiny, **options}).cuda().train()
        if bf16 and name.startswith("resnet"):
            self.model.to(memory_format=torch.channels_last)
        self._entry, self._bf16, self._batch = entry, bf16, batch
        self._options = {**entry.tiny, **options}
        self.generator = torch.Generator("cuda").manual_seed(1)

    def batch(self, count: int | None = None) -> tuple[Tensor, Tensor]:
        return self._entry.example(count or self._batch, generator=self.generator, **self._options)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self._bf16):
            output = self.model(x)
        loss = self._entry.loss(output.float(), y)
        loss.backward()
        return loss

    def attach(self, method: str, **options: Any) -> Session:
        return lowtide.attach(self.model, method, min_size=1024, **options)

    def gradients(self, step: Callable[..., Tensor], x: Tensor, y: Tensor) -> list[Tensor]:
        self.model.zero_grad()
        loss = step(x, y)
        assert bool(loss.isfinite())
        return [item.grad.clone() for item in self.model.parameters() if item.grad is not None]

    def train(self, step: Callable[..., Tensor], optimizer: torch.optim.Optimizer, *, steps: int) -> Tensor:
        """On four batches, over and over; gives the last loss."""
        batches = [self.batch() for _ in range(4)]
        for number in range(steps):
            optimizer.zero_grad()
            loss = step(*batches[number % 4])
            optimizer.step()
        return loss


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    error = sum(float((one - other).double().square().sum()) for one, other in zip(some, others, strict=True))
    return float((error / sum(float(other.double().square().sum()) for other in others)) ** 0.5)


def warm_up(run: Run, step: Any) -> None:
    """To the first replay."""
    while not step.replays:
        run.gradients(step, *run.batch())
    assert step.captures == 1


def patiently(tide: Session, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The step, and a wait for tables that are being fitted: a graph is renewed as soon as it may be."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        tide._pipeline.finish()
        return loss

    return run


MODELS = pytest.mark.parametrize("name", ["resnet18", "gpt"])


@PRECISIONS
@MODELS
def test_a_replay_of_exact_is_plain_training(name: str, bf16: bool) -> None:
    run = Run(name, bf16=bf16)
    tide = run.attach("exact")
    step = tide.graph(run.step, warmup=WARMUP)
    warm_up(run, step)
    plain = copy.deepcopy(run.model)
    for _ in range(5):
        run.model.load_state_dict(plain.state_dict())
        x, y = run.batch()
        replays = step.replays
        replayed = run.gradients(step, x, y)
        assert step.replays == replays + 1
        buffers = [buffer.clone() for buffer in run.model.buffers()]
        run.model.load_state_dict(plain.state_dict())
        eager = run.gradients(run.step, x, y)
        repeated = distance(run.gradients(run.step, x, y), eager)  # whether plain training repeats itself
        assert distance(replayed, eager) <= max(4 * repeated, 1e-6 if not bf16 else 1e-3)
        run.model.load_state_dict(plain.state_dict())
        run.gradients(run.step, x, y)
        for one, other in zip(run.model.buffers(), buffers, strict=True):
            torch.testing.assert_close(one, other)
    tide.detach()


@PRECISIONS
@MODELS
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fixed", {"linear": "0.4 std", "norm": "0.4 std"}),
        ("fixed", {"linear": "0.4 std", "norm": "0.4 std", "remake": True}),
        ("actnn", {"level": "L2"}),
        ("gact", {"level": "L1"}),
        ("division", {"bits": 4}),
    ],
    ids=["fixed", "remake", "actnn", "gact", "division"],
)
def test_replays_have_the_noise_of_eager_steps_and_dither_of_their_own(
    method: str, options: dict[str, Any], name: str, bf16: bool
) -> None:
    run = Run(name, bf16=bf16, batch=32)
    tide = run.attach(method, **options)
    step = tide.graph(run.step, warmup=WARMUP, refresh=64)
    warm_up(run, step)
    x, y = run.batch()
    eager = [run.gradients(run.step, x, y) for _ in range(3)]
    replayed = [run.gradients(step, x, y) for _ in range(6)]
    assert step.replays == 7
    tide.detach()
    plain = run.gradients(run.step, x, y)
    expected = sum(distance(one, plain) for one in eager) / 3
    assert expected > 1e-3
    noise = [distance(one, plain) for one in replayed]
    assert all(0.6 * expected < item < 1.6 * expected for item in noise), (noise, expected)
    mean = [torch.stack(items).mean(0) for items in zip(*replayed, strict=True)]
    assert distance(mean, plain) < 0.75 * expected, "the noise of six replays averages out: it is not the same noise"
    assert all(distance(replayed[0], other) > 0.5 * expected for other in replayed[1:])


@PRECISIONS
@MODELS
@pytest.mark.parametrize("coder", ["rans", "blocks"])
def test_beside_the_step_gradients_are_the_same(coder: str, name: str, bf16: bool) -> None:
    """Without dither, and with bounds that are numbers, two graphs store the same values: a race would show."""
    run = Run(name, bf16=bf16, batch=64)
    tide = run.attach("fixed", rounding="nearest", coder=coder, **dict.fromkeys(FAMILIES, 0.05))
    steps = [tide.graph(run.step, warmup=WARMUP, refresh=64, beside=beside) for beside in (False, True)]
    for step in steps:
        warm_up(run, step)
    assert steps[0]._aside is None and steps[1]._aside is not None and steps[1]._order
    for _ in range(12):
        x, y = run.batch()
        alone, again, beside = (run.gradients(step, x, y) for step in (steps[0], steps[0], steps[1]))
        assert distance(beside, alone) <= max(4 * distance(again, alone), 1e-6 if not bf16 else 1e-3)
    assert all(step.replays >= 12 and not step.overflows for step in steps)
    tide.detach()


@PRECISIONS
@MODELS
def test_what_outgrows_its_room_is_found_in_the_reserve(name: str, bf16: bool) -> None:
    """Without dither, and with bounds that are numbers, two graphs store the same values, wherever they lie."""
    run = Run(name, bf16=bf16, batch=64)
    tide = run.attach("fixed", rounding="nearest", coder="rans", **dict.fromkeys(FAMILIES, 0.05))
    steps = [tide.graph(run.step, warmup=WARMUP, refresh=64) for _ in range(2)]
    warm_up(run, steps[0])
    for _ in range(WARMUP):
        run.gradients(steps[1], *run.batch())
    for memo in tide._pipeline.sites.memos():
        memo.rate *= 0.95
    for _ in range(12):
        x, y = run.batch()
        roomy, again, tight = (run.gradients(step, x, y) for step in (steps[0], steps[0], steps[1]))
        assert distance(tight, roomy) <= max(4 * distance(again, roomy), 1e-6 if not bf16 else 1e-3)
        assert int(steps[1]._recording.replay._reserve.taken) > 0
    assert all(step.replays >= 12 and not step.overflows for step in steps)
    tide.detach()


def make_step(net: nn.Module) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return step


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(8, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(), nn.Dropout(0.1), nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8),
    ).cuda()  # fmt: skip


def test_a_step_that_does_not_fit_is_repeated_eagerly() -> None:
    """Random numbers and statistics of batches are those of one eager step; the next graph has more room."""
    model = make_net()
    other = copy.deepcopy(model)
    tides = [lowtide.attach(net, "fixed", linear="0.1 std", min_size=0) for net in (model, other)]

    step = tides[0].graph(make_step(model), warmup=WARMUP, refresh=64)
    x = torch.randn(32, 8, 16, 16, device="cuda")
    while not step.replays:
        model.zero_grad()
        step(x)
    other.load_state_dict(model.state_dict())
    state = torch.cuda.get_rng_state()
    model.zero_grad()
    loss = step(x * 100)
    ((_, overflows),) = step.overflows
    assert overflows and all(item.needed > item.room for item in overflows)
    assert "1 overflows, each repeated eagerly" in str(tides[0].report())
    torch.cuda.set_rng_state(state)
    expected = make_step(other)(x * 100)
    torch.testing.assert_close(loss, expected.detach())
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    gradients = [[item.grad for item in net.parameters()] for net in (model, other)]
    assert distance(*gradients) < 0.3, "but for the dither they are the same"
    replays = step.replays
    for _ in range(8):
        model.zero_grad()
        step(x * 100)
    assert step.replays > replays and len(step.overflows) == 1
    for tide in tides:
        tide.detach()


def train_in_flat_memory(run: Run, method: str) -> tuple[Session, GraphStep]:
    """A session and its graph after 120 steps, the last 90 of which did not take more and more memory."""
    torch.use_deterministic_algorithms(False)
    optimizer = torch.optim.SGD(run.model.parameters(), 0.01, momentum=0.9)
    tide = run.attach(method, optimizer=optimizer)
    step = tide.graph(run.step, warmup=WARMUP, refresh=16)
    one, seen = patiently(tide, step), []
    for number in range(120):
        optimizer.zero_grad()
        one(*run.batch())
        optimizer.step()
        if number >= 30:
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    half = len(seen) // 2
    assert max(item[0] for item in seen[half:]) <= 1.01 * max(item[0] for item in seen[:half])
    assert max(item[1] for item in seen[half:]) <= 1.05 * max(item[1] for item in seen[:half])
    assert step.captures + step.renewals >= 5 and step.replays >= 80
    return tide, step


@PRECISIONS
def test_memory_does_not_grow(bf16: bool) -> None:
    tide, _ = train_in_flat_memory(Run("resnet18", bf16=bf16, batch=32), "fixed")
    assert tide.ledger.step == 120
    tide.detach()


def test_room_shrinks_where_payloads_do_not_grow() -> None:
    """The same batch and the same weights, again and again: all that differs between two replays is the dither."""
    run = Run("resnet18", bf16=True, batch=32)
    tide = run.attach("fixed")
    step = tide.graph(run.step, warmup=WARMUP, refresh=8, slack=1 / 4)
    batch, held = run.batch(), []
    state = copy.deepcopy(run.model.state_dict())
    while step.captures + step.renewals < 6:
        run.model.load_state_dict(state)
        captures = step.captures
        run.gradients(step, *batch)
        if step.captures > captures:
            held.append(sum(entry.held_nbytes for entry in tide.ledger.sites.values()))
        tide.step()
    assert not step.overflows, step.describe()
    assert held[-1] < held[0] and median(room.slack for room in step._rooms._rooms.values()) == 1 / 64
    assert step._rooms.reserve.share == 1 / 16
    tide.detach()


def test_the_host_does_not_ask_the_device_in_a_replay() -> None:
    run = Run("resnet18", bf16=True)
    tide = run.attach("fixed")
    step = tide.graph(run.step, warmup=WARMUP, refresh=64)
    warm_up(run, step)
    batch = run.batch()
    with no_waiting():
        run.model.zero_grad()
        step(*batch)
    tide.detach()


def test_each_replay_reads_the_batch_it_is_given() -> None:
    run = Run("resnet18", bf16=False)
    tide = run.attach("exact")
    step = tide.graph(run.step, warmup=WARMUP)
    warm_up(run, step)
    batches = [run.batch() for _ in range(3)]
    losses = [float(step(*batch)) for batch in batches]
    again = [step(*batch) for batch in batches]  # kept, while later replays write to the graph's own
    assert len(set(losses)) == 3
    assert [float(loss) for loss in again] == pytest.approx(losses, rel=1e-4)
    with pytest.warns(lowtide.LowtideWarning, match="inputs of one shape"):
        step(*run.batch(7))
    tide.detach()


@pytest.mark.parametrize("method", ["budget", "acgc", "comet", "actnn", "gact"])
def test_methods_that_measure(method: str) -> None:
    """Steps that they measure run eagerly; bounds or bits that have moved make another graph; the loss falls."""
    options: dict[str, Any] = {"period": 16}
    run = Run("resnet18", bf16=True, batch=32)
    optimizer = torch.optim.SGD(run.model.parameters(), 0.02, momentum=0.9)
    tide = run.attach(method, optimizer=optimizer, **options)
    step = tide.graph(run.step, warmup=WARMUP, refresh=64)
    batch, losses = run.batch(), []
    for _ in range(64):
        optimizer.zero_grad()
        losses.append(step(*batch))
        optimizer.step()
    values = torch.stack(losses)
    assert bool(values.isfinite().all()) and float(values[-8:].mean()) < 0.7 * float(values[:8].mean())
    assert step.captures >= 2 and step.replays >= 16, step.describe()
    tide.detach()


@pytest.mark.parametrize("method", ["fixed", "division"])
def test_a_model_trains_as_well_as_eagerly(method: str) -> None:
    results = []
    for is_graphed in (False, True):
        run = Run("resnet18", bf16=True, batch=32)
        optimizer = torch.optim.SGD(run.model.parameters(), 0.02, momentum=0.9)
        tide = run.attach(method, optimizer=optimizer)
        step: Any = tide.graph(run.step, warmup=WARMUP, refresh=16) if is_graphed else run.step
        loss = run.train(step, optimizer, steps=80)
        results.append(float(loss.detach()))
        assert loss.requires_grad is not is_graphed, "what a graph returns is detached"
        tide.detach()
    assert results[1] < 2 * results[0] + 0.1, results


@pytest.mark.parametrize("method", ["cusz", "jpeg_act", "lossless"])
def test_a_method_whose_codec_cannot_be_captured_is_refused(method: str) -> None:
    """They wait for the sizes of their payloads."""
    run = Run("resnet18", bf16=False)
    tide = run.attach(method)
    step = tide.graph(run.step, warmup=3)
    with pytest.raises(GraphError, match=f"'{method}', which cannot be captured in a CUDA graph"):
        for _ in range(4):
            run.gradients(step, *run.batch())
    assert step.calls == 4 and step.captures == 0
    run.gradients(run.step, *run.batch())  # the device is as good as before
    tide.detach()


def test_a_step_that_waits_is_refused_with_its_reason() -> None:
    model = make_net()
    tide = lowtide.attach(model, "fixed", min_size=0)

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), torch.zeros((), device="cuda").expand(x.shape[0], 32, 8))
        float(loss.detach())
        loss.backward()
        return loss

    graphed = tide.graph(step, warmup=3)
    x = torch.randn(4, 8, 16, 16, device="cuda")
    for _ in range(3):
        graphed(x)
    with pytest.raises(GraphError, match="could not be captured"):
        graphed(x)
    tide.detach()
    assert bool(model(x).isfinite().all())
