"""The store ``host`` over a simulated link: training is bit-equal, and a payload moves whole, whatever its parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch
from lane_payloads import SIZE, is_here, is_right, payload, put_one
from slow_link import SlowLink
from torch import Tensor, nn

import lowtide
from lowtide import codecs
from lowtide.errors import GraphError, SizeError, UnknownNameError
from lowtide.graphs.recording import Recording
from lowtide.kernels import _sz_cuda
from lowtide.records import Encoded
from lowtide.stores import host
from lowtide.stores._crate import large_buffers, mould_of
from lowtide.stores._lane import Lane
from lowtide.stores.host import Host


class Net(nn.Module):
    """A skip connection, shared tensors, masks, indices, a functional op that saves twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(6)])
        self.head = nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = skip = self.pool(self.norm(self.first(x)).relu())
        for block in self.blocks:
            x = torch.tanh(block(x)) * skip.sigmoid() + x
        result: Tensor = self.head(nn.functional.dropout(x.flatten(1), 0.3))
        return result


def train(attach: Callable[[nn.Module, torch.optim.Optimizer], object]) -> list[Tensor]:
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    attach(model, optimizer)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(4, 3, 12, 12).to(memory_format=torch.channels_last)
        loss = model(x).square().mean()
        loss.backward(retain_graph=step == 1)
        if step == 1:
            loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("staging", ["4KiB", "64KiB", "64MiB"])
def test_offload_is_bit_equal_to_plain_training(staging: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = SlowLink(seed=1)
    monkeypatch.setattr(host, "link_to", lambda device: link)
    expected = train(lambda model, optimizer: None)
    sessions = []

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        options = {"staging": staging, "least": 1, "min_size": 64, "check": True}
        sessions.append(lowtide.attach(model, "offload", optimizer=optimizer, **options))

    got = train(attach)
    assert [index for index, pair in enumerate(zip(expected, got, strict=True)) if not torch.equal(*pair)] == []
    assert link.races == [] and (link.sent > 0) == (link.brought > 0) == (staging != "64MiB")
    ledger = sessions[0].ledger
    assert ledger.held == 0 and ledger.raw_peak > 2 * ledger.held_peak, "what is away is not held on the device"
    entries = {entry.codec for entry in ledger.sites.values()}
    assert "identity" in entries


def test_any_method_can_keep_its_payloads_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SlowLink(seed=2)
    monkeypatch.setattr(host, "link_to", lambda device: link)
    options = {"min_size": 64, "check": True}
    expected = train(lambda model, optimizer: lowtide.attach(model, "fixed", optimizer=optimizer, **options))
    assert link.sent == 0
    chosen = Host(staging="8KiB", least=16)
    got = train(lambda model, optimizer: lowtide.attach(model, "fixed", optimizer=optimizer, store=chosen, **options))
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    assert link.races == [] and link.sent > 0


def test_graphs_that_are_there_when_a_session_ends_keep_their_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward after ``detach``, and a graph that is dropped instead: nothing is left on either side."""
    link = SlowLink(seed=3)
    monkeypatch.setattr(host, "link_to", lambda device: link)
    torch.manual_seed(0)
    model, x = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]), torch.randn(16, 32)
    model(x).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    store = Host(staging="4KiB", least=1)
    session = lowtide.attach(model, "exact", rules=[{"path": "*", "codec": "identity"}], store=store, min_size=64)
    loss, dropped = model(x).square().sum(), model(x).square().sum()
    session.detach()
    assert 0 < store.staged <= 4096 and link.sent > 0
    del dropped
    loss.backward()
    got = [parameter.grad for parameter in model.parameters()]
    assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True))
    del loss
    assert store.staged == 0 and link.races == [] and link.brought > 0


def test_a_cuda_graph_refuses_the_store() -> None:
    with pytest.raises(GraphError, match=r"a:b\.c is held by the store Host; in a CUDA graph use store='device'"):
        Recording.check(None, codecs.create("identity"), Host(), "a:b.c")  # type: ignore[arg-type]


def test_half_of_the_staging_is_for_what_stays() -> None:
    assert (Host("1GiB").keep, Host("1GiB", keep="512MiB").keep, Host(keep=0).keep) == (3 << 28, 1 << 29, 0)


def test_small_parts_stay_on_the_device() -> None:
    link = SlowLink()
    store = Host(least=100)
    store._lanes[torch.device("cpu")] = Lane(link, 10**6)
    small, large = torch.zeros(99, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    spec = codecs.create("identity").encode(torch.zeros(1)).spec
    held = store.put(Encoded("anything", 1, spec, {}, {"small": small, "large": large}))
    assert (held.nbytes, link.sent) == (99, 100)
    assert held.fetch().tensors["small"] is small
    assert store.put(Encoded("anything", 1, spec, {}, {"small": small})).nbytes == 99


def test_parts_that_share_a_buffer_move_together_and_in_one_piece() -> None:
    """A small part that stayed would keep all of the buffer on the device."""
    link = SlowLink()
    store = Host(least=100)
    store._lanes[torch.device("cpu")] = Lane(link, 1)
    buffer = torch.arange(64, dtype=torch.int32)
    spec = codecs.create("identity").encode(torch.zeros(1)).spec
    parts = {"heads": buffer[:4], "table": torch.arange(3), "words": buffer[4:], "bytes": buffer[1:3].view(torch.uint8)}
    expected = {name: part.clone() for name, part in parts.items()}
    storage = weakref.ref(buffer.untyped_storage())
    held = store.put(Encoded("anything", 1, spec, {}, parts))
    assert (held.nbytes, link.sent) == (24, 256)
    del buffer, parts
    other = store.put(payload(0))
    assert storage() is None, "something stayed"
    fetched = held.fetch()
    assert list(fetched.tensors) == ["heads", "table", "words", "bytes"]
    assert all(torch.equal(part, expected[name]) for name, part in fetched.tensors.items())
    assert fetched.nbytes == 256 + 24 and link.brought == 256
    assert is_right(other, 0)  # type: ignore[arg-type]


class Row(Mapping[str, Tensor]):
    """Parts that lie in one row, as those of ``sz`` on a GPU; cutting them out is what a store should not do."""

    def __init__(self, row: Tensor) -> None:
        self.buffer = row
        self.cuts = 0

    def __getitem__(self, name: str) -> Tensor:
        self.cuts += 1
        return self.buffer[:8] if name == "heads" else self.buffer[8:]

    def __iter__(self) -> Iterator[str]:
        return iter(("heads", "words"))

    def __len__(self) -> int:
        return 2

    def refill(self, encoded: Encoded) -> Callable[[Tensor], Encoded]:
        codec, version, spec, meta, hint = encoded.codec, encoded.version, encoded.spec, encoded.meta, encoded.hint

        def fill(row: Tensor) -> Encoded:
            again = Encoded(codec, version, spec, meta, Row(row))
            object.__setattr__(again, "hint", hint)
            return again

        return fill


def test_a_payload_in_one_row_is_not_cut_on_the_way_and_keeps_its_hint(link: SlowLink) -> None:
    lane = Lane(link, SIZE)
    spec = codecs.create("identity").encode(torch.zeros(1)).spec
    parts, hint = Row(torch.arange(250, dtype=torch.int32)), SimpleNamespace(nbytes=1000 + 24)
    encoded = Encoded("anything", 1, spec, {"seed": 3}, parts)
    object.__setattr__(encoded, "hint", hint)
    row = weakref.ref(parts.buffer.untyped_storage())
    held = lane.put(encoded, large_buffers(encoded, 1))
    assert held.nbytes == 24, "tables stay on the device"
    other = put_one(lane, 1)
    assert not is_here(held) and parts.cuts == 0
    del encoded, parts
    assert row() is None, "something stayed"
    fetched = held.fetch()
    assert isinstance(fetched.tensors, Row) and fetched.tensors.cuts == 0 and fetched.hint is hint
    assert torch.equal(fetched.tensors.buffer, torch.arange(250, dtype=torch.int32))
    assert is_right(other, 1)


def test_parts_of_sz_on_a_gpu_move_in_one_row() -> None:
    """Its hint has addresses: those in the row move with it, those of tables stay."""
    row, step = torch.arange(40, dtype=torch.int32), torch.ones(1, dtype=torch.bfloat16)
    job = SimpleNamespace(heads=8, headers=0, headers_from=8, words_from=8)
    parts = _sz_cuda._Parts(row, SimpleNamespace(encoding=job, parts={"step": step}))  # type: ignore[arg-type]
    encoded = Encoded("sz", 1, codecs.create("identity").encode(torch.zeros(1)).spec, {"seed": 3}, parts)
    at = row.data_ptr()
    hint = _sz_cuda._Hint(job, step.data_ptr(), 0, 0, at + 32, at, at + 32, 32, 5, 6, 162)  # type: ignore[arg-type]
    object.__setattr__(encoded, "hint", hint)
    assert large_buffers(encoded, 160) == (row,) and large_buffers(encoded, 161) == ()
    other = row.clone()
    again = mould_of(encoded, (row,))((other,))
    moved, to = again.hint, other.data_ptr()
    assert (moved.heads_at, moved.words_at, moved.headers_at) == (to, to + 32, to + 32)
    assert (moved.step_at, moved.words, moved.low, moved.high, moved.nbytes) == (step.data_ptr(), 32, 5, 6, 162)
    assert again.tensors["words"].data_ptr() == to + 32 and again.tensors["step"] is step
    assert list(again.tensors) == list(encoded.tensors) and again.meta == {"seed": 3}


def test_mistakes_are_refused_by_name() -> None:
    with pytest.raises(SizeError, match=r"keep is a part of staging, 1024 bytes at most; got 2048"):
        Host(staging="1KiB", keep="2KiB")
    with pytest.raises(SizeError, match="keep is a number of bytes or a text such as '512MiB'"):
        Host(keep=-1)
    with pytest.raises(SizeError, match="staging is a number of bytes or a text such as '512MiB'"):
        lowtide.attach(nn.Linear(2, 2), "offload", staging="lots")
    with pytest.raises(UnknownNameError, match=r"unknown option of method 'offload' 'stagin'.*Did you mean 'staging'"):
        lowtide.attach(nn.Linear(2, 2), "offload", stagin="1GiB")
    with pytest.raises(UnknownNameError, match=r"unknown store 'hots'.*Did you mean 'host'"):
        lowtide.attach(nn.Linear(2, 2), store="hots")
