"""Means, differences and intervals, against tables and by hand."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from lowtide.app.compare.runs import read_seeds
from lowtide.app.compare.student import Estimate, probability, quantile
from lowtide.app.compare.summary import render, summarize
from lowtide.app.shared.specs import UsageError


@pytest.mark.parametrize(
    ("freedom", "confidence", "wanted"),
    [
        # Abramowitz and Stegun, table 26.10
        (1, 0.95, 12.706), (2, 0.95, 4.303), (3, 0.95, 3.182), (4, 0.95, 2.776), (9, 0.95, 2.262), (30, 0.95, 2.042),
        (120, 0.95, 1.980), (1, 0.8, 3.078), (5, 0.99, 4.032), (10, 0.999, 4.587),
    ],
)  # fmt: skip
def test_quantiles_are_those_of_the_table(freedom, confidence, wanted):
    assert quantile(freedom, confidence) == pytest.approx(wanted, abs=6e-4)


def test_the_probability_of_many_is_the_normal_one():
    assert probability(1.959964, 100_000) == pytest.approx(math.erf(1.959964 / math.sqrt(2)), abs=1e-5)
    assert probability(0.0, 7) == 0.0


def test_an_interval_by_hand():
    estimate = Estimate.of([1.0, 2.0, 3.0])
    half = 4.302653 * 1.0 / math.sqrt(3)
    assert estimate.mean == 2.0 and estimate.half == pytest.approx(half, rel=1e-6)
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half))
    assert Estimate.of([4.0]) == Estimate(4.0, None, 1) and Estimate.of([4.0]).low is None
    with pytest.raises(ValueError, match="needs a value"):
        Estimate.of([])


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """2000 samples of 5: 1900 expected, standard deviation 9.7; five of them either way."""
    chance = random.Random(0)
    covered = 0
    for _ in range(2000):
        estimate = Estimate.of([chance.gauss(3.0, 2.0) for _ in range(5)])
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 3.0 <= estimate.high
    assert abs(covered - 1900) < 49


def _row(method: str, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "method": method, "seed": seed, "accuracy": accuracy, "images_per_second": 100.0, "held": 1024, "ratio": 4.0,
        "peak": "", **more,
    }  # fmt: skip


def test_differences_are_taken_seed_by_seed():
    """Seeds differ by tens of points, methods by one: only the pairs show it."""
    rows = [_row("plain", seed, 0.1 * seed) for seed in range(1, 5)]
    rows += [_row("bold", seed, 0.1 * seed - change) for seed, change in ((1, 0.011), (2, 0.009), (4, 0.010))]
    plain, bold = summarize(rows, ["plain", "bold"], "accuracy")
    assert plain.difference is None and plain.value.mean == pytest.approx(25.0)
    assert bold.difference is not None and bold.difference.count == 3
    assert bold.difference.mean == pytest.approx(-1.0)
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert bold.difference.low == pytest.approx(-1.0 - half, rel=1e-4)
    text = "\n".join(render([plain, bold], "accuracy"))
    assert "bold - plain: -1.00 points, 95 % interval [-1.25, -0.75], 3 paired seeds: a difference" in text
    assert "1.00 KiB  4.00x" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((0.01, -0.01), "no difference shown"),
        ((0.0, 0.0), "equal with each of 2 seeds"),
        ((0.01,), "an interval needs two or more"),
    ],
)
def test_what_is_said_about_a_difference(changes, words):
    rows = [_row("plain", seed, 0.5) for seed in range(len(changes))]
    rows += [_row("bold", seed, 0.5 + change) for seed, change in enumerate(changes)]
    assert words in render(summarize(rows, ["plain", "bold"], "accuracy"), "accuracy")[-1]


def test_losses_are_no_percentages():
    rows = [_row("plain", 0, 0.5, loss="1.25"), _row("bold", 0, 0.5, loss="1.2625")]
    lines = render(summarize(rows, ["plain", "bold"], "loss"), "loss")
    assert "+0.0125" in lines[3] and "1.2500" in lines[2] and lines[0].split()[2] == "loss"


def test_a_method_without_results_is_left_out():
    assert [item.method for item in summarize([_row("plain", 0, 0.5)], ["plain", "bold"], "accuracy")] == ["plain"]
    assert summarize([], ["plain"], "accuracy") == []


@pytest.mark.parametrize(("text", "seeds"), [("3", [0, 1, 2]), ("4-6", [4, 5, 6]), ("9, 1", [9, 1]), ("7-7", [7])])
def test_seeds_as_people_write_them(text, seeds):
    assert read_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "0", "x", "3-1", "1,1", "-2", "1-2-3"])
def test_seeds_that_are_none_are_refused(text):
    with pytest.raises(UsageError, match=r"cannot read .* as seeds"):
        read_seeds(text)
