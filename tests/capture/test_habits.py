"""Saves of plain layers are named without the graph once it has named them twice, and with the same names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.capture import graph


class Block(nn.Module):
    """A convolution used twice, norms, ReLU in place, a linear layer, and a function in between if so wanted."""

    def __init__(self, function: bool) -> None:
        super().__init__()
        self.function = torch.tanh if function else lambda x: x
        self.first, self.norm, self.relu = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.second, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.GELU()
        self.rows, self.last = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.first(x)))
        x = self.act(self.second(x)) + self.function(self.second(x))
        return self.last(self.rows(x.flatten(2).transpose(1, 2).contiguous()))


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The nodes that were asked what they saved."""
    nodes: list[str] = []
    saved_by = graph.saved_by
    monkeypatch.setattr(graph, "saved_by", lambda node: nodes.append(type(node).__name__) or saved_by(node))
    yield nodes


def run(model: nn.Module, walked: list[str], x: Tensor) -> list[str]:
    walked.clear()
    model(x).square().mean().backward()
    return list(walked)


def sites(session: lowtide.Session) -> list[tuple[str, str, str, int]]:
    return sorted((item.name, item.need, item.codec, item.saves) for item in session.report().sites)


@pytest.mark.parametrize("function", [False, True])
def test_names_are_those_that_the_graph_gives(function, walked):
    torch.manual_seed(0)
    model, x = Block(function), torch.randn(4, 3, 12, 12)
    session = lowtide.attach(model, "fixed", min_size=0)
    seen = []
    for _ in range(5):
        seen.append((run(model, walked, x), sites(session)))
        session.step()
    assert all(names == seen[0][1] for _, names in seen)
    assert seen[0][0] and seen[1][0]
    for nodes, _ in seen[2:]:
        assert ("TanhBackward0" in nodes) if function else not nodes
    assert any(codec == "in sz" for _, _, codec, _ in seen[-1][1]), "ReLU's mask is part of the convolution's payload"


def test_the_graph_is_asked_again_now_and_then(walked, monkeypatch):
    monkeypatch.setattr("lowtide.capture.habits._EVERY", 4)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(4, 3, 12, 12)
    lowtide.attach(model, "fixed", min_size=0)
    asked = [bool(run(model, walked, x)) for _ in range(8)]
    assert asked == [True, True, False, True, False, False, False, True]


def test_a_layer_that_is_frozen_later_is_looked_at_anew(walked):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(4, 3, 12, 12)
    session = lowtide.attach(model, "fixed", min_size=0)
    for _ in range(3):
        run(model, walked, x)
        session.step()
    assert not walked
    model[1].weight.requires_grad_(False)
    assert run(model, walked, x)
    assert dict((item.name, item.need) for item in session.report().sites)["1:convolution.input"] == "metadata"


class Doubling(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sin(x) * x)


def hooked() -> nn.Module:
    layer = nn.Conv2d(3, 8, 3)
    layer.register_forward_pre_hook(lambda module, inputs: (torch.sin(inputs[0]),))
    return layer


def replaced() -> nn.Module:
    layer = nn.Conv2d(3, 8, 3)
    layer.forward = lambda x: nn.Conv2d.forward(layer, torch.sin(x))  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize("make", [lambda: Doubling(3, 8, 3), hooked, replaced], ids=["subclass", "hook", "forward"])
def test_other_layers_are_always_looked_up(make, walked):
    model, x = nn.Sequential(make()), torch.randn(4, 3, 12, 12, requires_grad=True)
    lowtide.attach(model, "fixed", min_size=0)
    assert all(run(model, walked, x) for _ in range(5))


def test_a_hook_that_comes_later_ends_the_habit(walked):
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), torch.randn(4, 3, 12, 12)
    lowtide.attach(model, "fixed", min_size=0)
    for _ in range(3):
        run(model, walked, x)
    assert not walked
    model[0].register_forward_hook(lambda module, inputs, output: torch.exp(output) * 1e-3)
    assert run(model, walked, x)


class Renamed(nn.ReLU):
    pass


@pytest.mark.parametrize(
    ("make", "mask"), [(nn.ReLU, "in sz"), (nn.LeakyReLU, "bitmask"), (Renamed, "kept")], ids=["relu", "leaky", "other"]
)
def test_a_view_that_a_layer_changes_in_place(make, mask, gradients, assert_same):
    """No path leads to the node of such a layer; what it saves follows from the layer itself, if it is a plain one."""
    convs = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3)]
    norms = [nn.InstanceNorm2d(8), nn.Sequential(nn.BatchNorm2d(8), nn.Flatten(2), nn.Unflatten(2, (8, 8)))]
    model = nn.Sequential(convs[0], norms[0], make(inplace=True), convs[1], norms[1], make(inplace=True), convs[2])
    x = torch.randn(4, 3, 12, 12)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0, check="full")
    for _ in range(4):
        assert_same(plain, gradients(model, x))
        session.step()
    session.detach()
    session = lowtide.attach(model, "fixed", min_size=0, check="full")
    for _ in range(4):
        gradients(model, x)
        codecs = {item.name: item.codec for item in session.report().sites}
        names = ("2:unknown.saved", "5:unknown.saved")
        if make is not Renamed:
            names = tuple(f"{layer}:{'relu' if make is nn.ReLU else 'leaky_relu'}.result" for layer in (2, 5))
        assert {codecs[name] for name in names} == {mask}
        assert {codecs["3:convolution.input"], codecs["6:convolution.input"]} == {"kept" if mask == "kept" else "sz"}
        session.step()
