"""A step that is captured and replayed does what it does eagerly, whatever happens between. The GPU is a stand-in."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from fake_machine import FakeMachine
from torch import Tensor, nn

import lowtide
from lowtide.codecs.bitmask import BitMask
from lowtide.errors import GraphError, LowtideWarning
from lowtide.graphs.recording import Overflow, Recording
from lowtide.graphs.step import GraphStep
from lowtide.kernels._workspaces import Cell


@pytest.fixture(autouse=True)
def _masks_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by their twin on a GPU."""
    monkeypatch.setattr(BitMask, "replays", True, raising=False)


class Net:
    """A model in training, with Lowtide attached."""

    def __init__(self, method: str = "exact", *, warmup: int = 4, refresh: int = 6, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25), nn.Linear(8, 4), nn.ReLU()
        )
        self.plain = copy.deepcopy(self.model)
        self.tide = lowtide.attach(self.model, method, min_size=0, **options)
        self.machine = FakeMachine(self.model)
        self.measured = False
        self.step = GraphStep(
            lambda x, y: self.run(self.model, x, y), self.model, self.model.parameters(), self.tide._pipeline,
            self.machine, Cell(torch.device("cpu")), warmup=warmup, refresh=refresh, slack=0.125,
            is_measured=lambda: self.measured, moves=lambda: self.tide._moves,
        )  # fmt: skip
        self.tide._graphs.add(self.step)

    @staticmethod
    def run(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    def train(self, calls: int, *, zero: bool = True, count: int = 16) -> None:
        """Lowtide's model and a plain one, from the same random numbers; all that a step leaves must be equal."""
        for _ in range(calls):
            x, y, state = torch.randn(count, 6), torch.randn(count, 4), torch.get_rng_state()
            losses = []
            for model, step in ((self.plain, lambda x, y: self.run(self.plain, x, y)), (self.model, self.step)):
                torch.set_rng_state(state)
                if zero:
                    model.zero_grad()
                losses.append(step(x, y))
            self.tide.step()
            assert torch.equal(losses[0], losses[1]) and not losses[1].requires_grad
            for one, other in zip(self.plain.parameters(), self.model.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad)
            for one, other in zip(self.plain.buffers(), self.model.buffers(), strict=True):
                assert torch.equal(one, other)
            with torch.no_grad():
                for model in (self.plain, self.model):
                    for item in model.parameters():
                        item.sub_(item.grad, alpha=0.1)


def test_eager_steps_and_replays_leave_the_same():
    net = Net()
    net.train(14)
    assert (net.step.captures, net.step.replays, net.step.calls) == (1, 10, 14)
    assert "CUDA graph: 10 of 14 steps replayed, 1 captures" in str(net.tide.report())
    assert net.tide.ledger.step == 14 and net.tide.ledger.held == 0
    assert net.tide.report().sites, "what the captured step held is what is reported"


def test_gradients_add_up_as_backward_adds_them():
    net = Net()
    net.train(5)
    net.train(4, zero=False)
    assert net.step.replays == 5


def test_a_replay_that_does_not_fit_is_repeated(monkeypatch: pytest.MonkeyPatch):
    """Its gradients are garbage by then, and its statistics of the batch have been counted once already."""
    net = Net(refresh=100)
    net.train(6)
    look = Recording.look

    def overflow(self: Recording) -> Overflow | None:
        for item in net.model.parameters():
            assert item.grad is None
        for _, static in net.step._gradients._static:
            static.fill_(torch.nan)
        return Overflow("0:addmm.mat1", 2000, 1000)

    monkeypatch.setattr(Recording, "look", overflow)
    net.train(1)
    monkeypatch.setattr(Recording, "look", look)
    assert net.step._graph is None and net.step._slack == 0.25
    net.train(6)
    assert (net.step.captures, net.step.replays) == (2, 2 + 3)
    assert (
        "1 overflows, each repeated eagerly (the last one in call 7: 0:addmm.mat1 needed 2000 words and had 1000)"
        in (net.step.describe())
    )


def test_an_overflow_while_gradients_add_up(monkeypatch: pytest.MonkeyPatch):
    net = Net(refresh=100)
    net.train(6)
    monkeypatch.setattr(Recording, "look", lambda self: Overflow("", 2, 1))
    net.train(2, zero=False)


def test_steps_that_a_controller_measures_are_eager():
    net = Net(refresh=100)
    net.train(6)
    net.measured = True
    net.train(2)
    net.measured = False
    net.train(1)
    assert (net.step.captures, net.step.replays) == (1, 3), "the graph is as good as before"
    net.machine.is_roomy, net.measured = False, True
    net.train(1)
    assert net.step._graph is None, "there is no memory for both"
    net.measured = False
    net.train(4)
    assert net.step.captures == 2


def test_bounds_that_have_moved_make_another_graph():
    net = Net(refresh=100)
    net.train(6)
    net.tide._moves += 1
    net.train(4)
    assert net.step.captures == 2 and net.step.replays == 3


def test_inputs_of_another_shape_run_eagerly_until_they_are_the_rule():
    net = Net(warmup=4)
    net.train(6)
    with pytest.warns(LowtideWarning, match="inputs of one shape"):
        net.train(1, count=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.train(2)
        assert (net.step.captures, net.step.replays) == (1, 4)
        net.train(3, count=5)
        assert net.step._graph is not None
        net.train(6, count=5)
    assert net.step.captures == 2 and net.step._inputs[0].shape == (5, 6)


def test_a_codec_that_cannot_be_captured_is_named():
    net = Net("fixed", warmup=4)
    net.train_once = lambda: net.step(torch.randn(16, 6), torch.randn(16, 4))
    for _ in range(4):
        net.train_once()
    with pytest.raises(
        GraphError, match=r"is held by the codec 'sz', which cannot be captured.*Those that can: bitmask"
    ):
        net.train_once()
    assert not net.tide._pipeline._is_capturing
    assert all(item.grad is not None for item in net.model.parameters()), "as the last eager step has left them"


def test_inputs_that_need_a_gradient_are_refused():
    net = Net(warmup=3)
    net.train(3)
    with pytest.raises(GraphError, match="input 0 of the step needs a gradient"):
        net.step(torch.randn(16, 6, requires_grad=True), torch.randn(16, 4))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"check": True}, "check compares"),
        ({"recompute": True}, "leave recompute out"),
        ({"store": "host"}, "store='device'"),
        ({}, "a model on an NVIDIA GPU; this one is on cpu"),
    ],
)
def test_sessions_without_graphs(options, match):
    tide = lowtide.attach(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU())), "exact", **options)
    with pytest.raises(GraphError, match=match):
        tide.graph(lambda: None)
    tide.detach()
    with pytest.raises(GraphError, match="needs a model"):
        tide.graph(lambda: None)
