"""What modules that are run again draw in a captured step: their second runs draw the same numbers, in every replay.

A kernel that was captured reads the seed and the offset of its generator from memory that each replay sets first, and
adds what the graph has drawn from that generator before it. Nobody can move a generator back meanwhile, but it can be
given another state. So a module that draws has two states that nothing has been drawn from when it begins: one for its
first run and for all that is drawn after it, until the next such module begins; and one for its second run. Before a
replay both are moved to where the generator stands at this point of an eager step, as the rehearsal has shown. So the
two runs draw the same numbers whatever they draw, and those that an eager step would draw.

The other modules have one more state among them. If anything has been drawn from it, one of them draws after all, and
the replay is worth nothing.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lowtide.errors import GraphError
from lowtide.recompute import Regions
from lowtide.surroundings import Begin, Draws, Rewound, rewind

Key = tuple[str, int]  # the path of a module, and how often it had run before in the step


@dataclass(frozen=True, slots=True)
class Plan:
    """Where in the numbers of a step each module that draws begins, in that order, and how many there are in all."""

    starts: dict[Key, int]
    total: int


class Repeats:
    """What the modules of a step draw that are run again, from its rehearsals to the replays of its graphs."""

    def __init__(self, generator: torch.Generator, regions: Regions | None) -> None:
        """``generator``: that of the device. Without ``regions`` no module is run again, and there is nothing to do."""
        self._generator, self._regions = generator, regions
        self._plan = Plan({}, 0)
        self._states: States | None = None

    @contextlib.contextmanager
    def rehearsed(self) -> Iterator[None]:
        """Around an eager step, in which modules show what they draw."""
        if self._regions is None:
            yield
            return
        rehearsal = Rehearsal(self._generator)
        with self._regions.drawing(rehearsal.begin):
            yield
        self._plan = rehearsal.plan()

    def prepare(self) -> list[torch.Generator]:
        """The states that the next graph draws from, beside the generator's own."""
        if self._regions is None:
            return []
        self._states = States(self._generator, self._plan)
        return self._states.all

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Around the step, within the capture; the generator has its own state again before that ends."""
        if self._regions is None or self._states is None:
            yield
            return
        with self._states.in_use() as begin, self._regions.drawing(begin):
            yield

    def begin_replay(self) -> None:
        if self._states is not None:
            self._states.begin_replay()

    def end_replay(self) -> bool:
        """Whether the replay has drawn as the rehearsal has. The generator is moved on as by an eager step."""
        return self._states is None or self._states.end_replay()


class Rehearsal:
    """Takes down where modules begin to draw."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._first = generator, generator.get_offset()
        self._runs: dict[Key, Rewound] = {}
        self._calls: Counter[str] = Counter()

    def begin(self, path: str, device: torch.device) -> Draws:
        key, draws = _next_key(self._calls, path), rewind(path, device)
        if isinstance(draws, Rewound):
            self._runs[key] = draws
        return draws

    def plan(self) -> Plan:
        """After the step."""
        starts = {key: run.start[1] - self._first for key, run in self._runs.items() if run.has_drawn}
        return Plan(starts, self._generator.get_offset() - self._first)


class States:
    """Those of a generator that one graph draws from."""

    def __init__(self, generator: torch.Generator, plan: Plan) -> None:
        self._generator, self._plan = generator, plan
        self._own = generator.graphsafe_get_state()
        self._firsts = {key: generator.clone_state() for key in plan.starts}
        self._seconds = {key: generator.clone_state() for key in plan.starts}
        self._silent = generator.clone_state()
        self._calls: Counter[str] = Counter()
        self._first = 0  # offset at which the replay at hand began

    @property
    def all(self) -> list[torch.Generator]:
        return [*self._firsts.values(), *self._seconds.values(), self._silent]

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Begin]:
        try:
            yield self._begin
        finally:
            self._generator.graphsafe_set_state(self._own)

    def _begin(self, path: str, device: torch.device) -> Draws:
        key = _next_key(self._calls, path)
        if key not in self._firsts:
            return _Silence(self._generator, self._silent)
        self._generator.graphsafe_set_state(self._firsts[key])
        return _Once(self._generator, self._seconds[key], path)

    def begin_replay(self) -> None:
        seed, self._first = self._own.initial_seed(), self._own.get_offset()
        for states in (self._firsts, self._seconds):
            for key, state in states.items():
                state.manual_seed(seed)
                state.set_offset(self._first + self._plan.starts[key])
        self._silent.set_offset(0)

    def end_replay(self) -> bool:
        """Each state stands where the next one began, if all have been drawn from as was expected."""
        ends = [*self._plan.starts.values(), self._plan.total]
        stand = [state.get_offset() - self._first for state in (self._own, *self._firsts.values())]
        is_expected = stand == ends and self._silent.get_offset() == 0
        self._own.set_offset(self._first + self._plan.total)
        return is_expected


class _Silence:
    """A module that has drawn nothing in the rehearsal, in its first run from the start, and in any other."""

    __slots__ = ("_before", "_generator", "_state")

    def __init__(self, generator: torch.Generator, state: torch.Generator) -> None:
        self._generator, self._state = generator, state
        self.__enter__()

    def end(self) -> None:
        self.__exit__()

    def __enter__(self) -> None:
        self._before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._generator.graphsafe_set_state(self._before)


class _Once:
    """A module that draws: its second run has a state of its own, which is good for one run."""

    __slots__ = ("_before", "_generator", "_path", "_state")

    def __init__(self, generator: torch.Generator, state: torch.Generator, path: str) -> None:
        self._generator, self._path = generator, path
        self._state: torch.Generator | None = state

    def end(self) -> None:
        """What comes next is drawn from the same state as the first run."""

    def __enter__(self) -> None:
        state, self._state = self._state, None
        if state is None:
            raise GraphError(
                f"{self._path} draws random numbers and would be run again more than once in a step, as for a graph "
                "that is retained: that cannot be captured in a CUDA graph. Leave it out of recompute"
            )
        self._before = self._generator.graphsafe_get_state()
        self._generator.graphsafe_set_state(state)

    def __exit__(self, *_: object) -> None:
        self._generator.graphsafe_set_state(self._before)


def _next_key(calls: Counter[str], path: str) -> Key:
    calls[path] += 1
    return path, calls[path] - 1
