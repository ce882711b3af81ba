"""Tensors are encoded as soon as they are made, payloads live as long as their graph, and nothing else stays."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.capture.handles import Alias
from lowtide.compiled import holding


class _Watch:
    """Notes, at every ``hold``, which tensors of earlier ones are still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refs: list[StorageWeakRef] = []
        self.alive: list[int] = []
        hold = holding.Group.hold

        def watched(group: holding.Group, tensors):
            self.alive.append(sum(not ref.expired() for ref in self.refs))
            holder = hold(group, tensors)
            for handle, tensor in zip(holder._handles, tensors, strict=False):
                if not isinstance(handle.kept, Alias):
                    self.refs.append(StorageWeakRef(tensor.untyped_storage()))
            return holder

        monkeypatch.setattr(holding.Group, "hold", watched)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tensors_go_while_forward_runs(backend, attach, monkeypatch):
    torch.manual_seed(0)
    layers = [part for _ in range(12) for part in (nn.Linear(64, 64), nn.GELU())]
    model = nn.Sequential(*layers)
    session = attach(model, backend=backend)
    watch = _Watch(monkeypatch)
    output = model(torch.randn(64, 64))
    assert len(watch.refs) > 20
    assert max(watch.alive) <= 3, "two or three tensors of the layer at work, however deep the net"
    assert sum(not ref.expired() for ref in watch.refs) <= 1, "the output"
    assert session.ledger.raw > 4 * session.ledger.held > 0
    restore, decoded, alive = holding.Holder.restore, [], []

    def watched(holder: holding.Holder, index: int) -> torch.Tensor:
        alive.append(sum(not ref.expired() for ref in decoded))
        tensor = restore(holder, index)
        decoded.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    monkeypatch.setattr(holding.Holder, "restore", watched)
    output.sum().backward()
    assert len(decoded) > 20
    assert max(alive) <= 2, "each is decoded when it is wanted, and goes when it was used"
    assert session.ledger.raw == session.ledger.held == 0


def test_a_graph_that_is_dropped_lets_go_of_its_payloads(net, attach, images):
    model = net()
    session = attach(model)
    output = model(images)
    assert session.ledger.held > 0
    del output
    gc.collect()
    assert session.ledger.held == session.ledger.raw == 0
    assert len(holding._holders) == 0


def test_backward_twice(net, attach, images, assert_same):
    model = net()
    session = attach(model)
    loss = model(images).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    assert session.ledger.held > 0
    loss.backward()
    assert_same(first, [parameter.grad for parameter in model.parameters()])
    del loss
    assert session.ledger.held == 0


def test_several_forwards_before_backward(net, attach, images, assert_same):
    results = []
    for backend in (None, "aot_eager"):
        model = net()
        session = attach(model, backend=backend)
        one, other = model(images).sum(), model(images.flip(0)).square().sum()
        held = session.ledger.held
        (one + other).backward()
        results.append(([parameter.grad for parameter in model.parameters()], held))
    (eager, held), (compiled, held_by_graph) = results
    assert_same(eager, compiled)
    assert held_by_graph == pytest.approx(held, rel=0.01)


def test_what_the_compiler_keeps_is_counted(net, attach, images):
    """With ``exact`` nearly all is: what plain training holds is held."""
    model = net()
    session = attach(model, "exact")
    output = model(images)
    assert session.ledger.raw >= session.ledger.held > 1 << 20
    assert any("by the compiler" in site.reason for site in session.ledger.sites.values())
    output.sum().backward()
    del output
    assert session.ledger.raw == session.ledger.held == 0


def test_a_tensor_that_is_kept_is_copied(net, attach, images, gradients, assert_same, monkeypatch):
    """The compiler may write to its tensors again; nothing that is held may change with them."""
    model = net()
    session = attach(model, "comet", optimizer=torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    session.step()  # the first one is measured, in eager mode; until it has learned, comet keeps tensors as they are
    expected = gradients(model, images)
    hold = holding.Group.hold

    def spoil(group, tensors):
        holder = hold(group, tensors)
        for tensor in tensors:
            if not any(tensor is part for part in model.parameters()) and tensor.is_floating_point():
                spoiled.append((tensor, tensor.clone()))
        return holder

    spoiled: list = []
    monkeypatch.setattr(holding.Group, "hold", spoil)
    model.zero_grad()
    loss = model(images).square().sum()
    assert spoiled
    for tensor, _ in spoiled:
        if tensor.dim() > 1:
            tensor.zero_()
    loss.backward()
    got = [parameter.grad for parameter in model.parameters()]
    weights = [index for index, parameter in enumerate(model.parameters()) if parameter.dim() > 1]
    assert_same([expected[index] for index in weights[2:]], [got[index] for index in weights[2:]])
