"""Axes cover what they show and have round ticks; numbers are written as people read them."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lowtide.app.report import scales
from lowtide.app.report.scales import Axis

VALUES = st.lists(st.floats(-1e9, 1e9, allow_nan=False), min_size=1, max_size=8)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(values=VALUES, zero=st.booleans(), whole=st.booleans())
@example(values=[5e-324], zero=False, whole=False)
@example(values=[-5e-324, 1e-310], zero=True, whole=False)
def test_an_axis_covers_its_values(values, zero, whole):
    axis = Axis.fit(values, start=0, stop=100, zero=zero, whole=whole)
    slack = 1e-6 * (axis.high - axis.low)
    assert axis.low <= min(values) + slack and max(values) <= axis.high + slack
    assert not zero or axis.low <= 0 <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    assert all(-0.1 <= axis.place(value) <= 100.1 for value in values)
    assert list(axis.ticks) == sorted(axis.ticks)


@pytest.mark.parametrize(
    ("values", "options", "ticks"),
    [
        ((0.91, 0.987), {}, (0.9, 0.92, 0.94, 0.96, 0.98, 1.0)),
        ((3.0, 18.8), {"zero": True}, (0, 5, 10, 15, 20)),
        ((1.0, 3.0), {"whole": True}, (1, 2, 3)),
        ((0.0, 300 * 1024.0), {"zero": True, "binary": True}, tuple(1024.0 * n for n in (0, 100, 200, 300))),
        ((5.0, 5.0), {"zero": True}, (0, 1, 2, 3, 4, 5)),
        ((5.0, 5.0), {}, (2, 3, 4, 5, 6, 7, 8)),
        ((), {}, (0, 0.2, 0.4, 0.6, 0.8, 1.0)),
    ],
)
def test_ticks_are_round(values, options, ticks):
    assert Axis.fit(values, start=0, stop=1, **options).ticks == pytest.approx(ticks)


def test_an_axis_may_run_backwards():
    axis = Axis.fit([0, 10], start=200, stop=0)
    assert (axis.place(0), axis.place(10), axis.place(5)) == (200, 0, 100)


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (scales.percent, 0.98765, "98.77 %"),
        (scales.short_percent, 0.9, "90 %"),
        (scales.times, 9.123, "9.12x"),
        (scales.nbytes, 1536.0, "1.50 KiB"),
        (scales.short_nbytes, 1536.0, "1.5 KiB"),
        (scales.count, 3.0, "3"),
        (scales.count, 2.5, "2.50"),
        (scales.duration, 12.34, "12.3 s"),
        (scales.duration, 125.0, "2 min 5 s"),
        (scales.duration, 3725.0, "1 h 2 min"),
        (scales.points_of, 0.0, "+0.00"),
        (scales.points_of, -0.284, "-0.28"),
    ],
)
def test_numbers_for_people(form, value, text):
    assert form(value) == text
