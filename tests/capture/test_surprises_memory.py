"""Who holds what, and until when: addresses that are used again, cycles, views, tensors saved twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.capture.hooks import Capture
from lowtide.payloads import Payload

KIB = 1024


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What is freed inside was freed by reference counts alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def payloads(monkeypatch) -> weakref.WeakSet[Payload]:
    """Every payload made from here on, as long as somebody holds it."""
    alive: weakref.WeakSet[Payload] = weakref.WeakSet()
    create = Payload.__init__

    def note(self, *args):
        create(self, *args)
        alive.add(self)

    monkeypatch.setattr(Payload, "__init__", note)
    return alive


def _mlp(depth: int) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())))


@pytest.mark.parametrize("how", ["attach", "compress"])
def test_addresses_of_freed_tensors_are_used_again(gradients, how):
    """Surprise 6: a compressed tensor is freed and its address handed out again; that is never the same tensor."""
    model, x = _mlp(12), torch.randn(64, 64)
    plain = gradients(model, x)
    if how == "attach":
        lowtide.attach(model, "fixed", check="full", linear=1e-6, pointwise=1e-6)
        coded = gradients(model, x)
    else:
        with lowtide.compress(model, "fixed", check="full", linear=1e-6, pointwise=1e-6):
            coded = gradients(model, x)
    for expected, got in zip(plain, coded, strict=True):
        assert (expected - got).abs().max() < 1e-3  # one mistaken tensor changes a gradient by 1 and more


def test_every_fresh_tensor_is_counted_once():
    model, x = _mlp(12), torch.randn(64, 64)
    session = lowtide.attach(model, "exact")
    graphs = [model(x) for _ in range(3)]
    # each forward: 12 outputs of tanh, 11 of which the next linear saves again
    assert session.ledger.raw == session.ledger.held == 3 * 12 * 16 * KIB
    graphs.clear()
    assert session.ledger.raw == session.ledger.held == 0


def test_an_input_that_is_gone_is_not_mistaken_for_a_new_tensor(build):
    """In a block, the storage of a freed input may come back as a dropout mask, which nobody else holds."""
    model = build(
        lambda self, x: self.linear(self.drop(self.table) + x), drop=nn.Dropout(0.5), linear=nn.Linear(64, 64)
    )
    model.table = nn.Parameter(torch.randn(64, 64))
    inputs = [torch.randn(64, 64) for _ in range(10)]
    outputs = []
    with lowtide.compress(model, "exact") as session:
        while inputs:
            outputs.append(model(inputs.pop()))
        assert session.ledger.raw == 10 * 2 * 16 * KIB  # a mask and the linear's input, each time


def test_a_tensor_saved_twice_is_held_once(build, gradients, assert_same):
    model = build(lambda self, x: self.b(self.a(x).relu()) * self.a(x).relu(), a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact")
    output = model(x)
    assert session.ledger.raw == 3 * 16 * KIB  # two results of relu (one also read by ``b``), the output of ``b``
    assert session.ledger.held == session.ledger.raw
    del output
    assert_same(plain, gradients(model, x))


@pytest.mark.parametrize("method", ["exact", "fixed"])
def test_a_graph_dropped_without_backward_frees_everything(method, no_collector, payloads):
    """Surprises 8 and 24: no cycle through outputs, no table of handles that outlives its graph."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Dropout(), nn.Linear(1024, 64), nn.Sigmoid(), nn.Softmax(-1))
    session = lowtide.attach(model, method, min_size=0)
    output = model(torch.randn(8, 3, 16, 16))
    assert session.ledger.held > 0
    assert len(payloads) > 0
    del output
    assert len(payloads) == 0
    assert session.ledger.held == session.ledger.raw == 0


def test_tensors_that_are_passed_through_make_no_cycle(no_collector):
    """Surprise 8: an output that is kept as it is must not lead back to the node that keeps it."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1))
    session = lowtide.attach(model, "exact", min_size=1 << 20)
    output = model(torch.randn(64, 64))
    assert session.ledger.held >= 3 * 16 * KIB
    del output
    assert session.ledger.held == session.ledger.raw == 0


def test_backward_frees_everything(no_collector, payloads):
    model = _mlp(3)
    session = lowtide.attach(model)
    output = model(torch.randn(64, 64))
    assert len(payloads) > 0
    output.sum().backward()
    assert len(payloads) == 0  # although ``output`` is still here
    assert session.ledger.held == session.ledger.raw == 0


@pytest.mark.parametrize("share", [0, 0.6, 2])
def test_activations_are_freed_during_forward(build, no_collector, monkeypatch, share):
    """What is coded is not also held: the tensor itself dies before the forward ends, or waits with few others."""
    monkeypatch.setattr("lowtide.capture.hooks._READY_SHARE", share)
    seen = []

    def forward(self, x):
        hidden = self.a(x).tanh()
        watch = weakref.ref(hidden.untyped_storage())
        hidden = self.c(self.b(hidden).tanh())
        seen.append(watch())
        return hidden

    model = build(forward, a=nn.Linear(64, 64), b=nn.Linear(64, 64), c=nn.Linear(64, 64))
    lowtide.attach(model)
    output = model(torch.randn(64, 64))
    assert (seen == [None]) == (share < 1), "what waits is bounded by the share"
    output.sum().backward()


def test_more_may_wait_early_in_forward(monkeypatch):
    """A part of what is still to come; near the end it is a part of all."""
    seen = []
    settle = Capture._settle_ready

    def watch(self, scope, current):
        seen.append((session.ledger.raw / session.ledger.raw_usual, scope.ready_nbytes / session.ledger.raw_usual))
        settle(self, scope, current)

    model = _mlp(64)
    session = lowtide.attach(model, min_size=0)
    for _ in range(3):
        model(torch.randn(64, 64)).sum().backward()
    monkeypatch.setattr(Capture, "_settle_ready", watch)
    model(torch.randn(64, 64))
    early = [waiting for done, waiting in seen if done < 0.25]
    late = [waiting for done, waiting in seen[:-1] if done > 0.9]
    assert early and late and min(early) > 1 / 32 and max(late) < 1 / 32, seen
    assert all(waiting <= max(1 / 128, (1 - done) / 16) + 3 / 64 for done, waiting in seen[:-1]), seen


def test_memory_falls_only_if_nobody_else_holds_the_tensor():
    """Surprise 36: the caller's batch is the caller's, so it is aliased, neither coded nor counted."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    session = lowtide.attach(model)
    output = model(x)
    first = output.grad_fn.next_functions[1][0].next_functions[0][0]
    assert first._saved_mat1.data_ptr() == x.data_ptr()
    assert session.ledger.raw == 16 * KIB  # the output of tanh
    assert not [entry for entry in session.report().sites if entry.name.startswith("0")]


def test_expanded_tensors_are_not_materialised(build, node, gradients):
    """Surprise 11: a mask broadcast over batch and heads has few bytes, and a copy of it would have many."""

    def forward(self, x):
        bias = self.bias(x[0, 0]).unsqueeze(0).unsqueeze(0).expand(8, 8, 32, 32)
        return F.softmax(x * bias, -1)

    model = build(forward, bias=nn.Linear(32, 32))
    x = torch.randn(8, 8, 32, 32, requires_grad=True)
    session = lowtide.attach(model)
    output = model(x)
    saved = node(output, "MulBackward0")._saved_other
    assert saved.stride()[:2] == (0, 0)
    assert saved.untyped_storage().nbytes() == 32 * 32 * 4
    kept = session.report().to_dict()["left_alone"]
    assert kept["expanded view: a copy would be larger than its storage"]["held"] == 32 * 32 * 4
    output.sum().backward()


def test_views_of_one_fused_projection_are_coded_apart(build, gradients, node):
    """q, k and v are three views of one storage with gaps; each comes back with its own values."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q * k).tanh() * v

    model, x = build(forward, qkv=nn.Linear(64, 192)), torch.randn(64, 64)
    plain = gradients(model, x)
    session = lowtide.attach(model, "fixed", check="full", product=1e-4, pointwise=1e-4)
    output = model(x)
    sites = {entry.name: entry for entry in session.report().sites}
    views = [sites[f"(model):mul.{field}"] for field in ("self#1", "other#1", "other")]
    assert [entry.codec for entry in views] == ["sz"] * 3
    assert sum(entry.raw_nbytes for entry in sites.values()) == session.ledger.raw == (192 + 64) * 64 * 4
    assert session.ledger.held < session.ledger.raw
    del output
    for expected, got in zip(plain, gradients(model, x), strict=True):
        assert (expected - got).abs().max() < 0.02  # sums of 64 errors of at most 2e-4


def test_a_small_view_does_not_keep_its_storage(build):
    """Stock autograd keeps 256 KiB alive for 16 KiB that are read; coded, the rest goes."""
    model = build(lambda self, x: F.gelu(self.a(x)[:64]), a=nn.Linear(64, 64))
    session = lowtide.attach(model, "exact", rules=[{"op": "gelu", "codec": "identity"}])
    output = model(torch.randn(1024, 64))
    assert session.ledger.raw == 256 * KIB
    assert session.ledger.held == 16 * KIB
    output.sum().backward()


def test_two_readers_of_one_tensor_never_cost_more_than_the_tensor(build):
    """Tanh and the linear after it read one tensor under two bounds; a codec that is exact needs to store it once."""
    model = build(lambda self, x: self.b(self.a(x).tanh()), a=nn.Linear(64, 64), b=nn.Linear(64, 64))
    session = lowtide.attach(model, rules=[{"codec": "identity"}])
    output = model(torch.randn(64, 64))
    assert session.ledger.raw == 16 * KIB
    assert session.ledger.held <= session.ledger.raw
    output.sum().backward()
