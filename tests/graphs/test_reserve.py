"""The room that the payloads of a graph have in common. The kernels run in the emulator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_machine import FakeGraph, FakeMachine
from simt import requires_compiler
from test_recording import Net, _as_on_a_gpu, distance  # noqa: F401  (a fixture)
from torch import Tensor, nn

import lowtide
from lowtide.graphs.recording import Demand, Recording
from lowtide.graphs.rooms import LEAST, OWN, Reserve, Rooms
from lowtide.graphs.step import GraphStep
from lowtide.graphs.tables import Tables
from lowtide.kernels._workspaces import Cell

pytestmark = requires_compiler
VALUES = 1280 * 64


class Reserved(Net):
    """Two payloads of ``rans``, of 20 chunks of 4096 values, and a rehearsal that says what they take."""

    def __init__(self, batch: int = 1280) -> None:
        super().__init__(batch=batch, coder="rans")
        self.rooms = Rooms(1 / 16)
        self.warm_up()
        self.learn()

    def learn(self) -> None:
        rehearsal = Recording(self.cell, self.rooms, is_capturing=False)
        with self.pipeline.recorded(rehearsal):
            self.run()
        self.pipeline.finish()
        self.demand = rehearsal.demand

    def capture(self, *, share: float | None = None) -> tuple[Recording, list[Tensor]]:
        if share is not None:
            self.rooms.reserve.share = share
        tables = Tables(self.pipeline.sites.memos())
        recording = Recording(self.cell, self.rooms, is_capturing=True, tables=tables, demand=self.demand)
        with self.pipeline.recorded(recording):
            recording.begin()
            return recording, self.run()

    def taken(self, recording: Recording) -> int:
        assert recording.replay._reserve is not None
        return int(recording.replay._reserve.taken)

    def shrink(self, times: float) -> None:
        """What payloads took last: so much room of their own they will have."""
        for memo in self.pipeline.sites.memos():
            memo.rate /= times


@pytest.fixture
def net() -> Reserved:
    return Reserved()


def test_a_rehearsal_says_what_payloads_take(net: Reserved) -> None:
    memos = net.pipeline.sites.memos()
    assert len(memos) == 2 and all(memo.plan.model is not None for memo in memos)
    assert net.demand.words == pytest.approx(sum(memo.rate * VALUES for memo in memos), abs=1)


def test_what_has_room_takes_nothing_of_the_reserve(net: Reserved) -> None:
    recording, got = net.capture()
    assert distance(got, net.run(net.plain)) < 0.1
    assert recording.look() == [] and net.taken(recording) == 0
    memos = {memo.rate for memo in net.pipeline.sites.memos()}
    expected = sorted(int(rate * (1 + OWN) * VALUES) + 1024 for rate in memos)
    assert sorted(gauge.words for gauge in recording._gauges) == expected
    assert net.rooms.reserve.share == 1 / 8, "twice the slack"


def test_what_outgrows_its_room_is_found_in_the_reserve(net: Reserved) -> None:
    """Bit for bit the step that had room enough."""
    _, right = net.capture()
    net.shrink(2.0)
    recording, got = net.capture(share=1.0)
    assert recording.look() == [], "nothing was lost"
    taken = net.taken(recording)
    assert taken > 0.3 * net.demand.words
    assert distance(got, right) == 0
    short = sum(gauge.ticket.wait() - gauge.words for gauge in recording._gauges)
    assert short <= taken <= short + sum(gauge.chunk for gauge in recording._gauges)
    share = short / sum(gauge.words for gauge in recording._gauges)
    assert net.rooms.reserve._taken == pytest.approx(share), "for the next graph"


def test_a_reserve_that_is_too_small_is_noticed(net: Reserved) -> None:
    net.shrink(50.0)
    recording, got = net.capture(share=1 / 16)
    found = recording.look()
    assert len(found) == 2 and all(item.needed > item.room for item in found)
    assert any(bool(gradient.isnan().any()) for gradient in got), "nobody takes them for gradients"
    assert net.rooms.reserve.share > 0.5, "twice what was missing"
    recording, got = net.capture()
    assert recording.look() == [] and distance(got, net.run(net.plain)) < 0.1


def test_a_graph_is_renewed_while_half_of_the_reserve_is_left(net: Reserved) -> None:
    recording, _ = net.capture(share=1.0)
    memos = net.pipeline.sites.memos()
    assert recording.renew(memos) and not recording.is_wasteful()
    net.shrink(1 / 1.15)
    assert recording.renew(memos), "the reserve has more than twice what payloads have grown by"
    net.shrink(1 / 1.4)
    assert not recording.renew(memos)
    net.shrink(1.15 * 1.4)
    assert recording.renew(memos)
    net.rooms.reserve.share = 0.8
    assert recording.is_wasteful(), "another graph would do with less"


def test_without_a_reserve_payloads_have_a_slack_of_their_own(net: Reserved) -> None:
    net.demand = Demand(0, 0)
    recording, _ = net.capture()
    assert recording.replay.reserve == (0, 0, 0)
    assert all(gauge.room is not None and not gauge.chunk for gauge in recording._gauges)
    net.shrink(2.0)
    recording, _ = net.capture()
    assert len(recording.look()) == 2


def test_pairs_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folded by the encoder, unfolded by decoders."""
    net = Reserved.__new__(Reserved)  # of another model
    torch.manual_seed(0)
    net.model = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    nn.init.normal_(net.model[1].bias, 0.0, 0.5)
    net.plain = copy.deepcopy(net.model)
    net.tide = lowtide.attach(
        net.model, "fixed", linear="0.2 std", norm="0.5 std", min_size=1000, remake=True, coder="rans"
    )
    net.pipeline, net.cell, net.rooms = net.tide._pipeline, Cell(torch.device("cpu")), Rooms(1 / 16)
    net.x = torch.randn(1280, 40)
    net.warm_up()
    net.learn()
    assert net.demand.words > 0
    _, right = net.capture()
    net.shrink(2.0)
    recording, got = net.capture(share=1.0)
    assert recording.look() == [] and net.taken(recording) > 0
    assert distance(got, right) == 0


class Machine(FakeMachine):
    """Replays launch encoders that report, as those of a graph do."""

    step: GraphStep

    def capture(self, body: Callable[[], Any], *rest: Any) -> tuple[FakeGraph, Any]:
        def again() -> Any:
            recording = self.step._recording
            assert recording is not None
            recording._gauges.clear()
            with self.step._recorder.recorded(recording):
                return body()

        graph, output = super().capture(body, *rest)
        graph._body = again
        return graph, output


def test_a_step_in_training_whose_payloads_grow() -> None:
    """No replay is lost while the reserve lasts; one that needs more is repeated, and the next graph has it."""
    net = Reserved(batch=5120)
    machine = Machine(net.model)
    step = machine.step = GraphStep(
        lambda x: _step(net.model, x), net.model, net.model.parameters(), net.pipeline, machine,
        Cell(torch.device("cpu")), warmup=4, refresh=100, slack=1 / 16, is_measured=lambda: False, moves=lambda: 0,
    )  # fmt: skip

    def train(calls: int) -> None:
        for _ in range(calls):
            gradients = []
            for model, run in ((net.model, step), (net.plain, lambda x: _step(net.plain, x))):
                model.zero_grad()
                run(net.x * 1)
                gradients.append([item.grad.clone() for item in model.parameters()])
            assert 0 < distance(*gradients) < 0.1

    def grow(times: float) -> None:
        """What the last layer reads, while its bound stays as it is."""
        for model in (net.model, net.plain):
            with torch.no_grad():
                model[2].weight.mul_(times)

    train(6)
    assert (step.captures, step.replays, step.overflows) == (1, 2, [])
    assert step._demand.words == pytest.approx(net.demand.words, rel=0.2)
    grow(1.2)
    train(2)
    assert (step.captures, step.replays, step.overflows) == (1, 4, [])
    assert net.taken(step._recording) > 0, "or it tests nothing"
    grow(8.0)
    train(1)
    assert (step.replays, len(step.overflows)) == (4, 1)
    train(5)
    assert (step.captures, step.replays, len(step.overflows)) == (2, 6, 1)


def _step(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss


def test_shares() -> None:
    reserve = Reserve(1 / 16)
    assert (reserve.share, reserve.words(1000)) == (1 / 8, 125)
    reserve.note(0.02)
    reserve.note(0.01)
    reserve.narrow()
    assert reserve.share == 1 / 16, "never less"
    reserve.note(0.05)
    reserve.narrow()
    assert reserve.share == 0.1, "twice what a replay took"
    reserve.narrow()
    assert reserve.share == 1 / 16, "what an earlier graph's took does not count for ever"
    reserve.note(0.3)
    reserve.widen()
    assert reserve.share == 0.6
    reserve.widen()
    assert reserve.share == 1.0, "at most as much again as all payloads have"
    assert Reserve(0.0).words(10**6) == 0
    large = Reserve(0.25)
    for share in (0.5, 0.25, 0.125, 1 / 16, 1 / 16):
        assert large.share == share
        large.narrow()
    none = Reserve(0.0)
    none.widen()
    assert none.share == 2 * LEAST
    assert reserve.words(1 << 40) == (1 << 31) - 1, "as many words as a chunk can name"
