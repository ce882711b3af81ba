"""Pairs that share a payload while a graph is captured. The kernels run in the emulator."""

from __future__ import annotations

import copy

import torch
from test_recording import Net, _as_on_a_gpu, distance  # noqa: F401  (a fixture)
from torch import nn

import lowtide
from lowtide.graphs.rooms import Rooms
from lowtide.graphs.tables import Tables
from lowtide.kernels._workspaces import Cell
from lowtide.records import Bound


class PairNet(Net):
    """A batch norm and ReLU between two layers."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(40, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
        nn.init.normal_(self.model[1].bias, 0.0, 0.5)
        self.plain = copy.deepcopy(self.model)
        self.tide = lowtide.attach(self.model, "fixed", linear="0.2 std", norm="0.5 std", min_size=1000, remake=True)
        self.pipeline = self.tide._pipeline
        self.cell, self.rooms = Cell(torch.device("cpu")), Rooms(0.125)
        self.x = torch.randn(640, 40)


def test_a_captured_step_has_one_payload_for_both(monkeypatch):
    net = PairNet().warm_up()
    expected, before = net.run(net.plain), net.known()
    recording, got = net.record_at_once(monkeypatch)
    assert 0 < distance(got, expected) < 0.1
    assert net.known() == before, "nothing was learnt"
    assert len(recording._gauges) == 1 and recording.look() == [] and recording.has_bounds
    assert net.tide.ledger.held == 0


def test_bounds_of_a_graph_are_its_own():
    """A launch that was captured reads them where they were; a refresh writes them anew."""
    net = PairNet().warm_up()
    memos = net.pipeline.sites.memos()
    alone = [memo for memo in memos if memo.plan is None]
    assert len(memos) == 3 and len(alone) == 2, "two tensors, and one of both"
    tables = Tables(memos)
    for memo in alone:
        own = tables.bound(memo)
        assert torch.equal(own.value, memo.bound.value) and own.value.data_ptr() != memo.bound.value.data_ptr()
        memo.bound = Bound(memo.bound.value * 2, memo.bound.axes)
        assert tables.renew(memos) and tables.bound(memo) is own and torch.equal(own.value, memo.bound.value)
    assert tables.bound(next(memo for memo in memos if memo.plan is not None)) is None
    alone[0].bound = Bound(alone[0].bound.value[:-1], alone[0].bound.axes)
    assert not tables.renew(memos), "there is no place for it"


def test_what_nothing_is_known_of_is_kept():
    net = PairNet().warm_up()
    net.pipeline.sites._memos.clear()
    net.pipeline._forget()
    recording, got = net.record()
    assert not recording._gauges and distance(got, net.run(net.plain)) < 1e-6
