"""What happens to a graph that has become old: it is renewed, or makes way for another one, and who gets its memory."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_step import Net

from lowtide.codecs.bitmask import BitMask
from lowtide.graphs import step as step_module
from lowtide.graphs.recording import Overflow, Recording
from lowtide.graphs.rooms import Rooms
from lowtide.kernels._workspaces import Cell
from lowtide.records import Bound
from lowtide.sites import Memo, Sites, Survey

WARMUP, REFRESH, EAGER = 4, 6, 3


class Ageing(Recording):
    """Of a step whose bounds get old. The tests say whether new ones fit in, and whether rooms are too large."""

    fits, is_large = True, False

    def __init__(self, cell: Cell, rooms: Rooms, *, is_capturing: bool, **options: Any) -> None:
        super().__init__(cell, rooms, is_capturing=is_capturing, **options)
        self.has_bounds = True

    def is_wasteful(self) -> bool:
        return self.is_large

    def renew(self, memos: Iterable[Memo]) -> bool:
        return self.fits and super().renew(memos)


@pytest.fixture
def net(monkeypatch: pytest.MonkeyPatch) -> Net:
    """At the end of the first replays of its first graph; ``train`` compares all with plain training."""
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    monkeypatch.setattr(step_module, "Recording", Ageing)
    monkeypatch.setattr(Ageing, "fits", True)
    monkeypatch.setattr(Ageing, "is_large", False)
    net = Net(warmup=WARMUP, refresh=REFRESH)
    net.train(WARMUP + REFRESH)
    assert (net.step.captures, net.step.replays, net.step.renewals) == (1, REFRESH, 0)
    return net


def counts(net: Net) -> tuple[int, int, int]:
    return net.step.captures, net.step.renewals, net.step.replays


def test_a_graph_lives_on_where_its_tables_can_be_renewed(net):
    graph = net.step._graph
    for turn in range(1, 4):
        net.train(EAGER)
        assert net.step._graph is graph, "eager steps run beside it"
        net.train(REFRESH)
        assert counts(net) == (1, turn, (turn + 1) * REFRESH)
    assert net.step._graph is graph and net.machine.captures == 1
    assert "24 of 37 steps replayed, 1 captures, 3 renewals" in net.step.describe()


def test_nobody_waits_for_models_that_are_being_fitted(net, monkeypatch: pytest.MonkeyPatch):
    """The graph is replayed meanwhile, by the tables that it has."""
    is_fitting, waits = [True], []
    monkeypatch.setattr(Sites, "is_fitting", property(lambda sites: is_fitting[0]))
    monkeypatch.setattr(Sites, "wait", lambda sites: waits.append(net.step.calls))
    net.train(EAGER - 1)
    assert waits == [net.step.calls - 1], "codes reach the host after the step that measures; not after the next one"
    net.train(20)
    assert counts(net) == (1, 0, REFRESH + 20)
    is_fitting[0] = False
    net.train(1)
    assert counts(net) == (1, 0, REFRESH + 20), "the rehearsal"
    net.train(REFRESH)
    assert counts(net) == (1, 1, 2 * REFRESH + 20)
    net.train(1)
    assert counts(net) == (1, 1, 2 * REFRESH + 20), "and so on"


def test_a_model_is_on_its_way_from_the_survey_to_the_next_save():
    class Slow:
        has_begun, may_end = Event(), Event()

        def fit(self, *args: object) -> str:
            self.has_begun.set()
            assert self.may_end.wait(60)
            return "plan"

    codec, sites = Slow(), Sites(8)
    memo = Memo("0.1 std", Bound.absolute(0.1), plan=SimpleNamespace(grid=None))
    sites._memos["a", "", "", ()] = memo
    assert not sites.is_fitting
    memo.survey = Survey(torch.zeros(4, dtype=torch.int16))
    assert not sites.is_fitting, "its codes may not have arrived"
    assert memo.survey.fitted(codec, memo, torch.zeros(4)) is None and codec.has_begun.wait(60)
    assert sites.is_fitting
    codec.may_end.set()
    sites.wait()
    assert not sites.is_fitting and memo.survey.fitted(codec, memo, torch.zeros(4)) == "plan"


def test_without_a_graph_models_are_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    monkeypatch.setattr(Sites, "is_fitting", True)
    net = Net(warmup=WARMUP, refresh=REFRESH)
    net.train(WARMUP + 1)
    assert counts(net) == (1, 0, 1)


def test_gradients_add_up_across_a_renewal(net):
    """Those that the last replay has left are the graph's own tensors, and eager steps add to them."""
    net.train(EAGER + 2, zero=False)
    assert counts(net) == (1, 1, REFRESH + 2)


def test_another_graph_takes_over_the_pool(net):
    graph, Ageing.fits = net.step._graph, False
    net.train(EAGER + 1)
    assert counts(net) == (2, 0, REFRESH + 1)
    assert net.machine.handed_on == [None, graph] and net.step._graph is not graph
    assert net.step._before is None, "or the pool would never be free"
    Ageing.fits = True
    net.train(REFRESH - 1 + EAGER + 1)
    assert counts(net) == (2, 1, 2 * REFRESH + 1)


def test_old_tensors_are_gone_before_the_pool_is_used_again(net, monkeypatch: pytest.MonkeyPatch):
    Ageing.fits = False
    net.train(EAGER)
    capture, step = net.machine.capture, net.step

    def look(body, before, generators):
        assert before is not None and step._graph is None and step._recording is None and step._output is None
        assert not step._gradients._static
        return capture(body, before, generators)

    monkeypatch.setattr(net.machine, "capture", look)
    net.train(1)
    assert step.captures == 2


def test_rooms_that_are_too_large_are_given_back(net):
    """Another pool: in the old one smaller payloads would leave gaps, and free nothing."""
    Ageing.is_large = True
    net.train(EAGER + 1)
    assert net.machine.handed_on == [None, None] and counts(net) == (2, 0, REFRESH + 1)


def test_where_memory_is_scarce_the_graph_goes_before_eager_steps(net):
    net.train(EAGER + REFRESH - 1)
    net.machine.is_roomy = False
    net.train(1)
    assert net.step._graph is None and net.step.nbytes == 0
    net.train(EAGER + 1)
    assert counts(net) == (2, 1, 2 * REFRESH + 1) and net.machine.handed_on == [None, None]


def test_a_pool_that_waits_goes_when_memory_becomes_scarce(net):
    net.tide._moves += 1
    net.train(1)
    assert net.step._graph is None and net.step.nbytes == 1000
    net.machine.is_roomy, net.measured = False, True
    net.train(1)
    assert net.step.nbytes == 0
    net.measured = False
    net.train(EAGER + 1)
    assert net.machine.handed_on == [None, None]


def test_bounds_that_have_moved_take_another_graph_in_the_same_pool(net):
    net.train(EAGER + 1)
    graph = net.step._graph
    net.tide._moves += 1
    net.train(EAGER + 1)
    assert counts(net) == (2, 1, REFRESH + 2) and net.machine.handed_on == [None, graph]


def test_a_payload_that_does_not_fit_takes_another_graph_in_the_same_pool(net, monkeypatch: pytest.MonkeyPatch):
    net.train(EAGER + 1)
    graph = net.step._graph
    monkeypatch.setattr(Recording, "look", lambda self: [Overflow("a", 2, 1)])
    net.train(1)
    monkeypatch.undo()
    monkeypatch.setattr(step_module, "Recording", Ageing)
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    net.train(EAGER + 1)
    assert net.machine.handed_on == [None, graph] and net.step.captures == 2


def test_inputs_of_another_shape_take_another_pool(net):
    net.train(EAGER + 1)
    with pytest.warns(UserWarning, match="inputs of one shape"):
        net.train(2 * WARMUP + 1, count=5)
    assert net.machine.handed_on == [None, None]


def test_weights_that_lie_elsewhere_take_another_graph(net):
    net.train(EAGER)
    with torch.no_grad():
        net.model[0].weight.data = net.model[0].weight.data.clone()
    net.train(1)
    assert counts(net) == (2, 0, REFRESH + 1)


def test_a_buffer_that_begins_to_change_takes_another_graph(net):
    """There is no copy of it to go back to."""
    net.train(1)
    net.step._buffers._changed["new"] = torch.zeros(1)
    net.train(EAGER)
    assert counts(net) == (2, 0, REFRESH + 1)


def test_a_capture_that_fails_can_be_repeated(net, monkeypatch: pytest.MonkeyPatch):
    graph, Ageing.fits = net.step._graph, False
    net.train(EAGER)
    capture = net.machine.capture
    monkeypatch.setattr(net.machine, "capture", lambda *args: pytest.fail("broken", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="broken"):
        net.step(torch.randn(16, 6), torch.randn(16, 4))
    monkeypatch.setattr(net.machine, "capture", capture)
    net.train(2)
    assert net.machine.handed_on == [None, graph] and counts(net) == (2, 0, REFRESH + 2)


def test_what_does_not_get_old_is_not_renewed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    monkeypatch.setattr(Recording, "renew", lambda *args: pytest.fail("there is nothing to renew"))
    net = Net(warmup=WARMUP, refresh=REFRESH)
    net.train(WARMUP + 3 * REFRESH)
    assert counts(net) == (1, 0, 3 * REFRESH)
