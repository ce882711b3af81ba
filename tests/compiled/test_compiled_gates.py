"""ReLU's backward in a compiled graph: gradients pass through what is held, and no mask is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from lowtide.compiled import rewrite
from lowtide.compiled.holding import Holder
from lowtide.compiled.ops import GATE, HOLD, RESTORE
from lowtide.gates import Gate

Asked = Counter[str]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """How often backward had a gradient pass, asked for a tensor, and how often a mask was made."""
    counts: Asked = Counter()

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def run(self: Any, *arguments: Any) -> Any:
            counts[name] += 1
            return original(self, *arguments)

        monkeypatch.setattr(kind, name, run)

    counted(Holder, "gate")
    counted(Holder, "restore")
    create = Gate.__new__

    def new(cls: type[Gate], spec: Any, let_through: Any, make: Callable[[], Tensor]) -> Gate:
        def made() -> Tensor:
            counts["masks"] += 1
            return make()

        return create(cls, spec, let_through, made)

    monkeypatch.setattr(Gate, "__new__", new)
    yield counts


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({}, 1),
        ({"coder": "rans"}, 1),
        ({"remake": True}, 1),
        ({"rounding": "nearest"}, 1),
        ({"rules": [{"op": "relu", "keep": True}]}, 0),
    ],
    ids=["fixed", "rans", "pairs", "nearest", "kept"],
)
def test_gradients_are_those_of_an_eager_session(options, passes, bf16, net, images, attach, gradients, asked):
    """Of two ReLUs; the second one's gradient comes from rows and lies otherwise than its result did."""
    found = []
    for backend in (None, "aot_eager"):
        model = net()
        attach(model, backend=backend, **options)
        asked.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found.append(gradients(model, images * 1))
    assert asked["gate"] == passes and asked["masks"] <= 1
    if (
        bf16 and "remake" in options
    ):  # a cast that eager layers have one of each is one in a graph, and so is its payload
        energy = sum(float(one.square().sum()) for one in found[0])
        assert sum(float((one - other).square().sum()) for one, other in zip(*found, strict=True)) < 1e-3 * energy
    else:
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_mask_of_which_no_values_are_held(attach, gradients, asked, images):
    """The pool behind it reads the shape alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * 49, 4))
    plain = gradients(model, images)
    session = attach(model, "exact")
    assert all(torch.equal(one, other) for one, other in zip(gradients(model, images), plain, strict=True))
    assert asked["gate"] == 1 and asked["masks"] == 0
    assert any(entry.codec == "bitmask" for entry in session.ledger.sites.values())


def test_a_gradient_that_lies_otherwise_has_a_mask_made(net, images, attach, asked):
    """What comes out lies as it does all the same."""
    model = net()
    session = attach(model)
    holders: list[Holder] = []
    original = Holder.token
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Holder, "token", lambda self: holders.append(self) or original(self))
        output = model(images * 1)
    holder, index, handle = next(
        (holder, index, handle)
        for holder in holders
        for index, handle in enumerate(holder._handles)
        if handle.site.op == "relu"
    )
    gradient = torch.randn(handle.spec.shape)
    with torch.no_grad():
        expected = torch.where(holder.restore(index) > 0, gradient, 0)
        asked.clear()
        assert torch.equal(holder.gate(index, gradient), expected) and asked["masks"] == 0
        turned = gradient.to(memory_format=torch.channels_last)
        passed = holder.gate(index, turned)
    assert torch.equal(passed, expected) and passed.stride() == turned.stride() and asked["masks"] == 1
    spread = torch.ones(()).expand(handle.spec.shape)
    with torch.no_grad():
        passed = holder.gate(index, spread)
    assert torch.equal(passed, (expected != 0).float()) and passed.stride() == torch.empty_like(spread).stride()
    holders.clear()
    del output, holder, handle
    assert session.ledger.held == 0


def test_other_readers_of_a_result_get_it(attach, gradients, asked):
    """Of a leaky ReLU backward asks for the sign, of a threshold elsewhere for another comparison."""

    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return F.leaky_relu(y, 0.1) + F.threshold(y, 0.5, 0.0) + F.relu(y)

    model, x = Others(), torch.randn(64, 32)
    plain = gradients(model, x)
    attach(model, "exact")
    assert all(torch.equal(one, other) for one, other in zip(gradients(model, x), plain, strict=True))
    assert asked["gate"] == 1


def test_a_result_that_backward_has_anyway():
    """Where the partitioner leaves what holds it to backward, nothing is held, and ReLU's own op is back."""
    graph = fx.Graph()
    gradient, x = graph.placeholder("gradient"), graph.placeholder("x")
    token = graph.call_function(HOLD, ([x], "a group"))
    passed, restored = (
        graph.call_function(op, arguments)
        for op, arguments in ((GATE, (gradient, token, 0)), (RESTORE, (token, 0, [8], [0], torch.float32, "cpu")))
    )
    graph.output((passed, restored))
    module = fx.GraphModule({}, graph)
    assert rewrite._undo_late_holds(module) == {"a group"}
    assert {HOLD, GATE, RESTORE}.isdisjoint(node.target for node in module.graph.nodes)
    gradient, x = torch.randn(8), torch.randn(8).relu()
    passed, restored = module(gradient, x)
    assert torch.equal(passed, torch.where(x > 0, gradient, 0)) and restored is x
