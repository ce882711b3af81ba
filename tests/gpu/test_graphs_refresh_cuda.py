"""Graphs that become old, on a device: renewed without a capture, captured again in the same memory, or given up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_graphs_cuda import WARMUP, Run, distance, patiently, warm_up
from torch import Tensor, nn

import lowtide
from lowtide.errors import GraphError
from lowtide.graphs.recording import Recording

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
]
EAGER, REFRESH = 3, 16
RECAPTURES = pytest.mark.parametrize("recaptures", [False, True], ids=["renewed", "recaptured"])


@pytest.fixture
def _never_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "renew", lambda self, memos: False)


def test_a_renewed_graph_has_the_noise_of_eager_steps() -> None:
    """The net is homogeneous: with inputs 1.3 times as large all values are, and so are the bounds that are measured
    then. By the tables of its capture a replay would have 1.3 times less noise."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(8, 32, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(2), nn.Linear(256, 64, bias=False)).cuda()
    tide = lowtide.attach(model, "fixed", linear="0.4 std", min_size=1024)

    def run(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    def gradients(step: Any, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        step(x)
        return [item.grad.clone() for item in model.parameters()]

    step = tide.graph(run, warmup=WARMUP, refresh=REFRESH, slack=1 / 64)
    x = torch.randn(64, 8, 16, 16, device="cuda")
    while step.replays < REFRESH:
        gradients(step, x)
    x *= 1.3
    for _ in range(EAGER):
        gradients(step, x)
        tide._pipeline.finish()  # or the old graph would be replayed until models are there
    assert (step.captures, step.renewals, step.replays) == (1, 0, REFRESH)
    replayed = [gradients(step, x) for _ in range(8)]
    assert (step.captures, step.renewals, step.replays) == (1, 1, REFRESH + 8), step.describe()
    eager = [gradients(run, x) for _ in range(8)]
    tide.detach()
    plain = gradients(run, x)
    noise, expected = (sum(distance(one, plain) for one in many) / 8 for many in (replayed, eager))
    print(f"noise of replays {noise:.4f}, of eager steps {expected:.4f}")
    assert 0.9 * expected < noise < 1.1 * expected
    mean = [torch.stack(items).mean(0) for items in zip(*replayed, strict=True)]
    assert distance(mean, plain) < 0.6 * expected, "and dither of its own in every replay"


@RECAPTURES
@pytest.mark.parametrize("name", ["resnet18", "gpt"])
def test_training_goes_on_as_eagerly(name: str, recaptures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls as it does eagerly, over many refreshes."""
    if recaptures:
        monkeypatch.setattr(Recording, "renew", lambda self, memos: False)
    results = []
    for is_graphed in (False, True):
        run = Run(name, bf16=True, batch=32)
        optimizer = torch.optim.SGD(run.model.parameters(), 0.02, momentum=0.9)
        tide = run.attach("fixed", optimizer=optimizer)
        step: Any = tide.graph(run.step, warmup=WARMUP, refresh=8) if is_graphed else run.step
        results.append(float(run.train(patiently(tide, step), optimizer, steps=100).detach()))
        if is_graphed:
            print(step.describe())
            assert step.captures >= 6 if recaptures else step.renewals >= 2
        tide.detach()
    assert results[1] < 2 * results[0] + 0.1, results


@RECAPTURES
def test_memory_does_not_grow_over_many_refreshes(recaptures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each graph takes over the pool of the last one, whose gaps new payloads may not fit."""
    torch.use_deterministic_algorithms(False)
    if recaptures:
        monkeypatch.setattr(Recording, "renew", lambda self, memos: False)
    run = Run("resnet18", bf16=True, batch=32)
    optimizer = torch.optim.SGD(run.model.parameters(), 0.01, momentum=0.9)
    tide = run.attach("fixed", optimizer=optimizer)
    step = tide.graph(run.step, warmup=WARMUP, refresh=4)
    seen: list[tuple[int, int]] = []
    while step.captures + step.renewals < 40:
        optimizer.zero_grad()
        step(*run.batch())
        optimizer.step()
        if step.captures + step.renewals >= 10:
            torch.cuda.synchronize()
            seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    print(step.describe())
    half = len(seen) // 2
    assert max(item[0] for item in seen[half:]) <= 1.01 * max(item[0] for item in seen[:half])
    assert max(item[1] for item in seen[half:]) <= 1.05 * max(item[1] for item in seen[:half])
    tide.detach()


@pytest.mark.usefixtures("_never_renewed")
def test_a_capture_in_the_old_pool_asks_for_little_memory() -> None:
    """And takes less time; how much is printed."""
    run = Run("resnet18", bf16=True, batch=32)
    tide = run.attach("fixed")
    step = tide.graph(run.step, warmup=WARMUP, refresh=REFRESH, slack=1 / 64)
    batch, took = run.batch(), []
    while step.captures < 4:
        captures, segments, pool = step.captures, torch.cuda.memory_stats()["segment.all.allocated"], step.nbytes
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run.gradients(step, *batch)
        torch.cuda.synchronize()
        if step.captures > captures:
            took.append(1000 * (time.perf_counter() - begin))
            asked = torch.cuda.memory_stats()["segment.all.allocated"] - segments
            print(f"capture {step.captures}: {took[-1]:.1f} ms, {asked} segments, pool {pool} to {step.nbytes} bytes")
            assert step.captures == 1 or step.nbytes <= 1.25 * pool
    assert not step.overflows
    tide.detach()


def test_a_capture_that_cuda_gives_up_leaves_a_device_that_captures_again() -> None:
    """The allocator is not left in a capture: it can give memory back, and make pools for other graphs."""
    run = Run("resnet18", bf16=False)
    tide = run.attach("fixed")

    def waits(x: Tensor, y: Tensor) -> Tensor:
        loss = run.step(x, y)
        float(loss.detach())
        return loss

    broken = tide.graph(waits, warmup=3)
    for _ in range(3):
        run.gradients(broken, *run.batch())
    with pytest.raises(GraphError, match="could not be captured"):
        broken(*run.batch())
    assert not torch.cuda.is_current_stream_capturing()
    del broken
    torch.cuda.synchronize()
    block = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    reserved = torch.cuda.memory_reserved()
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - (1 << 28)
    step = tide.graph(run.step, warmup=WARMUP)
    warm_up(run, step)
    tide.detach()
