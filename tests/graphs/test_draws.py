"""Random numbers of modules that are run again in a captured step: those of the first run, and of an eager step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_generator import Capture, Draw, FakeGenerator

from lowtide.errors import GraphError
from lowtide.graphs.draws import Repeats
from lowtide.surroundings import Begin, Draws, rewind

GPU = torch.device("cuda", 0)


class Step:
    """Modules and what each draws, one after the other; None is a draw outside of them. Backward runs them again.

    ``first`` and ``second`` are the draws of either run of each module, ``outside`` those of nobody's.
    """

    def __init__(self, generator: FakeGenerator, *modules: tuple[str | None, int]) -> None:
        self.generator, self.modules = generator, modules
        self.begin: Begin = rewind
        self.runs_again = 1
        self.fails = False

    @contextlib.contextmanager
    def drawing(self, begin: Begin) -> Iterator[None]:
        self.begin = begin
        yield
        self.begin = rewind

    def run(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"first": [], "second": [], "outside": []}
        ran: list[tuple[Draws, int]] = []
        for path, count in self.modules:
            if path is None:
                found["outside"].append(self.generator.draw(count))
                continue
            draws = self.begin(path, GPU)
            if count:
                found["first"].append(self.generator.draw(count))
            draws.end()
            ran.append((draws, count))
        if self.fails:
            raise ValueError("broken")
        for draws, count in reversed(ran):
            for _ in range(self.runs_again):
                with draws:
                    if count:
                        found["second"].append(self.generator.draw(count))
        found["second"].reverse()
        found["outside"].append(self.generator.draw(4))  # in backward
        return found


class Graph:
    """A step as ``GraphStep`` rehearses, captures and replays it."""

    def __init__(self, step: Step) -> None:
        self.step, self.repeats = step, Repeats(step.generator, step)  # type: ignore[arg-type]
        with self.repeats.rehearsed():
            step.run()

    def capture(self) -> Graph:
        self._graph = Capture(self.step.generator, self.repeats.prepare())  # type: ignore[arg-type]
        with self._graph, self.repeats.captured():
            self._numbers = self.step.run()
        return self

    def replay(self) -> tuple[dict[str, list[Draw]], bool]:
        self.repeats.begin_replay()
        draws = self._graph.replay()
        is_expected = self.repeats.end_replay()
        return {kind: [draws[number] for number in numbers] for kind, numbers in self._numbers.items()}, is_expected


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> FakeGenerator:
    generator = FakeGenerator()
    generator.set_offset(100)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    return generator


STEPS: dict[str, tuple[tuple[str | None, int], ...]] = {
    "nothing": (("a", 0), ("b", 0)),
    "outside": ((None, 8), ("a", 0), (None, 4)),
    "inside": (("a", 8), ("b", 12), ("c", 4)),
    "mixed": ((None, 4), ("a", 8), (None, 16), ("quiet", 0), ("b", 12), ("quiet", 0), (None, 4)),
    "one module twice": (("a", 8), ("b", 0), ("a", 8), (None, 4)),
}
CASES = pytest.mark.parametrize("modules", STEPS.values(), ids=STEPS)


@CASES
def test_eager_second_runs_draw_the_same_and_leave_no_trace(generator, modules):
    found = Step(generator, *modules).run()
    assert found["second"] == found["first"]
    assert generator.get_offset() == 100 + sum(count for _, count in modules) + 4
    taken = sorted(found["first"] + found["outside"])
    assert all(one[2] <= other[1] for one, other in itertools.pairwise(taken)), "nothing is drawn twice"


@CASES
def test_a_replay_draws_what_an_eager_step_would(generator, modules):
    step = Step(generator, *modules)
    graph = Graph(step).capture()
    for seed in (None, None, 11):
        if seed is not None:
            generator.manual_seed(seed)
        where = generator.initial_seed(), generator.get_offset()
        expected, end = step.run(), generator.get_offset()
        generator.set_offset(where[1])
        got, is_expected = graph.replay()
        assert got == expected and got["second"] == got["first"] and is_expected
        assert (generator.initial_seed(), generator.get_offset()) == (where[0], end)


@pytest.mark.parametrize(
    ("rehearsed", "captured"),
    [
        ((("a", 0), ("b", 8)), (("a", 4), ("b", 8))),  # it has begun to draw
        ((("a", 0), ("b", 0)), (("a", 4), ("b", 0))),
        ((("a", 8), ("b", 8)), (("a", 8), ("b", 0))),  # or has stopped
        ((("a", 8), ("c", 8)), (("a", 8), ("b", 8))),  # another one runs instead
        (((None, 4), ("a", 8)), ((None, 8), ("a", 8))),  # what comes after it would be drawn twice
        ((("a", 0), (None, 4)), (("a", 4), (None, 0))),  # as many numbers, but others draw them
    ],
)
def test_a_step_that_draws_otherwise_than_its_rehearsal_is_noticed(generator, rehearsed, captured):
    step = Step(generator, *rehearsed)
    graph = Graph(step)
    step.modules = captured
    graph.capture()
    for _ in range(2):
        _, is_expected = graph.replay()
        assert not is_expected


def test_a_module_that_draws_has_numbers_for_one_second_run(generator):
    step = Step(generator, ("quiet", 0), ("a", 8))
    graph = Graph(step)
    step.runs_again = 2
    with pytest.raises(GraphError, match=r"a draws random numbers and would be run again more than once"):
        graph.capture()
    step.modules = (("quiet", 0),)
    graph = Graph(step).capture()
    assert graph.replay()[1], "the others may be run again as often as need be"


@pytest.mark.parametrize("modules", [(("a", 8),), (("quiet", 0),)], ids=["draws", "quiet"])
def test_the_generator_is_itself_again_when_a_capture_has_failed(generator, modules):
    step, own = Step(generator, *modules), generator.state
    graph = Graph(step)
    step.fails = True
    with pytest.raises(ValueError, match="broken"):
        graph.capture()
    assert generator.state is own


def test_without_modules_that_are_run_again_there_is_nothing_to_do():
    repeats = Repeats(None, None)  # type: ignore[arg-type]
    with repeats.rehearsed(), repeats.captured():
        assert repeats.prepare() == []
    repeats.begin_replay()
    assert repeats.end_replay()


def test_modules_on_the_cpu_draw_from_its_generator_alone():
    draws = rewind("a", torch.device("cpu"))
    draws.end()
    with draws:
        pass


def test_a_run_that_draws_though_the_first_did_not_moves_nothing(generator):
    """As after a change of mode in between, which is nobody's fault here."""
    draws = rewind("a", GPU)
    draws.end()
    with draws:
        generator.draw(8)
    assert generator.get_offset() == 100


def test_a_seed_that_has_changed_in_between_is_put_back(generator):
    draws = rewind("a", GPU)
    first = generator.draw(8)
    draws.end()
    generator.manual_seed(5)
    generator.draw(12)
    with draws:
        assert generator.draw(8) == first
    assert (generator.initial_seed(), generator.get_offset()) == (5, 12)
