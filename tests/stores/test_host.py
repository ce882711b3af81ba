"""The store ``host`` over a simulated link: what it sends and brings when, how much is on the device, and no race."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_link import SlowCopies, SlowFlight, SlowLink
from torch import Tensor, nn

import lowtide
from lowtide import codecs
from lowtide.errors import GraphError, SizeError, UnknownNameError
from lowtide.graphs.recording import Recording
from lowtide.kernels import _sz_cuda
from lowtide.records import Encoded
from lowtide.stores import host
from lowtide.stores._crate import large_buffers, mould_of
from lowtide.stores._lane import Lane, OnHost
from lowtide.stores.host import Host

SIZE = 1000  # bytes of a payload


def payload(number: int, nbytes: int = SIZE) -> Encoded:
    spec = codecs.create("identity").encode(torch.zeros(1)).spec
    return Encoded("anything", 1, spec, {}, {"raw": torch.full((nbytes,), number % 251, dtype=torch.uint8)})


def put_one(lane: Lane, number: int, nbytes: int = SIZE) -> OnHost:
    encoded = payload(number, nbytes)
    return lane.put(encoded, large_buffers(encoded, 1))


def put(lane: Lane, count: int) -> list[OnHost]:
    return [put_one(lane, number) for number in range(count)]


def is_right(item: OnHost, number: int) -> bool:
    part = item.fetch().tensors["raw"]
    return bool((part == number % 251).all())


def is_here(item: OnHost) -> bool:
    """On the device, or on its way there."""
    return item.cargo.flight is not None


def nbytes_here(lane: Lane) -> int:
    return sum(cargo.nbytes for group in (lane._unsent, lane._unused, lane._used) for cargo in group.values())


@pytest.fixture
def link() -> Iterator[SlowLink]:
    made = SlowLink()
    yield made
    assert made.races == []


def test_forward_waits_for_the_link_only_where_the_staging_is_full(link: SlowLink) -> None:
    lane = Lane(link, 5 * SIZE)
    held = put(lane, 5)
    assert (link.sent, link.stalls) == (5 * SIZE, 0)
    held += put(lane, 3)
    assert link.stalls == 3 and nbytes_here(lane) == 5 * SIZE
    assert all(item.nbytes == 0 for item in held)


def test_what_is_still_on_the_device_does_not_come_back_over_the_link(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 10)
    for number in (9, 8, 7, 6):
        assert is_right(held[number], number)
    assert link.brought == 3 * SIZE, "three that were away were sent for; the four that were here were not"


def test_in_reverse_order_every_payload_has_been_sent_for_when_it_is_asked_for(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 30)
    for number in range(29, -1, -1):
        assert is_here(held[number]), f"payload {number} was not on its way"
        assert is_right(held[number], number)
        held.pop()
        assert nbytes_here(lane) <= 4 * SIZE
    assert link.brought == 26 * SIZE, "each one crosses once, and the last four not at all"


def test_an_op_may_read_what_it_saved_in_the_order_of_saving(link: SlowLink) -> None:
    """Three payloads an op, the ops in reverse: (27, 28, 29), (24, 25, 26), ..."""
    lane = Lane(link, 6 * SIZE)
    held = put(lane, 30)
    for first in range(27, -1, -3):
        for number in range(first, first + 3):
            assert is_here(held[number])
            assert is_right(held[number], number)
    assert link.brought == 24 * SIZE


def test_a_payload_that_two_ops_read_one_after_the_other_crosses_once(link: SlowLink) -> None:
    lane = Lane(link, 3 * SIZE)
    held = put(lane, 12)
    for number in range(11, -1, -1):
        assert is_right(held[number], number) and is_right(held[number], number)
    assert link.brought == 9 * SIZE


def test_a_skip_connection_costs_one_more_crossing(link: SlowLink) -> None:
    """Payload 2 is read early, by an op far above, and once more in its turn; the others are not disturbed."""
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 20)
    for number in range(19, 11, -1):
        assert is_right(held[number], number)
    assert is_right(held[2], 2)
    for number in range(11, -1, -1):
        assert is_here(held[number])
        assert is_right(held[number], number)
    assert link.brought == 17 * SIZE


def test_backward_may_run_again_over_a_graph_that_was_retained(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 20)
    for turn in range(3):
        misses = 0
        for number in range(19, -1, -1):
            misses += not is_here(held[number])
            assert is_right(held[number], number)
        assert misses <= 1, f"turn {turn}: sent for nothing ahead"


def test_another_graph_is_read_while_a_newer_one_waits(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    older, newer = put(lane, 20), put(lane, 20)
    for graph in (older, newer):
        misses = 0
        for number in range(19, -1, -1):
            misses += not is_here(graph[number])
            assert is_right(graph[number], number)
            assert nbytes_here(lane) <= 5 * SIZE
        assert misses <= 1, "the first one, since there it changes direction"


def test_a_pass_that_ends_early_does_not_stand_in_the_way_of_the_next(link: SlowLink) -> None:
    """What was sent for in vain is given up when backward goes on far below."""
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 40)
    for number in range(39, 30, -1):
        assert is_right(held[number], number)
    misses = 0
    for number in range(15, -1, -1):
        misses += not is_here(held[number])
        assert is_right(held[number], number)
    assert misses == 2, "the first may be a skip connection, the second is not"


def test_the_newest_payloads_do_not_cross_at_all(link: SlowLink) -> None:
    lane = Lane(link, 6 * SIZE, keep=3 * SIZE)
    held = put(lane, 3)
    assert link.sent == 0
    held += [put_one(lane, number) for number in range(3, 20)]
    assert link.sent == 17 * SIZE and nbytes_here(lane) == 6 * SIZE
    for number in range(19, -1, -1):
        assert is_here(held[number]) and is_right(held[number], number)
        held.pop()
        assert nbytes_here(lane) <= 6 * SIZE
    assert (link.sent, link.brought) == (17 * SIZE, 14 * SIZE)


def test_what_stayed_is_given_back_as_it_was_put(link: SlowLink) -> None:
    """The very object: with what its maker remembers of it, and at no cost."""
    lane = Lane(link, 2 * SIZE, keep=SIZE)
    encoded = payload(1)
    stayed = lane.put(encoded, large_buffers(encoded, 1))
    assert stayed.fetch() is encoded and stayed.fetch() is encoded


def test_a_payload_is_put_together_once_for_all_who_ask_while_it_is_here(link: SlowLink) -> None:
    lane = Lane(link, 3 * SIZE)
    held = put(lane, 8)
    first = held[2].fetch()
    assert held[2].fetch() is first
    for number in (7, 6, 5, 4, 3):
        assert is_right(held[number], number)
    assert not is_here(held[2])
    again = held[2].fetch()
    assert again is not first and torch.equal(again.tensors["raw"], first.tensors["raw"])


def test_backward_over_what_stays_sends_for_the_others_ahead_when_the_graph_is_retained(link: SlowLink) -> None:
    lane = Lane(link, 6 * SIZE, keep=3 * SIZE)
    held = put(lane, 20)
    for turn in range(3):
        misses = 0
        for number in range(19, -1, -1):
            misses += not is_here(held[number])
            assert is_right(held[number], number)
            assert nbytes_here(lane) <= 7 * SIZE
        assert misses <= 1, f"turn {turn}: sent for nothing ahead"
    assert link.sent == 17 * SIZE


def test_what_is_never_fetched_is_never_brought(link: SlowLink) -> None:
    lane = Lane(link, 6 * SIZE, keep=3 * SIZE)
    for _ in range(5):
        put(lane, 20)
    assert link.brought == 0 and nbytes_here(lane) == lane._unsent_nbytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_put_that_fails_leaves_the_others_as_they_were(link: SlowLink, error: type[BaseException]) -> None:
    lane = Lane(link, 4 * SIZE, keep=2 * SIZE)
    held = put(lane, 6)
    send = link.send

    def fail(flight: SlowFlight) -> SlowCopies:
        raise error

    link.send = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        put_one(lane, 6)
    assert nbytes_here(lane) == lane.nbytes_here
    assert sum(cargo.nbytes for cargo in lane._unsent.values()) == lane._unsent_nbytes == 2 * SIZE
    link.send = send  # type: ignore[method-assign]
    held.append(put_one(lane, 6))
    for number in range(6, -1, -1):
        assert is_right(held[number], number)


@pytest.mark.parametrize("way", ["send", "bring"])
def test_a_payload_may_die_while_it_is_copied(link: SlowLink, way: str) -> None:
    """The garbage collector runs when it likes, also in the middle of a put or a fetch of another payload."""
    lane = Lane(link, 4 * SIZE, keep=2 * SIZE if way == "send" else 0)
    held = dict(enumerate(put(lane, 2 if way == "send" else 8)))
    work = getattr(link, way)

    def collect(what: object) -> object:
        held.pop(0 if way == "send" else 3, None)
        return work(what)

    setattr(link, way, collect)
    if way == "send":
        held[2] = put_one(lane, 2)
    else:
        assert is_right(held[7], 7)
    setattr(link, way, work)
    assert nbytes_here(lane) == lane.nbytes_here
    assert lane._unsent_nbytes == sum(cargo.nbytes for cargo in lane._unsent.values())
    gone = {cargo.order for group in (lane._unsent, lane._unused, lane._used) for cargo in group.values()} - set(held)
    assert not gone, "what is dead takes room"
    for number in sorted(held, reverse=True):
        assert is_right(held[number], number)


def test_a_payload_larger_than_the_staging_is_served_all_the_same(link: SlowLink) -> None:
    lane = Lane(link, SIZE)
    held = [put_one(lane, number, 5 * SIZE) for number in range(6)]
    for number in range(5, -1, -1):
        assert is_right(held[number], number)
        assert nbytes_here(lane) <= 10 * SIZE


def test_a_graph_that_is_dropped_leaves_nothing_anywhere(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 10)
    copies = [weakref.ref(copy.untyped_storage()) for item in held for copy in item.cargo.copies.rows]
    assert is_right(held[5], 5)
    gc.disable()
    try:
        held.clear()
        assert nbytes_here(lane) == lane.nbytes_here == 0
        assert not [ref for ref in copies if ref() is not None]
    finally:
        gc.enable()


def test_a_device_without_room_is_not_asked_for_what_can_wait(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 12)
    bring = link.bring

    def full(copies: SlowCopies) -> SlowFlight:
        raise torch.OutOfMemoryError("CUDA out of memory")

    link.bring = full  # type: ignore[method-assign]
    assert is_right(held[11], 11)
    with pytest.raises(torch.OutOfMemoryError):
        held[0].fetch()
    link.bring = bring  # type: ignore[method-assign]
    for number in range(10, -1, -1):
        assert is_right(held[number], number)


def test_what_was_put_long_ago_is_forgotten(link: SlowLink) -> None:
    """The lists of a lane do not grow with the length of training."""
    lane = Lane(link, 4 * SIZE)
    for _ in range(100):
        held = put(lane, 20)
        for number in range(19, -1, -1):
            held[number].fetch()
        del held
    assert len(lane._orders) == len(lane._cargoes) <= 300


@settings(deadline=None, derandomize=True)
@given(
    actions=st.lists(st.tuples(st.sampled_from(["put", "fetch", "drop"]), st.integers(0, 10**6)), max_size=120),
    staging=st.integers(1, 5 * SIZE),
    quarters=st.integers(0, 4),
    seed=st.integers(0, 3),
)
def test_whatever_is_put_fetched_and_dropped_there_is_no_race(
    actions: list[tuple[str, int]], staging: int, quarters: int, seed: int
) -> None:
    link = SlowLink(seed)
    lane = Lane(link, staging, keep=quarters * staging // 4)
    held: dict[int, OnHost] = {}
    for number, (action, choice) in enumerate(actions):
        if action == "put":
            held[number] = put_one(lane, number, 1 + choice % (2 * SIZE))
        elif held:
            key = list(held)[choice % len(held)]
            if action == "fetch":
                assert is_right(held[key], key)
            else:
                del held[key]
        largest = max((item.cargo.nbytes for item in held.values()), default=0)
        assert lane.nbytes_here == nbytes_here(lane) <= max(staging, 2 * largest) + largest
        assert lane._unsent_nbytes == sum(cargo.nbytes for cargo in lane._unsent.values()) <= quarters * staging // 4
    for key, item in held.items():
        assert is_right(item, key)
    assert link.races == []


class Careless(SlowFlight):
    """Lets its buffers go without waiting for the copy: the mistake that the simulation has to notice."""

    def end(self) -> None:
        self.buffers = ()


@pytest.mark.parametrize("mistake", ["let go early", "read early"])
def test_the_simulation_notices_races(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "let go early":
        monkeypatch.setattr(SlowFlight, "end", Careless.end)
    else:
        monkeypatch.setattr(SlowFlight, "use", lambda flight: flight.buffers)
    link = SlowLink()
    lane = Lane(link, 2 * SIZE)
    held = put(lane, 8)
    right = [is_right(held[number], number) for number in range(7, -1, -1)]
    assert not all(right)
    assert bool(link.races) == (mistake == "let go early")


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
    assert (Host("1GiB").keep, Host("1GiB", keep="768MiB").keep, Host(keep=0).keep) == (1 << 29, 3 << 28, 0)


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
