"""Which calls run eagerly, are captured and are replayed."""

from __future__ import annotations

import pytest

from lowtide.errors import GraphError
from lowtide.graphs.schedule import Mode, Schedule


def run(schedule: Schedule, calls: int, *, gets_old: bool = True) -> str:
    """A letter for each call."""
    letters = ""
    for _ in range(calls):
        mode = schedule.next()
        if mode is Mode.CAPTURE:
            schedule.captured()
        if mode in (Mode.CAPTURE, Mode.REPLAY):
            schedule.replayed(gets_old=gets_old)
        letters += {Mode.EAGER: "e", Mode.MEASURE: "m", Mode.SETTLE: "s", Mode.REHEARSE: "h", Mode.CAPTURE: "C"}.get(
            mode, "r"
        )
    return letters


def test_from_the_first_call_on():
    assert run(Schedule(5, 4), 20) == "eemsh" + "Crrr" + "msh" + "Crrr" + "msh" + "C"


def test_graphs_live_twice_as_long_each_time():
    letters = run(Schedule(3, 40), 150)
    assert [len(part) for part in letters.split("msh")] == [0, 16, 32, 40, 40, 7]


def test_what_does_not_get_old_is_replayed_for_ever():
    assert run(Schedule(3, 4), 50, gets_old=False) == "mshC" + "r" * 46


def test_a_change_prepares_another_graph():
    schedule = Schedule(3, 100)
    assert run(schedule, 6) == "mshCrr"
    schedule.prepare()
    assert run(schedule, 5) == "mshCr"
    assert run(schedule, 20).index("m") == 14, "after 16 in all"
    schedule.overflowed()
    assert run(schedule, 40)[:20] == "msh" + "C" + "r" * 15 + "m", "graphs live short again"


def test_a_change_during_warm_up_does_not_shorten_it():
    schedule = Schedule(8, 100)
    run(schedule, 2)
    schedule.prepare()
    assert run(schedule, 7) == "eeemshC"
    schedule.begin()
    assert run(schedule, 9) == "eeeeemshC"


@pytest.mark.parametrize(("warmup", "refresh"), [(2, 10), (3, 0), (3.5, 10)])
def test_numbers_that_make_no_sense(warmup, refresh):
    with pytest.raises(GraphError, match=r"or more; got"):
        Schedule(warmup, refresh)
