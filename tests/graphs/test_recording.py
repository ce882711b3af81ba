"""Saves while a graph is captured: nothing is learnt, nothing waits, room is fixed. The kernels run in the emulator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from simt import requires_compiler
from test_kernel_sz_cuda import emulated
from torch import nn

import lowtide
from lowtide import kernels
from lowtide.codecs.bitmask import BitMask
from lowtide.graphs.recording import Recording
from lowtide.graphs.rooms import Rooms
from lowtide.graphs.tables import Tables
from lowtide.kernels import _rows, _sz_cuda, _tickets
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.kernels._workspaces import Cell

pytestmark = requires_compiler


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = kernels.twin
    monkeypatch.setattr(
        kernels, "twin", lambda codec, *like: SzCuda.of(codec) if codec.name == "sz" else twin(codec, *like)
    )
    monkeypatch.setattr(_sz_cuda, "_function", emulated)
    monkeypatch.setattr(_sz_cuda, "current_stream", lambda device: 0)
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    monkeypatch.setattr(_rows, "measure", lambda *args: None)
    monkeypatch.setattr(BitMask, "replays", True, raising=False)


class Net:
    def __init__(self, norm: nn.Module | None = None, batch: int = 80, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), norm or nn.LayerNorm(64), nn.Linear(64, 8))
        self.plain = copy.deepcopy(self.model)
        self.tide = lowtide.attach(self.model, "fixed", linear="0.2 std", norm="0.2 std", min_size=1000, **options)
        self.pipeline = self.tide._pipeline
        self.cell, self.rooms = Cell(torch.device("cpu")), Rooms(0.125)
        self.x = torch.randn(batch, 40)

    def run(self, model: nn.Module | None = None) -> list[torch.Tensor]:
        model = model if model is not None else self.model
        model.zero_grad()
        model(self.x * 1).square().mean().backward()
        return [item.grad.clone() for item in model.parameters()]

    def record(self, *, is_capturing: bool = True) -> tuple[Recording, list[torch.Tensor]]:
        self.rooms.begin()
        tables = Tables(self.pipeline.sites.memos())
        recording = Recording(self.cell, self.rooms, is_capturing=is_capturing, tables=tables)
        with self.pipeline.recorded(recording):
            return recording, self.run()

    def record_at_once(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Recording, list[torch.Tensor]]:
        """The same, and nobody waits for the device."""
        with monkeypatch.context() as patched:
            patched.setattr(_tickets.Ticket, "wait", lambda ticket: pytest.fail("somebody waits"))
            return self.record()

    def known(self) -> list[object]:
        return [(memo.saves, memo.rate, memo.plan, memo.survey) for memo in self.pipeline.sites._memos.values()]

    def warm_up(self) -> Net:
        for _ in range(3):
            self.run()
            self.tide.step()
        self.pipeline.finish()
        return self


@pytest.fixture
def net() -> Net:
    return Net().warm_up()


def distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    error = sum(float((one - other).square().sum()) for one, other in zip(some, others, strict=True))
    return (error / sum(float(other.square().sum()) for other in others)) ** 0.5


def test_a_captured_step_is_like_any_other_and_leaves_no_trace(net, monkeypatch):
    expected, before = net.run(net.plain), net.known()
    recording, got = net.record_at_once(monkeypatch)
    assert 0 < distance(got, expected) < 0.1
    assert net.known() == before
    assert len(net.pipeline.sites._memos) == 2 == len(recording._gauges) and recording.has_bounds
    assert recording.look() == []
    assert net.tide.ledger.held == 0 and net.pipeline.coded > 0


def test_what_is_made_again_needs_no_room():
    """The last layer's input is made of the norm's: one payload in place of two."""
    net = Net(remake=True).warm_up()
    expected = net.run(net.plain)
    recording, got = net.record()
    assert 0 < distance(got, expected) < 0.1
    assert len(net.pipeline.sites._memos) == 1 == len(recording._gauges)
    assert recording.look() == [] and net.tide.ledger.held == 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_gradient_passes_through_the_payload(is_recorded, monkeypatch):
    """ReLU's mask lives in what the layer after it reads, and is never written."""
    net, calls = Net(nn.Identity(), 1280, coder="rans").warm_up(), []
    for name in ("decode", "nonzero", "gate"):
        original = getattr(SzCuda, name)

        def noted(self, *arguments, _name=name, _original=original):
            calls.append(_name)
            return _original(self, *arguments)

        monkeypatch.setattr(SzCuda, name, noted)
    expected = net.run(net.plain)
    got = net.record()[1] if is_recorded else net.run()
    assert calls == ["decode", "gate"]
    assert 0 < distance(got, expected) < 0.1
    assert net.tide.ledger.held == 0


def test_backward_again_passes_the_same(net):
    loss = net.model(net.x * 1).square().mean()
    first = torch.autograd.grad(loss, list(net.model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(net.model.parameters()))
    assert distance(list(first), list(again)) == 0


def test_every_recording_has_other_dither(net):
    first = net.record()[1]
    assert distance(net.record()[1], first) == 0, "the same number, whatever the step"
    net.tide.step()
    assert distance(net.record()[1], first) == 0
    net.cell.advance()
    assert distance(net.record()[1], first) > 1e-4


def test_what_does_not_fit_is_found(net):
    sites = net.pipeline.sites
    names = [key[0] for key in sites._memos]
    for memo in sites._memos.values():
        memo.rate = 1e-9
    expected = net.run(net.plain)
    recording, got = net.record()
    assert not recording.look() and distance(got, expected) < 0.1, "small tensors fit all the same"
    net.x = torch.randn(800, 40)
    recording, got = net.record()
    found = recording.look()
    assert sorted(item.site for item in found) == sorted(names), "all of them"
    first = found[0]
    assert first.needed > first.room == 1024
    assert any(bool(gradient.isnan().any()) for gradient in got), "nobody takes them for gradients"
    assert str(first) == f"{first.site} needed {first.needed} words and had 1024"
    assert all(net.rooms.of(name).slack == 1 for name in names), "several times as much as there was"
    recording.begin_replay()
    assert recording._gauges[0].ticket.status == -1


def test_a_site_that_did_not_fit_has_more_room_and_the_others_have_as_much_as_before(net):
    net.x = torch.randn(800, 40)
    for _ in range(2):
        net.run()
        net.tide.step()
    net.pipeline.finish()
    (small, large), memos = (sorted(net.pipeline.sites._memos, key=lambda key: key[0])), net.pipeline.sites._memos
    assert all(net.rooms.of(key[0]).slack == 0.125 for key in (small, large))
    rate = memos[large].rate
    memos[large].rate = rate / 2
    recording, _ = net.record()
    words = {gauge.site: gauge.words for gauge in recording._gauges}
    numel = {gauge.site: gauge.numel for gauge in recording._gauges}
    assert words[small[0]] == int(1.125 * memos[small].rate * numel[small[0]]) + 1024, "no share but the slack"
    assert words[large[0]] == int(1.125 * rate / 2 * numel[large[0]]) + 1024
    (found,) = recording.look()
    assert found.site == large[0]
    assert net.rooms.of(small[0]).slack == 0.125
    assert net.rooms.of(large[0]).slack == pytest.approx(2 * (found.needed / found.room - 1))
    memos[large].rate = 0.75 * rate
    recording, _ = net.record()
    assert not recording.look(), "the last replay is known to have needed more"
    (gauge,) = [gauge for gauge in recording._gauges if gauge.site == large[0]]
    needed = found.needed / gauge.numel * (1 + net.rooms.of(large[0]).slack)
    assert gauge.words == int(min(needed, 1.5 * rate) * gauge.numel) + 1024


def test_a_rehearsal_learns_and_uses_the_kernels_of_graphs(net, monkeypatch):
    asked = []
    monkeypatch.setattr(
        _sz_cuda, "_function", lambda *args, replayed=False, **rest: asked.append(replayed) or emulated(*args, **rest)
    )
    expected, saves = net.run(net.plain), [item[0] for item in net.known()]
    recording, got = net.record(is_capturing=False)
    assert distance(got, expected) < 0.1 and not recording._gauges
    assert asked.count(True) == 5, "two encoders, two decoders, and one for the mask of ReLU"
    assert [item[0] for item in net.known()] == [count + 1 for count in saves]


def test_a_site_of_which_nothing_is_known_is_kept_as_it_is(net):
    net.pipeline.sites._memos.clear()
    recording, got = net.record()
    assert distance(got, net.run(net.plain)) < 1e-6
    reasons = {entry.reason for entry in net.tide.ledger.sites.values()}
    assert any("before the graph was captured" in reason for reason in reasons)
    assert not net.pipeline.sites._memos and not recording.has_bounds
