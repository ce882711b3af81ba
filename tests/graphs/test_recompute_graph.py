"""Modules that are run again in backward, in a step that is captured: their inputs are payloads like any other.

The GPU is a stand-in, or its kernels run in the emulator.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import test_recording
import test_step
import torch
from simt import requires_compiler
from torch import nn

import lowtide
from lowtide.codecs.bitmask import BitMask
from lowtide.errors import GraphError
from lowtide.graphs import step as step_module
from lowtide.graphs.draws import Repeats
from lowtide.graphs.recording import Overflow, Recording
from lowtide.recompute import Region
from lowtide.surroundings import rewind

_as_on_a_gpu = test_recording._as_on_a_gpu  # for every test here
CHOICES = pytest.mark.parametrize("recompute", ["[0-5]", ["1", "3", "4"], "[24]"], ids=str)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are run again, one after the other."""
    found: list[str] = []
    run_again = Region._run_again

    def noted(region: Region) -> Any:
        found.append(region.path)
        return run_again(region)

    monkeypatch.setattr(Region, "_run_again", noted)
    return found


@CHOICES
def test_exact_training_is_plain_training(recompute, runs):
    """With dropout and the statistics of a batch norm inside of them; ``train`` compares all that a step leaves."""
    net = test_step.Net(recompute=recompute)
    net.train(14)
    assert (net.step.captures, net.step.replays) == (1, 10)
    assert len(runs) == 15 * len(set(runs)), "once in each step, and in the capture"
    assert net.tide.ledger.held == 0
    assert net.tide._regions._begin is rewind, "eager steps are as they were"


@CHOICES
def test_a_replay_that_does_not_fit_is_repeated(recompute, monkeypatch: pytest.MonkeyPatch):
    net = test_step.Net(recompute=recompute, refresh=100)
    net.train(6)
    with monkeypatch.context() as patch:
        patch.setattr(Recording, "look", lambda self: [Overflow("4:recompute.input", 2, 1)])
        net.train(1)
    net.train(4)
    assert (net.step.captures, net.step.replays, len(net.step.overflows)) == (2, 3, 1)


def test_draws_are_rehearsed_captured_and_prepared_for_each_replay(monkeypatch: pytest.MonkeyPatch):
    log: list[str] = []

    class Noted(Repeats):
        def prepare(self) -> Any:
            log.append("prepare")
            return super().prepare()

        def begin_replay(self) -> None:
            log.append("begin")
            super().begin_replay()

        def end_replay(self) -> bool:
            log.append("end")
            return super().end_replay()

        @contextlib.contextmanager
        def rehearsed(self) -> Any:
            with super().rehearsed():
                yield
                log.append("rehearsed" if net.tide._regions._begin is not rewind else "not heard")

        @contextlib.contextmanager
        def captured(self) -> Any:
            with super().captured():
                yield
                log.append("captured" if net.tide._regions._begin is not rewind else "not heard")

    monkeypatch.setattr(step_module, "Repeats", Noted)
    net = test_step.Net(recompute="3")
    net.train(3)
    assert log == []
    net.train(1)
    assert log == ["rehearsed"]
    net.train(2)
    replay = ["begin", "captured", "end"]  # the stand-in runs the step once more
    assert log[1:] == ["prepare", "captured", *replay, *replay]


class TestStrays:
    """A replay that has drawn where nobody has provided for it is taken back, like one that did not fit."""

    def test_it_is_repeated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = test_step.Net(recompute="3", refresh=100)
        net.train(6)
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(Repeats, "end_replay", lambda self: False)
                net.train(1)
            net.train(4)
        assert (net.step.captures, net.step.replays, net.step.overflows) == (4, 5, [])

    def test_but_not_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        net = test_step.Net(recompute="3", refresh=100)
        net.train(6)
        monkeypatch.setattr(Repeats, "end_replay", lambda self: False)
        with pytest.raises(GraphError, match=r"3 times in a row the step has drawn other random numbers.*leave out of"):
            net.train(20)
        assert net.step.calls == 6 + 1 + 2 * 4


class Net(test_recording.Net):
    """Its two blocks are run again, from inputs under a bound."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(**options)
        self.tide.detach()
        self.model = nn.Sequential(
            nn.Linear(40, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Sequential(nn.Linear(64, 8), nn.ReLU())
        )
        self.plain = test_recording.copy.deepcopy(self.model)
        self.tide = lowtide.attach(self.model, "fixed", min_size=1000, recompute=True, boundary="0.1 std")
        self.pipeline = self.tide._pipeline


SITES = ["1:recompute.input", "2:recompute.input"]


@requires_compiler
def test_boundaries_are_payloads_of_the_graph(runs, monkeypatch):
    net = Net().warm_up()
    expected, before = net.run(net.plain), net.known()
    monkeypatch.setattr(test_recording._tickets.Ticket, "wait", lambda self: pytest.fail("somebody waits"))
    runs.clear()
    recording, got = net.record()
    monkeypatch.undo()
    assert 0 < test_recording.distance(got, expected) < 0.1
    assert runs == ["2", "1"]
    assert net.known() == before and recording.has_bounds
    assert [gauge.site for gauge in recording._gauges] == SITES
    assert recording.look() == []
    assert net.tide.ledger.held == 0


@requires_compiler
def test_a_boundary_that_does_not_fit_is_found():
    net = Net(batch=800).warm_up()
    for memo in net.pipeline.sites._memos.values():
        memo.rate = 1e-9
    recording, got = net.record()
    assert [item.site for item in recording.look()] == SITES
    assert any(bool(gradient.isnan().any()) for gradient in got), "nobody takes them for gradients"
    assert net.rooms.of(SITES[0]).slack == 1


@requires_compiler
def test_boundaries_have_other_dither_in_every_replay():
    net = Net().warm_up()
    first = net.record()[1]
    assert test_recording.distance(net.record()[1], first) == 0
    net.cell.advance()
    assert test_recording.distance(net.record()[1], first) > 1e-5


def test_boundaries_that_cannot_be_captured_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # as without a GPU
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    net = test_step.Net("fixed", recompute="[1-4]", warmup=3)
    with pytest.raises(GraphError, match=r"1:recompute\.input is held by the codec 'sz', which cannot be captured"):
        for _ in range(4):
            net.step(torch.randn(16, 6), torch.randn(16, 4))
    assert net.tide._regions._begin is rewind
