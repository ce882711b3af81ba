"""A lane over a simulated link: what it sends and brings when, how much is on the device, and no race."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_payloads import SIZE, is_here, is_right, payload, put, put_one
from slow_link import SlowCopies, SlowFlight, SlowLink

from lowtide.stores._crate import large_buffers
from lowtide.stores._lane import Lane, OnHost


def nbytes_here(lane: Lane) -> int:
    return sum(cargo.nbytes for group in (lane._unsent, lane._unused, lane._used) for cargo in group.values())


def read_back(held: list[OnHost]) -> Iterator[bool]:
    """Fetches all in reverse order, as backward does; for each, whether it was asked for before it was sent for."""
    for number in range(len(held) - 1, -1, -1):
        missed = not is_here(held[number])
        assert is_right(held[number], number)
        yield missed


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
        assert sum(read_back(held)) <= 1, f"turn {turn}: sent for nothing ahead"


def test_another_graph_is_read_while_a_newer_one_waits(link: SlowLink) -> None:
    lane = Lane(link, 4 * SIZE)
    older, newer = put(lane, 20), put(lane, 20)
    for graph in (older, newer):
        misses = 0
        for missed in read_back(graph):
            misses += missed
            assert nbytes_here(lane) <= 5 * SIZE
        assert misses <= 1, "the first one, since there it changes direction"


def test_a_pass_that_ends_early_does_not_stand_in_the_way_of_the_next(link: SlowLink) -> None:
    """What was sent for in vain is given up when backward goes on far below."""
    lane = Lane(link, 4 * SIZE)
    held = put(lane, 40)
    for number in range(39, 30, -1):
        assert is_right(held[number], number)
    assert sum(read_back(held[:16])) == 2, "the first may be a skip connection, the second is not"


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
        for missed in read_back(held):
            misses += missed
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
    assert len(lane._cargoes) <= 300


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
