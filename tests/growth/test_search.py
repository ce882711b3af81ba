"""Which sizes are tried, against devices whose memory is a formula."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide import find_batch_size
from lowtide.errors import SizeError, UnknownNameError
from lowtide.growth import BatchSize


class Formula:
    """A device on which a step of n samples needs ``need(n)`` bytes; beyond ``limit`` it runs out of memory."""

    def __init__(self, need: Callable[[int], float], limit: int) -> None:
        self._need, self._limit = need, limit
        self.size = 0
        self.sizes: list[int] = []

    def run_step(self, size: int) -> None:
        self.size = size
        if not self.sizes or self.sizes[-1] != size:
            self.sizes.append(size)
        if self._need(size) > self._limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def limit(self) -> int:
        return self._limit

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return int(self._need(self.size))

    def clean(self) -> None:
        pass


def search(need: Callable[[int], float], limit: int, **options: object) -> tuple[BatchSize, list[int]]:
    device = Formula(need, limit)
    settings = {"state": [], "start": 8, "maximum": 4096, "meter": device, **options}
    with mock.patch("gc.collect"):  # there is no garbage, and looking for it takes longer than all the rest
        return find_batch_size(device.run_step, **settings), device.sizes  # type: ignore[arg-type]


def affine(size: int) -> int:
    return 1000 + 10 * size


def test_two_sizes_give_the_line_and_the_third_is_the_answer() -> None:
    result, sizes = search(affine, 10_000)  # 9500 allowed: 850 samples
    assert sizes == [8, 16, 512]
    assert (result.batch, result.peak, result.predicted, result.allowed) == (512, 6120, 6120, 9500)
    assert [(trial.batch, trial.outcome) for trial in result.tried[2:]] == [(512, "fits")] * 2, "run twice"


def test_a_finer_grid_gets_as_close_as_it_can() -> None:
    result, sizes = search(affine, 10_000, granularity=50, start=50)
    assert (result.batch, result.peak) == (850, 9500)
    assert sizes == [50, 100, 850, 900, 850], "900 is excluded by 5 %: close enough to look"
    result, _ = search(affine, 10_000, granularity=1)
    assert result.batch == 850


def test_what_is_held_back_counts_against_the_peak_though_it_would_fit() -> None:
    assert search(affine, 6300, reserve=0.0)[0].batch == 512
    result, sizes = search(affine, 6300)  # 512 needs 6120, and 5985 are allowed
    assert result.batch == 256
    assert sizes == [8, 16, 256, 512, 256] and result.tried[-2].outcome == "too large"


def test_a_budget_below_the_device_counts_and_one_above_does_not() -> None:
    assert search(affine, 10_000, budget=4000)[0].batch == 256
    assert search(affine, 4000, budget="16GiB")[0].batch == 256


def test_the_maximum_ends_the_search() -> None:
    result, sizes = search(affine, 10**9, maximum=300)
    assert result.batch == 256 and result.why == "the largest size that was asked for"
    assert sizes == [8, 16, 256]


def test_memory_that_runs_out_where_the_line_said_it_would_not_is_bisected() -> None:
    """A step in the memory, as a library with another workspace makes, which no line can know of."""
    result, sizes = search(lambda n: affine(n) + (10**9 if n >= 77 else 0), 10_000, granularity=1)
    assert result.batch == 76 and result.why == "77 runs out of memory"
    assert sizes[:3] == [8, 16, 850] and len(sizes) <= 14


def test_a_peak_that_moves_to_another_layer_bends_the_line_and_the_search_follows() -> None:
    """Three layers hold the peak in turn. What was measured far below the answer says nothing about it."""
    result, sizes = search(
        lambda n: max(20_000 + n, 40 * n, 100 * n - 30_000), 10**9, budget=80_000, granularity=1, reserve=0.0
    )
    assert result.batch == 1100 and len(sizes) <= 7


def test_a_start_that_does_not_fit_is_halved_until_something_does() -> None:
    result, sizes = search(lambda n: 100 * n, 1000, start=64)  # 950 allowed
    assert sizes == [64, 32, 16, 8] and result.batch == 8
    assert [trial.outcome for trial in result.tried] == ["out of memory"] * 3 + ["fits"] * 2
    result, sizes = search(lambda n: 100 * n, 1000, start=64, granularity=1)
    assert result.batch == 9


def test_where_nothing_fits_the_batch_is_zero() -> None:
    result, sizes = search(lambda n: 10**6, 1000, start=4)
    assert result.batch == 0 and result.peak is None and sizes == [4, 2, 1]
    assert str(result).startswith("no batch fits; not even the smallest size fits")


def test_memory_that_does_not_grow_jumps_to_the_maximum() -> None:
    assert search(lambda n: 500, 1000)[1] == [8, 16, 4096]


def test_the_text_says_what_was_found_and_what_was_tried() -> None:
    result, _ = search(lambda n: (1 << 20) * (100 + n), 1 << 30)
    lines = str(result).splitlines()
    assert lines[0] == "batch 512: peak 612.00 MiB of 972.80 MiB; 1024 would need 1.10 GiB"
    assert lines[2].split() == ["batch", "peak", "predicted", "outcome"]
    assert lines[-1].split() == ["512", "612.00", "MiB", "612.00", "MiB", "fits"]


def test_every_trial_has_its_steps_and_the_peak_is_that_of_the_last() -> None:
    calls: list[int] = []

    class Settling(Formula):
        def run_step(self, size: int) -> None:
            calls.append(size)
            super().run_step(size)

        def peak(self, step: Callable[[], object]) -> int:
            step()
            return affine(self.size) + (0 if calls.count(self.size) % 4 == 0 else 10**6)

    device = Settling(affine, 2000)
    result = find_batch_size(device.run_step, state=[], start=8, maximum=64, steps=4, meter=device)
    assert result.batch == 64 and [calls.count(size) for size in (8, 16, 64)] == [4, 4, 4 + 16], "the answer twice"


def test_the_answer_is_run_for_longer_than_a_trial() -> None:
    """Here sizes above 32 need more from their sixth step in a row on."""

    class Late(Formula):
        steps = 0

        def clean(self) -> None:
            self.steps = 0

        def peak(self, step: Callable[[], object]) -> int:
            return super().peak(step) + (1000 if self.steps > 5 and self.size > 32 else 0)

        def run_step(self, size: int) -> None:
            self.steps += 1
            super().run_step(size)

    device = Late(affine, 2000)
    assert find_batch_size(device.run_step, state=[], start=8, maximum=64, meter=device).batch == 32


class Lucky(Formula):
    """Sizes above ``safe`` fit once and never again, as a batch that only lucky gaps in memory had room for."""

    def __init__(self, safe: int, *, runs_out: bool) -> None:
        super().__init__(affine, 10**9)
        self._safe, self._runs_out = safe, runs_out
        self._seen: set[int] = set()

    def run_step(self, size: int) -> None:
        super().run_step(size)
        if self._is_unlucky(size) and self._runs_out:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def peak(self, step: Callable[[], object]) -> int:
        needed = super().peak(step)
        unlucky = self._is_unlucky(self.size)
        self._seen.add(self.size)
        return 10**10 if unlucky else needed

    def _is_unlucky(self, size: int) -> bool:
        return size > self._safe and size in self._seen


@pytest.mark.parametrize("runs_out", [True, False])
@pytest.mark.parametrize("granularity", ["power of two", 8])
def test_an_answer_that_does_not_hold_twice_is_given_up(runs_out: bool, granularity: str | int) -> None:
    device = Lucky(100, runs_out=runs_out)
    settings = {"state": [], "start": 8, "maximum": 1024, "granularity": granularity, "meter": device}
    with mock.patch("gc.collect"):
        result = find_batch_size(device.run_step, **settings)  # type: ignore[arg-type]
    assert result.batch == (64 if granularity != 8 else 96) and result.peak == affine(result.batch)
    above = 128 if granularity != 8 else 104
    assert result.why == (f"{above} runs out of memory" if runs_out else f"{above} is too large")
    assert [trial.fits for trial in result.tried if trial.batch == result.batch] == [True, True]


def test_of_two_runs_of_the_answer_the_higher_peak_is_given() -> None:
    peaks = iter([100, 120])
    device = mock.Mock(limit=lambda: 1000, peak=lambda step: next(peaks))
    result = find_batch_size(lambda size: None, state=[], start=8, maximum=8, meter=device)
    assert (result.batch, result.peak) == (8, 120)


@settings(deadline=None, derandomize=True)
@given(
    fixed=st.integers(0, 10**6),
    each=st.integers(1, 10**4),
    limit=st.integers(1, 10**8),
    start=st.sampled_from([1, 8, 64]),
    granularity=st.sampled_from(["power of two", 1, 8]),
)
def test_on_a_line_the_answer_is_the_largest_and_few_sizes_are_tried(
    fixed: int, each: int, limit: int, start: int, granularity: str | int
) -> None:
    start = max(start, granularity) if isinstance(granularity, int) else start
    result, sizes = search(
        lambda n: fixed + each * n, limit, start=start, maximum=4096, granularity=granularity, reserve=0.0
    )
    grid = [2**k for k in range(13)] if isinstance(granularity, str) else range(granularity, 4097, granularity)
    assert result.batch == max([n for n in grid if fixed + each * n <= limit], default=0)
    assert len(sizes) <= (6 if fixed + 2 * each * start <= limit else 14)


@settings(deadline=None, derandomize=True)
@given(
    jumps=st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 10**5)), max_size=5),
    each=st.integers(0, 100),
    limit=st.integers(1, 10**6),
    granularity=st.sampled_from(["power of two", 1, 8]),
)
def test_whatever_the_memory_does_the_answer_was_run_and_fits(
    jumps: list[tuple[int, int]], each: int, limit: int, granularity: str | int
) -> None:
    """Growing memory with steps in it: the next size either failed or was excluded by the line."""

    def need(n: int) -> int:
        return each * n + sum(height for at, height in jumps if n >= at)

    result, sizes = search(need, limit, granularity=granularity, reserve=0.0)
    assert len(set(sizes)) >= len(sizes) - 1 <= 40, "none is tried again but the answer"
    if not result.batch:
        assert need(1 if granularity != 8 else 8) > limit
        return
    assert result.batch in sizes and result.peak == need(result.batch) <= limit
    assert all(need(n) > limit for n in sizes if n > result.batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start": 0}, SizeError, "start is at least 1 and at most maximum; got start=0, maximum=4096"),
        ({"start": 8, "maximum": 4}, SizeError, "start is at least 1 and at most maximum"),
        ({"start": 48}, SizeError, "start=48 is not a power of two up to 4096; use 32 or 64"),
        ({"start": 48, "granularity": 32}, SizeError, "start=48 is not a multiple of 32 up to 4096; use 32 or 64"),
        ({"start": 8, "maximum": 9, "granularity": 32}, SizeError, "no size up to maximum=9 is a multiple of 32"),
        ({"granularity": 0}, SizeError, "granularity is 'power of two' or a number of samples, 1 or more; got 0"),
        ({"granularity": "power of tow"}, UnknownNameError, "Did you mean 'power of two'"),
        ({"reserve": 1.0}, SizeError, "reserve is a share of the memory, at least 0 and less than 1; got 1.0"),
        ({"steps": 0}, SizeError, "a trial has at least one step; got steps=0"),
        ({"budget": "much"}, SizeError, "budget is a number of bytes or a text such as '512MiB'"),
    ],
)
def test_mistakes_are_refused_before_any_step(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        search(lambda n: pytest.fail("a step was taken"), 1000, **options)


def test_the_cpu_needs_a_meter() -> None:
    with pytest.raises(SizeError, match="memory on cpu cannot be measured"):
        find_batch_size(lambda n: None, state=[], start=1, maximum=2, device="cpu")
