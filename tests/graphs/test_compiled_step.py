"""Steps of compiled models that are captured and replayed. The GPU is a stand-in, and so is the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from simt import requires_compiler
from test_recording import Net as RecordedNet
from test_recording import _as_on_a_gpu, distance  # noqa: F401  (a fixture)
from test_step import Net
from torch import nn

pytestmark = requires_compiler


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("beside", [False, True])
def test_all_that_a_step_leaves_is_that_of_plain_training(beside: bool) -> None:
    """Loss, gradients and buffers, compared in every call of ``train``; drawn numbers, too."""
    net = Net(compiled=True, beside=beside)
    net.train(16)
    assert net.step.captures and net.step.replays > 6
    assert net.tide._calls is not None
    assert net.tide._calls.compiled == 16 + net.step.captures and not net.tide._calls.eager
    net.train(3, zero=False)
    events = net.tide.report().events
    assert any("CUDA graph:" in event for event in events) and any("compiled by" in event for event in events)


def test_steps_that_a_controller_measures_run_eagerly() -> None:
    net = Net(compiled=True)
    net.train(9)
    assert net.tide._calls is not None
    before, replays = net.tide._calls.eager, net.step.replays
    net.tide._capture.on_named = lambda node, handle: None  # until the step ends
    net.train(1)
    assert net.tide._calls.eager == before + 1 and net.step.replays == replays
    net.train(2)
    assert net.step.replays > replays


@pytest.mark.parametrize("norm", [nn.LayerNorm(64), nn.Identity()], ids=["layer norm", "relu and linear"])
def test_a_captured_step_is_like_any_other_and_nobody_waits(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels of a graph, in the emulator: payloads have fixed room, and nothing is learnt."""
    net = RecordedNet(norm, 320, coder="rans")
    net.tide.compile(backend="aot_eager", fullgraph=True)
    net.warm_up()
    expected, before = net.run(net.plain), net.known()
    recording, got = net.record_at_once(monkeypatch)
    assert 0 < distance(got, expected) < 0.1
    assert net.known() == before and recording.has_bounds
    assert recording.look() == [] and len(recording._gauges) >= 1
    assert net.tide.ledger.held == 0 and net.tide._calls is not None and not net.tide._calls.eager


def test_eager_and_compiled_captures_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for compiled in (False, True):
        torch.manual_seed(3)
        net = RecordedNet(None, 320, coder="rans")
        if compiled:
            net.tide.compile(backend="aot_eager", fullgraph=True)
        net.warm_up()
        recording, got = net.record_at_once(monkeypatch)
        found.append((got, sorted((gauge.site, gauge.words) for gauge in recording._gauges)))
        net.tide.detach()
    (eager, rooms), (of_graph, rooms_of_graph) = found
    assert rooms == rooms_of_graph
    assert all(torch.equal(one, other) for one, other in zip(eager, of_graph, strict=True))
