"""Stands in for the generator of a GPU, and for a graph that draws from it, by the rules of torch.

A draw is where it lies in the numbers of a seed. While a graph is captured a generator cannot be asked or moved; what
is drawn then counts from where the state of the generator will be when a replay begins.
"""

from __future__ import annotations

from dataclasses import dataclass

Draw = tuple[int, int, int]  # seed, first and last


@dataclass(eq=False)
class State:
    seed: int = 7
    offset: int = 0
    within: int = 0  # drawn since the capture began


class FakeGenerator:
    capture: Capture | None = None  # the one that is under way

    def __init__(self, state: State | None = None) -> None:
        self.state = state or State()

    def initial_seed(self) -> int:
        return self._outside().seed

    def get_offset(self) -> int:
        return self._outside().offset

    def set_offset(self, offset: int) -> None:
        self._outside().offset = offset

    def manual_seed(self, seed: int) -> None:
        state = self._outside()
        state.seed, state.offset = seed, 0

    def clone_state(self) -> FakeGenerator:
        return FakeGenerator(State(self.state.seed, self.state.offset))

    def graphsafe_get_state(self) -> FakeGenerator:
        return FakeGenerator(self.state)

    def graphsafe_set_state(self, other: FakeGenerator) -> None:
        self.state = other.state

    def draw(self, count: int) -> Draw | int:
        """What an eager kernel draws; of one that is captured, its number in the capture."""
        state = self.state
        if FakeGenerator.capture is not None:
            return FakeGenerator.capture.draw(state, count)
        state.offset += count
        return state.seed, state.offset - count, state.offset

    def _outside(self) -> State:
        assert FakeGenerator.capture is None, "nobody may ask during a capture"
        return self.state


class Capture:
    """A graph that draws: in use as a context while it is captured, replayed afterwards."""

    def __init__(self, generator: FakeGenerator, others: list[FakeGenerator]) -> None:
        self._states = [generator.state, *(other.state for other in others)]
        self._draws: list[tuple[State, int, int]] = []

    def __enter__(self) -> None:
        FakeGenerator.capture = self
        for state in self._states:
            state.within = 0

    def __exit__(self, *_: object) -> None:
        FakeGenerator.capture = None
        self._totals = [state.within for state in self._states]

    def draw(self, state: State, count: int) -> int:
        assert state in self._states, "it was not told to the graph before"
        self._draws.append((state, state.within, count))
        state.within += count
        return len(self._draws) - 1

    def replay(self) -> list[Draw]:
        """What each kernel draws, in the order of the capture."""
        at = {id(state): (state.seed, state.offset) for state in self._states}
        for state, total in zip(self._states, self._totals, strict=True):
            state.offset += total
        found = []
        for state, within, count in self._draws:
            seed, offset = at[id(state)]
            found.append((seed, offset + within, offset + within + count))
        return found
