"""Graphs of methods with stochastic rounding and no bound: dither of each replay, bits that move.

Twins run on GPUs alone; those here are the codecs themselves, given keys as the kernels of a graph make them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from fake_machine import FakeMachine
from replay_cases import shifted_keys
from torch import Tensor, nn

import lowtide
from lowtide import kernels
from lowtide.codecs import create
from lowtide.codecs.bitmask import BitMask
from lowtide.errors import GraphError
from lowtide.graphs import recording as recording_module
from lowtide.graphs.recording import Recording
from lowtide.graphs.rooms import Rooms
from lowtide.graphs.step import GraphStep
from lowtide.kernels._base import Twin
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.kernels._workspaces import Cell, Replay
from lowtide.records import Bound, Encoded
from lowtide.registry import CODECS, KERNELS
from lowtide.stores.device import Device

DITHERED = ("division", "groups", "norm_groups", "sample_groups")
METHODS = pytest.mark.parametrize("method", ["actnn", "gact", "division"])


@dataclass(frozen=True)
class StandIn(Twin):
    codec: Any

    replays: ClassVar[bool] = True
    takes_replay: ClassVar[bool] = True
    numbers: ClassVar[list[int | None]] = []

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, replay: Replay | None = None) -> Encoded:
        number = int(replay.number) if replay is not None else None
        self.numbers.append(number)
        with shifted_keys(number or 0):
            encoded: Encoded = self.codec.encode(x, bound, seed=seed)
        return encoded

    def decode(self, encoded: Encoded) -> Tensor:
        decoded: Tensor = self.codec.decode(encoded)
        return decoded


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BitMask, "replays", True, raising=False)
    monkeypatch.setattr(kernels, "twin", lambda codec, *_: StandIn(codec) if codec.name in DITHERED else codec)
    monkeypatch.setattr(StandIn, "numbers", [])


class Net:
    def __init__(self, method: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.tide = lowtide.attach(self.model, method, min_size=1000, optimizer=self.optimizer, **options)
        self.cell = Cell(torch.device("cpu"))
        self.x = torch.randn(16, 3, 8, 8)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x * 1).square().mean()
        loss.backward()
        return loss

    def record(self, *, is_capturing: bool = True) -> list[Tensor]:
        recording = Recording(self.cell, Rooms(0.125), is_capturing=is_capturing)
        with self.tide._pipeline.recorded(recording):
            self.model.zero_grad()
            self.step(self.x)
        assert not recording.look() and not recording.has_bounds, "nothing of it gets old"
        return [item.grad.clone() for item in self.model.parameters()]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    error = sum(float((one - other).square().sum()) for one, other in zip(some, others, strict=True))
    return (error / sum(float(other.square().sum()) for other in others)) ** 0.5


@METHODS
def test_every_replay_has_dither_of_its_own(method: str) -> None:
    net = Net(method)
    first = net.record()
    assert distance(net.record(), first) == 0, "the same number"
    net.tide.step()
    assert distance(net.record(), first) == 0, "the same number, whatever the step"
    net.cell.advance()
    assert 1e-4 < distance(net.record(), first) < 1
    assert set(StandIn.numbers) == {0, int(net.cell.number)}


@METHODS
def test_a_rehearsal_uses_the_kernels_of_graphs(method: str) -> None:
    net = Net(method)
    net.step(net.x)
    assert StandIn.numbers and set(StandIn.numbers) == {None}
    StandIn.numbers.clear()
    net.cell.advance()
    net.record(is_capturing=False)
    assert set(StandIn.numbers) == {int(net.cell.number)}, "or they would be compiled while a graph is captured"


def graph_of(net: Net) -> GraphStep:
    return GraphStep(
        net.step, net.model, net.model.parameters(), net.tide._pipeline, FakeMachine(net.model), net.cell, warmup=3,
        refresh=100, slack=0.125, is_measured=lambda: net.tide._capture.on_named is not None,
        moves=lambda: net.tide._moves,
    )  # fmt: skip


@pytest.mark.parametrize(("method", "level"), [("actnn", "L3"), ("gact", "L2.1")])
def test_bits_that_move_make_another_graph(method: str, level: str) -> None:
    net = Net(method, level=level, period=12)
    step, controller = graph_of(net), net.tide.controller
    graphs: list[tuple[dict[str, float], object]] = []  # bits in force and the graph, call by call
    for _ in range(40):
        net.optimizer.zero_grad()
        step(net.x)
        graphs.append((dict(controller._bits), step._graph))
        one = len(graphs) // 12  # another site is sensitive from update to update
        controller._factors = {name: 1e4 if place == one else 1.0 for place, name in enumerate(controller._bits)}
        net.optimizer.step()
    seen = [(bits, graph) for bits, graph in graphs if graph is not None]
    for graph in {id(graph) for _, graph in seen}:
        assert len({str(bits) for bits, other in seen if id(other) == graph}) == 1, (
            "a graph has the bits of its capture"
        )
    assert step.measured == 5, "steps 0, 10, 12, 24 and 36"
    assert step.captures >= 2 and step.replays >= 10, step.describe()


def test_a_state_that_is_loaded_makes_another_graph() -> None:
    net = Net("gact", level="L1")
    step = graph_of(net)
    for _ in range(5):
        step(net.x)
        net.optimizer.step()
    assert step.captures == 1 and step._graph is not None
    net.tide.load_state_dict(net.tide.state_dict())
    step(net.x)
    assert step._graph is None
    for _ in range(3):
        step(net.x)
    assert step.captures == 2


@pytest.mark.parametrize("method", ["cusz", "jpeg_act", "lossless"])
def test_methods_that_wait_are_refused(method: str) -> None:
    with pytest.raises(GraphError, match=f"'{method}', which cannot be captured in a CUDA graph"):
        Net(method).record()


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    recording = Recording(Cell(torch.device("cpu")), Rooms(0.125), is_capturing=False)
    with pytest.raises(GraphError, match=r"^a:b is held by the codec 'jpeg_act'.*division, groups, identity"):
        recording.check(create("jpeg_act"), Device(), "a:b")
    with pytest.raises(GraphError, match="'groups'"):
        recording.check(create("groups"), Device(), "a:b")  # the codec itself, where there is no twin


def test_the_error_names_all_that_can_be_captured() -> None:
    pytest.importorskip("triton")
    classes = [
        SzCuda,
        *(KERNELS.load(name) for name in KERNELS.names()),
        *(CODECS.load(name) for name in CODECS.names() if name not in KERNELS.names()),
    ]
    codecs = {KERNELS.load(name): name for name in KERNELS.names()} | {SzCuda: "sz"}
    able = {codecs.get(each) or each.name for each in classes if getattr(each, "replays", False)}
    assert sorted(able) == list(recording_module._CAPTURED)


def test_odd_groups_are_left_to_the_codec_which_cannot_be_captured() -> None:
    pytest.importorskip("triton")
    for name in ("groups", "norm_groups", "sample_groups"):
        twin = KERNELS.load(name)
        assert twin(create(name, group=256)).replays and not twin(create(name, group=96)).replays
        assert not twin(create(name)).accepts(torch.float64)
    division = KERNELS.load("division")
    assert division(create("division")).replays and not division(create("division", faithful=True)).accepts(
        torch.float32
    )
