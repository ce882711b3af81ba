"""The copies of the store ``host`` over simulated streams: in whatever order the device runs, every byte is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from fake_cuda import DEVICE, Machine, Stream, installed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide import codecs
from lowtide.records import Encoded
from lowtide.stores import _link
from lowtide.stores._arena import Block
from lowtide.stores._crate import large_buffers
from lowtide.stores._lane import Lane, OnHost
from lowtide.stores._link import CudaFlight, CudaLink, Way

SIZE = 64
SPEC = codecs.create("identity").encode(torch.zeros(1)).spec


class Trainer:
    """Puts, fetches and drops payloads of one size, and writes over whatever memory is free in between."""

    def __init__(self, machine: Machine, staging: int, keep: int) -> None:
        self.machine = machine
        self.link = CudaLink(DEVICE)
        self.lane = Lane(self.link, staging, keep)
        self.held: dict[int, OnHost] = {}
        self.read: list[tuple[int, list[bytes]]] = []

    def put(self, number: int) -> None:
        row = self.machine.allocate(SIZE, torch.uint8)
        self.machine.write(row, number % 251)
        encoded = Encoded("anything", 1, SPEC, {}, {"raw": row})
        del row
        self.held[number] = self.lane.put(encoded, large_buffers(encoded, 1))

    def fetch(self, number: int) -> None:
        seen: list[bytes] = []
        self.machine.read(self.held[number].fetch().tensors["raw"], seen)
        self.read.append((number, seen))

    def scribble(self) -> None:
        rooms = [self.machine.allocate(SIZE, torch.uint8) for _ in range(3)]
        for room in rooms:
            self.machine.write(room, 0xFF)

    def mistakes(self) -> list[int]:
        """The payloads that were not what they should be."""
        self.machine.finish()
        return [number for number, seen in self.read if seen != [bytes([number % 251]) * SIZE]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    with installed(Machine(), monkeypatch) as made:
        yield made


def run_steps(
    trainer: Trainer,
    steps: int = 4,
    count: int = 12,
    backward_on: Stream | None = None,
    is_upside_down: bool = False,
) -> None:
    machine = trainer.machine
    for step in range(steps):
        machine.current = machine.main
        for number in range(count):
            trainer.put(100 * step + number)
            trainer.scribble()
        machine.current = backward_on or machine.main
        for number in range(count) if is_upside_down else reversed(range(count)):
            trainer.fetch(100 * step + number)
            trainer.scribble()
            del trainer.held[100 * step + number]
            trainer.scribble()


@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(st.tuples(st.sampled_from(["put", "fetch", "drop"]), st.integers(0, 10**6)), max_size=60),
    staging=st.integers(1, 5), share=st.integers(0, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_whatever_is_put_fetched_and_dropped_every_byte_is_right(
    actions: list[tuple[str, int]], staging: int, share: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lowtide.stores._arena._LEAST", 512)
        with installed(Machine(seed), patch) as machine:
            trainer = Trainer(machine, staging * SIZE, min(share, staging) * SIZE)
            for number, (action, choice) in enumerate(actions):
                if action == "put":
                    trainer.put(number)
                elif trainer.held:
                    key = list(trainer.held)[choice % len(trainer.held)]
                    if action == "fetch":
                        trainer.fetch(key)
                    else:
                        del trainer.held[key]
                trainer.scribble()
            assert trainer.mistakes() == []


@pytest.mark.parametrize("keep", [0, 2])
@pytest.mark.parametrize("seed", range(8))
def test_steps_of_training(seed: int, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    with installed(Machine(seed), monkeypatch) as machine:
        trainer = Trainer(machine, 4 * SIZE, keep * SIZE)
        run_steps(trainer)
        assert trainer.mistakes() == []
        assert len(trainer.link.arena._slabs) < 6, "host memory that came back is used again, whatever runs meanwhile"


@pytest.mark.parametrize("events", [1, 2, 128])
def test_events_that_are_used_again_stand_for_later_copies(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_link, "_EVENTS", events)
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    for seed in range(6):
        with installed(Machine(seed), monkeypatch) as machine:
            trainer = Trainer(machine, 4 * SIZE, SIZE)
            run_steps(trainer)
            assert trainer.mistakes() == []


@pytest.mark.parametrize("mistake", ["source", "let go", "read early", "sent early", "brought early"])
def test_the_simulation_notices_a_wait_that_is_missing(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    if mistake == "source":
        monkeypatch.setattr(CudaLink, "_follow", lambda link, way, stream: None)
    elif mistake == "let go":
        monkeypatch.setattr(CudaFlight, "end", lambda flight: setattr(flight, "buffers", ()))
    elif mistake == "read early":
        monkeypatch.setattr(CudaFlight, "use", lambda flight: flight.buffers)
    else:
        monkeypatch.setattr(Way, "hold_up", _except_for(2 if mistake == "sent early" else 3, Way.hold_up))
    found = []
    for seed in range(30):
        with installed(Machine(seed), monkeypatch) as machine:
            trainer = Trainer(machine, 3 * SIZE, SIZE)
            elsewhere = Stream(machine) if mistake.endswith("t early") else None
            run_steps(trainer, backward_on=elsewhere, is_upside_down=mistake == "brought early")
            found += trainer.mistakes()
    assert found


def _except_for(number: int, hold_up: Callable[..., None]) -> Callable[..., None]:
    """Copies in one direction wait for none in the other: 2 is the stream of those that go out, 3 of those back."""

    def hold_up_others(way: Way, stream: Stream, mark: int) -> None:
        if stream.raw != number:
            hold_up(way, stream, mark)

    return hold_up_others


def test_another_stream_that_asks_waits_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of payloads that never left, that have been sent, and that come back; their memory waits for it in turn."""
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    for seed in range(10):
        with installed(Machine(seed), monkeypatch) as machine:
            trainer = Trainer(machine, 4 * SIZE, 2 * SIZE)
            for number in range(8):
                trainer.put(number)
            other = Stream(machine)
            machine.current = other
            for number in (7, 5, 1, 0, 4):
                trainer.fetch(number)
            assert machine.calls["record_stream"] == 3, "of the two that came back to this stream the memory is its own"
            assert trainer.mistakes() == []


@pytest.mark.parametrize("is_upside_down", [False, True])
def test_backward_on_another_stream_than_forward(is_upside_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that puts payloads knows nothing of the copies that came back: host memory waits for those itself."""
    monkeypatch.setattr("lowtide.stores._arena._LEAST", 512)
    for seed in range(30):
        with installed(Machine(seed), monkeypatch) as machine:
            trainer = Trainer(machine, 3 * SIZE, SIZE)
            run_steps(trainer, backward_on=Stream(machine), is_upside_down=is_upside_down)
            assert trainer.mistakes() == []


def test_a_payload_may_die_while_it_is_sent(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """By garbage collection, when room for its copy is made: the copy runs, and its source lives until then."""
    trainer = Trainer(machine, 4 * SIZE, 2 * SIZE)
    for number in range(2):
        trainer.put(number)
    take = trainer.link.arena.take

    def collect(nbytes: int, dtype: torch.dtype) -> Block:
        trainer.held.pop(0, None)
        return take(nbytes, dtype)

    monkeypatch.setattr(trainer.link.arena, "take", collect)
    trainer.put(2)
    trainer.scribble()
    assert machine.calls["copies"] == 1 and trainer.lane.nbytes_here == 2 * SIZE
    for number in (2, 1):
        trainer.fetch(number)
    assert trainer.mistakes() == []


def test_what_stays_costs_no_call_of_the_device(machine: Machine) -> None:
    trainer = Trainer(machine, 40 * SIZE, 20 * SIZE)
    for number in range(20):
        trainer.put(number)
    machine.calls.clear()
    for number in reversed(range(20)):
        trainer.fetch(number)
    assert not machine.calls


def test_calls_for_a_payload_that_crosses(machine: Machine) -> None:
    """One copy each way; for each, one event before and one behind it; none is made, no memory is pinned."""
    trainer = Trainer(machine, 4 * SIZE, 0)
    run_steps(trainer, steps=2, count=40)
    machine.calls.clear()
    run_steps(trainer, steps=1, count=40)
    calls = machine.calls
    crossings = 40 + 36  # the last four are still there when they are asked for
    assert calls["copies"] == crossings and calls["events recorded"] == 2 * crossings
    assert calls["streams set"] == 2 * crossings
    assert calls["events made"] == calls["pinned rooms"] == calls["record_stream"] == 0
    most = (
        crossings + 36 + 36 + 40 + 40
    )  # before a copy, before bringing, before use, at reuse of memory there and here
    assert calls["events waited for"] <= most


def test_the_stream_at_work_is_the_same_after_a_copy_that_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(machine, 4 * SIZE, 0)
    monkeypatch.setattr(torch.Tensor, "copy_", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.put(0)
    assert machine.current is machine.main
    monkeypatch.undo()


def _interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
