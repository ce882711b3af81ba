"""Log-probabilities that are stored as probabilities while a graph is captured. The kernels run in the emulator."""

from __future__ import annotations

import copy

import pytest
import torch
from test_recording import Net, _as_on_a_gpu, distance  # noqa: F401  (a fixture)
from torch import nn

import lowtide
from lowtide.graphs.rooms import Rooms
from lowtide.kernels._workspaces import Cell


class Classifier(Net):
    """Two thousand classes, and a loss that reads a few of them."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(40, 2000), nn.LogSoftmax(-1))
        self.model[0].weight.data *= 12
        self.plain = copy.deepcopy(self.model)
        self.tide = lowtide.attach(
            self.model, "fixed", linear="0.02 std", log_probability="0.001 probability", coder="rans", min_size=10_000
        )
        self.pipeline = self.tide._pipeline
        self.cell, self.rooms = Cell(torch.device("cpu")), Rooms(0.125)
        self.x = torch.randn(64, 40)

    def run(self, model: nn.Module | None = None) -> list[torch.Tensor]:
        model = model if model is not None else self.model
        model.zero_grad()
        model(self.x * 1)[:, 7].mean().backward()
        return [item.grad.clone() for item in model.parameters()]


def test_a_captured_step_is_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Classifier().warm_up()
    expected, before = net.run(net.plain), net.known()
    recording, got = net.record_at_once(monkeypatch)
    assert 0 < distance(got, expected) < 0.1
    assert net.known() == before, "nothing was learnt"
    assert len(recording._gauges) == 1 and recording.look() == [] and net.tide.ledger.held == 0
    (entry,) = [entry for name, entry in net.tide.ledger.sites.items() if "log_softmax" in name]
    assert entry.codec == "sz" and 8 * entry.held_nbytes < 2 * 64 * 2000
