"""Times by the host's clock, and by events where there is a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowtide.app.bench import timing

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def clock(monkeypatch):
    """A clock that is a second later whenever it is looked at."""
    seconds = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(seconds)))


def test_actions_take_turns_after_warming_up(clock):
    order = []
    actions = {name: lambda name=name: order.append(name) for name in "ab"}
    times = timing.interleave(actions, CPU, warm=1, repeats=2)
    assert order == ["a", "b"] * 3
    assert times["a"].samples == times["b"].samples == (1e3, 1e3)


def test_cells_are_median_and_range():
    assert timing.Times((3.0, 1.0, 8.0)).cells("x_ms") == {"x_ms": 3.0, "x_ms_min": 1.0, "x_ms_max": 8.0}


def test_the_host_is_timed_by_its_clock(clock):
    assert timing.time_host(lambda: None, CPU, repeats=3).samples == (1e3,) * 3


class Event:
    """An event that happens when it is recorded, a millisecond after the one before; readable once synchronized."""

    recorded, synchronized = 0, -1

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.recorded += 1
        self.at = Event.recorded

    def elapsed_time(self, end):
        assert Event.synchronized >= end.at, "read before the device got there"
        return float(end.at - self.at)


def test_on_a_gpu_events_are_read_at_the_end(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Event, "synchronized", Event.recorded))
    assert timing.interleave({"a": lambda: None, "b": lambda: None}, CUDA, repeats=2)["b"].samples == (1.0, 1.0)


def test_the_host_is_timed_from_an_idle_device(clock, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    timing.time_host(lambda: calls.append("step"), CUDA, repeats=2)
    assert calls == [CUDA, "step", CUDA, "step", CUDA]
