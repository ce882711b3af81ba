"""A step that is captured and replayed does what it does eagerly, whatever happens between. The GPU is a stand-in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from fake_machine import FakeMachine
from torch import Tensor, nn

import lowtide
from lowtide.codecs.bitmask import BitMask
from lowtide.errors import GraphError, LowtideWarning
from lowtide.graphs import step as step_module
from lowtide.graphs.recording import Overflow, Recording
from lowtide.graphs.rooms import Rooms
from lowtide.graphs.step import GraphStep
from lowtide.kernels._workspaces import Cell
from lowtide.sites import Memo


@pytest.fixture(autouse=True)
def _masks_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by their twin on a GPU."""
    monkeypatch.setattr(BitMask, "replays", True, raising=False)


class Net:
    """A model in training, with Lowtide attached."""

    def __init__(
        self,
        method: str = "exact",
        *,
        warmup: int = 4,
        refresh: int = 6,
        momentum: float | None = None,
        beside: bool = False,
        compiled: bool = False,
        **options: object,
    ) -> None:
        """With ``momentum``, there is an optimizer, and it tells Lowtide when a step has ended."""
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.25)),
            *(nn.Linear(8, 4), nn.ReLU(), nn.Dropout(0.25)),
        )
        self.plain = copy.deepcopy(self.model)
        if momentum is not None:
            self.optimizer = options["optimizer"] = torch.optim.SGD(self.model.parameters(), 0.1, momentum=momentum)
        self.tide = lowtide.attach(self.model, method, min_size=0, **options)
        if compiled:
            self.tide.compile(backend="aot_eager", fullgraph=True)
        self.machine = FakeMachine(self.model)
        self.measured = False
        self.step = GraphStep(
            lambda x, y: self.run(self.model, x, y), self.model, self.model.parameters(), self.tide._pipeline,
            self.machine, Cell(torch.device("cpu")), warmup=warmup, refresh=refresh, slack=0.125,
            is_measured=lambda: self.measured or self.tide._capture.on_named is not None,
            moves=lambda: self.tide._moves, beside=beside, regions=self.tide._regions,
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


def test_decoding_ahead_follows_the_order_of_the_rehearsal() -> None:
    net = Net(beside=True)
    net.train(4)
    order = list(net.step._order)
    assert order and len({number for number, _ in order}) > 1, "the rehearsal has been listened to"
    assert order[0][0] > order[-1][0], "backward begins with what was saved last"
    net.train(1)
    (beside,) = net.machine.besides
    assert net.step.replays == 1
    assert beside.joins > 2, "for payloads, not only at the ends of the capture and of the replay"
    assert not Net().machine.besides


def test_a_step_that_records_its_loss() -> None:
    """In eager calls, in the capture and in what is replayed: the loss is compressed, and the block ends each time."""
    net = Net()
    names: list[set[str]] = []

    def run(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with net.tide.recording():  # around the plain model, too, whose step it must not change
            loss = (model(x) - y).relu().mean()
        loss.backward()
        names.append({entry.name for entry in net.tide.report().sites if entry.codec == "bitmask"})
        return loss

    net.run = run  # type: ignore[method-assign]
    net.train(9)
    assert net.step.captures and net.step.replays
    assert all("(model):relu.result" in found for found in names)
    assert torch._C._len_torch_function_stack() == 0


def test_what_ran_beside_a_capture_that_failed_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net(beside=True)
    net.train(4)
    (beside,) = net.machine.besides
    capture = net.machine.capture
    monkeypatch.setattr(net.machine, "capture", lambda *args: pytest.fail("broken", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="broken"):
        net.step(torch.randn(16, 6), torch.randn(16, 4))
    assert beside.failures == 1
    monkeypatch.setattr(net.machine, "capture", capture)
    net.train(1)
    assert (net.step.captures, beside.failures) == (1, 1)


def test_eager_steps_and_replays_leave_the_same():
    net = Net()
    net.train(14)
    assert (net.step.captures, net.step.replays, net.step.calls) == (1, 10, 14)
    assert "CUDA graph: 10 of 14 steps replayed, 1 captures" in str(net.tide.report())
    assert net.tide.ledger.step == 14 and net.tide.ledger.held == 0
    assert net.tide.report().sites, "what the captured step held is what is reported"
    batch, buffers = 4 * 16 * (6 + 4), 4 * (8 + 8) + 8
    assert net.step.nbytes == 1000 + batch + buffers


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

    def overflow(self: Recording) -> list[Overflow]:
        for item in net.model.parameters():
            assert item.grad is None
        for _, static in net.step._gradients._static:
            static.fill_(torch.nan)
        return [Overflow("0:addmm.mat1", 2000, 1000), Overflow("4:addmm.mat1", 20, 10)]

    monkeypatch.setattr(Recording, "look", overflow)
    net.train(1)
    monkeypatch.setattr(Recording, "look", look)
    assert net.step._graph is None and net.step.nbytes == 1000, "its pool is for the next one"
    net.train(6)
    assert (net.step.captures, net.step.replays) == (2, 2 + 3)
    expected = "the last one in call 7: 0:addmm.mat1 needed 2000 words and had 1000 and 1 more"
    assert f"1 overflows, each repeated eagerly ({expected})" in net.step.describe()


def test_what_never_fits_is_told_and_not_tried_for_ever(monkeypatch: pytest.MonkeyPatch):
    """As a tensor with NaN in every step, where there is no room that could grow."""
    net = Net(refresh=100)
    net.train(6)
    monkeypatch.setattr(Recording, "look", lambda self: [Overflow("0:addmm.mat1", 1, 0)])
    with pytest.raises(GraphError, match=r"0:addmm\.mat1 has not fitted its codec in 3 replays in a row"):
        net.train(20)
    assert len(net.step.overflows) == 3


def test_an_overflow_while_gradients_add_up(monkeypatch: pytest.MonkeyPatch):
    net = Net(refresh=100)
    net.train(6)
    monkeypatch.setattr(Recording, "look", lambda self: [Overflow("", 2, 1)])
    net.train(2, zero=False)


def test_steps_that_a_controller_measures_are_eager():
    net = Net(refresh=100)
    net.train(6)
    net.measured = True
    net.train(2)
    net.measured = False
    net.train(1)
    assert (net.step.captures, net.step.replays) == (1, 3), "the graph is as good as before"
    assert "3 of 9 steps replayed, 1 captures, 2 steps measured for the method" in net.step.describe()
    net.machine.is_roomy, net.measured = False, True
    net.train(1)
    assert net.step._graph is None, "there is no memory for both"
    net.measured = False
    net.train(4)
    assert net.step.captures == 2


@pytest.mark.parametrize(("momentum", "replays", "measured"), [(0.9, 5, 1), (0.0, 0, 10)])
def test_comet_needs_no_eager_steps_where_the_optimizer_has_a_momentum(momentum, replays, measured):
    """It keeps one itself where there is none, in the 32 steps before each of its periods."""
    net = Net("comet", warmup=4, momentum=momentum, period=12)
    for _ in range(10):
        net.optimizer.zero_grad()
        net.step(torch.randn(16, 6), torch.randn(16, 4))
        net.optimizer.step()
    assert (net.step.replays, net.step.measured) == (replays, measured)


def test_bounds_that_have_moved_make_another_graph():
    net = Net(refresh=100)
    net.train(6)
    net.tide._moves += 1
    net.train(4)
    assert net.step.captures == 2 and net.step.replays == 3


class Sized(Recording):
    """Of a step with one payload, whose bound gets old, as does its graph: no other tables fit in.

    ``needs`` are those of replays, ``rates`` of eager payloads.
    """

    needs: ClassVar[list[float]] = []
    rates: ClassVar[list[float]] = []
    rooms: ClassVar[list[float]] = []

    def __init__(self, cell: Cell, rooms: Rooms, *, is_capturing: bool, **options: Any) -> None:
        super().__init__(cell, rooms, is_capturing=is_capturing, **options)
        self.has_bounds, self._room = True, rooms.of("a")
        if is_capturing:
            self.rooms.append(self._room.make(self.rates.pop(0)))

    def renew(self, memos: Iterable[Memo]) -> bool:
        return False

    def look(self) -> list[Overflow]:
        need = self.needs.pop(0)
        self._room.note(need)
        if need <= self.rooms[-1]:
            return []
        self._room.widen(need / self.rooms[-1] - 1)
        return [Overflow("a", int(1000 * need), int(1000 * self.rooms[-1]))]


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> type[Sized]:
    monkeypatch.setattr(step_module, "Recording", Sized)
    for name in ("needs", "rates", "rooms"):
        monkeypatch.setattr(Sized, name, [])
    return Sized


def test_room_follows_what_payloads_need(sized):
    """From graph to graph; with warmup 4 and refresh 6 a graph is six replays, and three eager steps lie between."""
    net = Net(warmup=4, refresh=6)
    sized.rates = [1.0, 1.0, 1.0, 1.0, 1.0]
    sized.needs = [1.0] * 6 + [1.01, *[1.0] * 5] + [1.01] * 6 + [1.0, 1.1, 1.0]
    net.train(4 + 6 + 3 + 6 + 3 + 6 + 3 + 2)
    assert sized.rooms == pytest.approx([1.125, 1.0625, 1.01 * 1.03125, 1.01 * 1.015625])
    assert len(net.step.overflows) == 1 and net.step.captures == 4
    net.train(4)
    short = 1.1 / (1.01 * 1.015625) - 1
    assert sized.rooms[4:] == pytest.approx([1.1 * (1 + 2 * short)]), "what the last replay needed is known"


def test_growth_within_a_graph_is_provided_for(sized):
    net = Net(warmup=4, refresh=6)
    sized.rates, sized.needs = [1.0, 1.08], [1.0, 1.02, 1.04, 1.06, 1.08, 1.1]
    net.train(4 + 6 + 3)
    sized.needs = [1.1]
    net.train(1)
    assert sized.rooms[1] == pytest.approx(1.1 * 1.2)


@pytest.mark.parametrize(("replays", "slack"), [(15, 1 / 16), (16, 1 / 32)])
def test_what_payloads_needed_under_another_bound_is_forgotten(sized, replays, slack):
    """But not how they vary, if there were replays enough to tell."""
    net = Net(warmup=4, refresh=100)
    sized.rates, sized.needs = [1.0, 1.0, 0.5], [1.0] * (16 + replays) + [0.5]
    net.train(4 + 16 + 3 + replays)
    net.tide._moves += 1
    net.train(4)
    assert sized.rooms == pytest.approx([1.125, 1.0625, 0.5 * (1 + slack)])


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


@pytest.mark.parametrize(("method", "codec", "calls"), [("fixed", "sz", 4), ("actnn", "norm_groups", 5)])
def test_a_codec_that_cannot_be_captured_is_named(method, codec, calls):
    """Once a step has been captured, and not earlier: the first one of ``actnn`` is measured."""
    net = Net(method, warmup=4, momentum=0.9)

    def train() -> None:
        net.optimizer.zero_grad()
        net.step(torch.randn(16, 6), torch.randn(16, 4))
        net.optimizer.step()

    for _ in range(calls):
        train()
    with pytest.raises(
        GraphError, match=f"is held by the codec '{codec}', which cannot be captured.*Those that can: bitmask"
    ):
        net.step(torch.randn(16, 6), torch.randn(16, 4))
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
