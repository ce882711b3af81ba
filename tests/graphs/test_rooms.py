"""How much room a payload has, from what its site has needed so far."""

from __future__ import annotations

import pytest

from lowtide.graphs.rooms import LEAST, Room, Rooms


def captured(room: Room, rate: float, *needs: float) -> float:
    """The room in a graph, after whose capture replays have needed so much."""
    room.begin()
    made = room.make(rate)
    for need in needs:
        room.note(need)
    return made


def test_slack_is_halved_as_long_as_all_fits():
    room, made = Room(0.25), []
    for _ in range(6):
        made.append(captured(room, 2.0, 2.0, 1.9))
        room.narrow()
    assert made == [2 * (1 + slack) for slack in (1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 64)]


def test_twice_the_growth_stays():
    room = Room(0.25)
    captured(room, 2.0, 2.0, 2.4, 2.1)
    room.narrow()
    assert room.slack == pytest.approx(0.4)
    assert captured(room, 2.2, 2.3) == pytest.approx(2.4 * 1.4), "the most that was needed, and as much growth again"
    room.narrow()
    assert room.slack == pytest.approx(0.2), "which has not come"
    assert captured(room, 2.2) == pytest.approx(2.3 * 1.2), "what was needed earlier does not count for ever"


def test_payloads_that_shrink_give_room_back():
    room = Room(0.0)
    made = []
    for rate in (4.0, 3.0, 2.0):
        made.append(captured(room, rate, rate))
        room.narrow()
    assert made == pytest.approx([4.0, 4.0 * (1 + LEAST), 3.0 * (1 + LEAST)])


def test_a_payload_that_did_not_fit():
    room = Room(1 / 16)
    made = captured(room, 2.0, 3.0)
    room.widen(3.0 / made - 1)
    assert room.slack == pytest.approx(2 * (3.0 / made - 1))
    assert captured(room, 2.5) == pytest.approx(min(3.0 * (1 + room.slack), 5.0))
    room = Room(0.25)
    room.widen(0.01)
    assert room.slack == 0.5
    room = Room(0.0)
    room.widen(0.001)
    assert room.slack == 2 * LEAST


def test_there_is_never_more_than_twice_the_last_eager_payload():
    """A batch like no other must not make all payloads of the next graph as large as its own."""
    room = Room(0.125)
    captured(room, 1.0, 40.0)
    room.widen(35.0)
    assert room.slack == 1 and captured(room, 1.0) == 2.0


def test_what_is_forgotten_and_what_is_not():
    rooms = Rooms(0.25)
    room = rooms.of("a")
    assert rooms.of("a") is room and rooms.of("b") is not room
    captured(room, 2.0, 3.0)
    rooms.forget()
    rooms.narrow()
    assert room.slack == 0.25, "of what is forgotten nothing can be said"
    assert captured(room, 1.0) == 1.25


def test_payloads_that_share_a_site():
    """The largest counts, for all of them."""
    room = Room(0.5)
    room.begin()
    assert (room.make(1.0), room.make(2.0), room.make(1.5)) == (1.5, 3.0, 2.25)
    room.note(2.2)
    room.note(1.0)
    room.narrow()
    assert room.slack == 0.25
    room.begin()
    assert (room.make(1.0), room.make(2.0)) == (pytest.approx(2.0), pytest.approx(2.2 * 1.25))
