"""What is looked up at every save stays small, and finds what it found before; grad mode and autocast come back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import lowtide
from lowtide.capture.handles import Deduplicator, Handle, extent_of
from lowtide.capture.scopes import Scope
from lowtide.codecs.sz import Sz
from lowtide.coding.dither import mix64
from lowtide.ledger import Ledger
from lowtide.records import TensorSpec


def _handle(number: int) -> Handle:
    handle = Handle(TensorSpec.of(torch.empty(1)), "", "", True)
    handle.number = number
    return handle


def test_handles_that_died_waiting_are_swept_out():
    scope = Scope()
    kept = _handle(0)
    scope.wait_for(kept.number, weakref.ref(kept))
    for number in range(1, 1000):
        scope.wait_for(number, weakref.ref(_handle(number)))
    assert scope.waits_for(kept)
    assert len(scope.unresolved) <= 2 * 1 + 64


def test_a_handle_of_another_scope_is_not_waited_for():
    scope, kept = Scope(), _handle(3)
    scope.wait_for(kept.number, weakref.ref(kept))
    assert not scope.waits_for(_handle(3))


def test_saves_of_the_op_that_is_being_built_are_not_looked_for():
    """Nothing leads to its node yet; what waited before it, or waits when the next op saves, is looked for."""
    scope, handles = Scope(), [_handle(number) for number in (1, 2, 3)]
    assert not scope.may_resolve
    for handle in handles[:2]:
        scope.wait_for(handle.number, weakref.ref(handle))
        assert not scope.may_resolve
    torch.ones(1, requires_grad=True).exp()
    assert scope.may_resolve
    scope.wait_for(3, weakref.ref(handles[2]))
    assert scope.may_resolve
    scope.unresolved.pop(1)
    scope.unresolved.pop(2)
    assert not scope.may_resolve


def test_records_of_storages_that_are_gone_are_swept_out():
    ledger = Ledger()
    table = Deduplicator(ledger)
    tensor = torch.zeros(4)
    record = table.record(tensor)
    tensors = [torch.zeros(1) for _ in range(5000)]  # alive together, so that no address comes twice
    for other in tensors:
        table.record(other)
    assert table.record(tensor.view(2, 2)) is record
    assert len(table._records) <= 2 * 1 + 1024
    assert ledger.raw == tensor.nbytes


def test_an_entry_is_found_by_its_memory_and_version():
    table = Deduplicator(Ledger())
    tensor = torch.zeros(4, 6)
    extent, (flat, part) = extent_of(TensorSpec.of(tensor)), (tensor.view(24), tensor[:, :3])
    entry = table.entry(tensor, extent, 0)
    assert table.entry(flat, extent_of(TensorSpec.of(flat)), 0) is entry
    assert table.entry(part, extent_of(TensorSpec.of(part)), 0) is not entry
    assert table.entry(tensor, extent, 1) is not entry


@pytest.mark.parametrize("autocast", [False, True])
def test_grad_mode_and_autocast_come_back_after_a_codec_failed(monkeypatch, autocast):
    def fail(self, x, bound=None, **options):
        assert not torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        raise MemoryError("out of memory")

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    lowtide.attach(model, min_size=4096)
    monkeypatch.setattr(Sz, "encode", fail)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(MemoryError):
            model(torch.randn(64, 64, requires_grad=True))
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") == autocast
    gc.collect()


def test_a_hash_goes_on_where_it_stopped():
    assert mix64(3, 4, state=mix64(1, 2)) == mix64(1, 2, 3, 4)
