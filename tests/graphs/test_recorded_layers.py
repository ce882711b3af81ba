"""Layers that are run again in backward, in a step that is captured. The kernels run in the emulator."""

from __future__ import annotations

import copy
from collections import Counter

import torch
import torch.nn.functional as F
from test_recording import Net, _as_on_a_gpu, distance  # noqa: F401  (a fixture)
from torch import Tensor, nn

import lowtide
from lowtide.graphs.rooms import Rooms
from lowtide.kernels._workspaces import Cell


class Block(nn.Module):
    """Queries, keys and values of one layer, and a gate of two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.qkv = nn.Linear(40, 32), nn.LayerNorm(32), nn.Linear(32, 96)
        self.out, self.gate, self.up = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(32, 64)
        self.down = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (part.view(-1, 16, 2, 16).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 32)
        x = x + self.out(y)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class BlockNet(Net):
    def __init__(self) -> None:
        self.model = Block()
        self.plain = copy.deepcopy(self.model)
        self.tide = lowtide.attach(self.model, "budget", remake="linear", noise=0.002, min_size=1000, coder="blocks")
        self.pipeline = self.tide._pipeline
        self.cell, self.rooms = Cell(torch.device("cpu")), Rooms(0.125)
        self.x = torch.randn(80, 40)

    def made_again(self) -> Counter[str]:
        """In the last step, by the op that is run again."""
        return Counter(entry.codec for entry in self.tide.report().sites if entry.codec.startswith("again"))


# Queries, keys, values, what SiLU reads and the other factor; attention's output, for itself and for a layer.
AGAIN = {"again by linear": 5, "again by attention": 2, "again by layer_norm": 1, "again by silu": 1, "again by mul": 1}


def test_a_captured_step_is_an_eager_one(monkeypatch) -> None:
    """Bit for bit that of the rehearsal, which draws the same dither, and close to plain training."""
    net = BlockNet().warm_up()
    expected, rehearsed, before = net.run(net.plain), net.record(is_capturing=False)[1], net.known()
    recording, got = net.record_at_once(monkeypatch)
    assert net.made_again() == AGAIN
    assert distance(got, rehearsed) == 0
    assert 0 < distance(got, expected) < 0.06
    assert net.known() == before and len(recording._gauges) == 2 and recording.look() == []
    assert net.tide.ledger.held == 0
