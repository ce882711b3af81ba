"""Payloads whose size is known late (docs/dataflow.md, rule 15): made again, waited for, kept, let go."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide import kernels, payloads
from lowtide.codecs.sz import Sz
from lowtide.ledger import Ledger
from lowtide.records import Bound, Encoded


@dataclass
class Device:
    """Reports when told to, and how much room was needed."""

    needed: int = 0
    silent: bool = False
    waiting: list[Tensor] = field(default_factory=list)

    def report(self) -> None:
        for word in self.waiting:
            word.fill_(self.needed)
        self.waiting.clear()


@dataclass(frozen=True)
class Late:
    """A twin of sz on the CPU that behaves as one on a GPU: what does not fit its room is garbage."""

    codec: Sz
    device: Device

    name = "sz"
    carries_values = takes_bound = ticketed = True
    keep_zeros = property(lambda self: self.codec.keep_zeros)
    settled: list[int] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def room(self, words: float) -> int:
        return int(words)

    def encode(
        self, x: Tensor, bound: Bound | None = None, *, seed=0, plan=None, ticket=None, capacity=None
    ) -> Encoded:
        encoded = self.codec.encode(x, bound, seed=seed, plan=plan)
        if ticket is not None:
            self.device.waiting.append(ticket)
            if not self.device.silent:
                self.device.report()
            if self.device.needed > capacity:
                encoded.tensors["words"].fill_(-1)
        return encoded

    def settle(self, encoded: Encoded, x: Tensor, status: int, plan: Any = None) -> Encoded:
        self.settled.append(status)
        return (
            self.codec.encode(x, seed=encoded.meta["seed"], plan=plan) if status == self.device.needed > 0 else encoded
        )


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    twin = Late(Sz(), Device())
    real = kernels.twin
    monkeypatch.setattr(
        kernels, "twin", lambda codec, device, dtype: twin if codec.name == "sz" else real(codec, device, dtype)
    )
    return twin


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_payload_that_did_not_fit_is_made_again(late: Late):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    model[1].register_full_backward_hook(lambda *_: None)
    with_room = lowtide.attach(model, "fixed", seed=3)
    gradients(model, x)
    expected = gradients(model, x)
    with_room.detach()
    late.settled.clear()
    late.device.needed = 1 << 40
    short = lowtide.attach(model, "fixed", seed=3)
    gradients(model, x)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), expected, strict=True))
    assert late.settled.count(1 << 40) >= 2
    short.detach()


def test_backward_waits_for_the_report_of_what_it_decodes(late: Late, monkeypatch: pytest.MonkeyPatch):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    session = lowtide.attach(model)
    gradients(model, x)
    late.device.silent = True
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        late.device.report()

    monkeypatch.setattr("lowtide.kernels._tickets.time.sleep", sleep)
    loss = model(x).square().mean()
    assert late.device.waiting and not waited
    loss.backward()
    assert waited and not late.device.waiting
    session.detach()


def test_only_so_much_is_kept_for_reports(late: Late, monkeypatch: pytest.MonkeyPatch):
    """The host may run ahead of the device by a number of bytes, not by a whole forward."""
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))), torch.randn(64, 64)
    session = lowtide.attach(model, "fixed")
    gradients(model, x)
    late.device.silent = True
    monkeypatch.setattr(payloads, "MOST_PENDING", 3 * x.nbytes)
    monkeypatch.setattr("lowtide.kernels._tickets.time.sleep", lambda seconds: late.device.report())
    most = []
    add = payloads.Waiting.add
    monkeypatch.setattr(payloads.Waiting, "add", lambda self, pending: (add(self, pending), most.append(self._nbytes)))
    gradients(model, x)
    assert len(most) > 8 and max(most) <= 3 * x.nbytes
    session.detach()


@pytest.mark.parametrize(("high", "limit", "kept"), [(0, 1000, 3), (8, 1000, 6), (1000, 1000, 12), (1000, 8, 3)])
def test_more_is_kept_while_that_raises_no_peak(late: Late, monkeypatch, high: int, limit: int, kept: int):
    """By the memory in use (in tensors) when the last step's backward decoded: two more tensors must fit below it."""
    x = torch.randn(64, 64)
    model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())])
    session = lowtide.attach(model)
    monkeypatch.setattr(payloads, "_WATCHED", 1)
    monkeypatch.setattr(payloads, "in_use", lambda device: (high * x.nbytes, limit * x.nbytes))
    monkeypatch.setattr(payloads, "_allocated", lambda device: high * x.nbytes)
    gradients(model, x)
    late.device.silent = True
    monkeypatch.setattr(payloads, "MOST_PENDING", 3 * x.nbytes)
    monkeypatch.setattr("lowtide.kernels._tickets.time.sleep", lambda seconds: late.device.report())
    waiting, most = session._pipeline._waiting, []
    monkeypatch.setattr(payloads, "in_use", lambda device: (waiting._nbytes, limit * x.nbytes))
    add = payloads.Waiting.add

    def note(self: payloads.Waiting, pending: payloads.Pending) -> None:
        add(self, pending)
        most.append(self._nbytes // x.nbytes)
        if limit == 8:
            monkeypatch.setattr(payloads, "in_use", lambda device: (5 * x.nbytes, limit * x.nbytes))

    monkeypatch.setattr(payloads.Waiting, "add", note)
    gradients(model, x)
    assert max(most) == kept and session.ledger.is_scarce == (limit == 8)
    session.detach()


def test_the_allocator_is_asked_about_large_tensors_only(monkeypatch):
    """Large beside the others, of this step so far and of the last one; and not small at all."""
    asked: list[int] = []
    monkeypatch.setattr(payloads, "_WATCHED", 50)
    waiting = payloads.Waiting(Ledger())
    monkeypatch.setattr(payloads, "_allocated", lambda device: asked.append(sizes[-1]) or 0)
    sizes: list[int] = []
    for _ in range(2):
        for size in (40, 100, 400, 190, 210, 20, 400):
            sizes.append(size)
            waiting.watch(torch.empty(size, dtype=torch.uint8))
        waiting.end_step()
    assert asked == [100, 400, 210, 400, 400, 210, 400]
    assert waiting.is_small(200) and not waiting.is_small(201)


def test_which_tensors_are_small_is_known_where_none_is_watched():
    waiting = payloads.Waiting(Ledger())
    waiting.watch(torch.empty(400, dtype=torch.uint8))
    waiting.end_step()
    assert waiting.is_small(200) and not waiting.is_small(201)


def test_a_graph_that_is_dropped_leaves_nothing_to_wait_for(late: Late):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    session = lowtide.attach(model)
    gradients(model, x)
    late.device.silent = True
    loss = model(x).square().mean()
    del loss
    gc.collect()
    late.device.report()
    late.device.silent = False
    late.settled.clear()
    gradients(model, x)
    assert session.ledger.held == 0
    session.detach()


def test_a_report_lets_the_tensor_go(late: Late):
    """Whoever asks first: the next save, backward, or the end of forward."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    session = lowtide.attach(model)
    gradients(model, x)
    late.device.silent = True
    loss = model(x).square().mean()
    kept = [weakref.ref(pending._raw) for pending in session._pipeline._waiting._queue]
    assert kept and all(ref() is not None for ref in kept)
    late.device.report()
    loss.backward()
    assert all(ref() is None for ref in kept)
    session.detach()
