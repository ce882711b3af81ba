"""The figures of a report are those of the runs."""

from __future__ import annotations

import json
import math

import pytest

from lowtide.app.report import figures
from lowtide.app.report.runs import number_in, read_run

MIB = 1 << 20


def test_a_run_in_one_line(make_run):
    plain = read_run(make_run("plain", accuracy=0.95))
    ours = read_run(make_run("ours", method="fixed", accuracy=0.945, ratio=8.0))
    first, second = figures.summarise([plain, ours])
    assert (first.accuracy, first.best, first.held, first.peak) == (0.95, 0.96, 16 * MIB, 24 * MIB)
    assert first.difference is None and first.ratio == 1.0  # not in the result: from the steps
    assert second.ratio == 8.0 and second.held == 2 * MIB and second.raw == 16 * MIB
    assert second.difference == pytest.approx(-0.5)
    assert (second.seconds, second.speed, second.steps, second.seed) == (12.5, 115.5, 30, 0)


def test_a_run_that_has_not_ended_is_known_from_its_metrics(make_run):
    run = read_run(make_run("stopped", method="fixed", accuracy=0.9, ratio=4.0, without=["result.json"]))
    (item,) = figures.summarise([run])
    assert (item.accuracy, item.best, item.held, item.ratio, item.peak) == (0.9, 0.9, 4 * MIB, 4.0, 12 * MIB)
    assert item.seconds is None and item.seed is None


def test_on_a_cpu_the_peak_is_that_of_the_step_that_was_followed(make_run):
    run = read_run(make_run(peak=None))
    for row in run.steps:
        row["peak_nbytes"] = None
    assert figures.summarise([run])[0].peak == 5 * MIB


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ((0, 0, 0), 100 * (0.9 - 0.8)),  # the only plain run of the same seed
        ((0, 1, 1), 100 * (0.9 - 0.7)),
        ((0, 1, 2), None),  # two plain runs, neither is its partner
    ],
)
def test_the_difference_is_to_the_plain_run_of_the_same_seed(make_run, seeds, expected):
    accuracies = (0.8, 0.7)
    plains = [read_run(make_run(f"p{number}", accuracy=accuracies[number], seed=seeds[number])) for number in range(2)][
        : 1 if seeds == (0, 0, 0) else 2
    ]
    ours = read_run(make_run("ours", method="fixed", accuracy=0.9, ratio=8.0, seed=seeds[2]))
    difference = figures.summarise([*plains, ours])[-1].difference
    assert difference == (pytest.approx(expected) if expected is not None else None)


def test_a_long_curve_is_thinned_to_means():
    rows = [{"step": step, "loss": float(step % 2)} for step in range(4 * figures.MOST_POINTS)]
    points = figures.curve(rows, "step", "loss")
    assert len(points) == figures.MOST_POINTS
    assert points[0] == (1.5, 0.5) and {y for _, y in points} == {0.5}
    few = figures.curve(rows[:5], "step", "loss")
    assert few == [(float(step), float(step % 2)) for step in range(5)]


def test_what_is_no_number_makes_a_gap():
    rows = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": None}, {"step": 3, "loss": 1.0}, {"step": 4}]
    assert figures.curve(rows, "step", "loss") == [(3.0, 1.0)]
    assert number_in({"a": True}, "a") is None and number_in({"a": "1"}, "a") is None and number_in({"a": 0}, "a") == 0


def test_epochs_are_the_axis_only_if_every_evaluation_has_one(make_run):
    run, other = read_run(make_run("one")), read_run(make_run("two"))
    assert figures.has_epochs([run, other])
    del other.evals[1]["epoch"]
    assert not figures.has_epochs([run, other])
    assert not figures.has_epochs([])


def test_memory_is_drawn_from_forward_to_backward(make_run):
    points = figures.memory_curve(read_run(make_run()))
    assert [x for x, _, _ in points] == pytest.approx([0, 0.33, 0.66, 0.99, 1, 1.99])
    assert [y / MIB for _, y, _ in points] == [0, 1, 2, 3, 5, 1]
    assert [place for _, _, place in points] == ["layer0", "layer1", "layer2", "layer3", "layer3", "layer0"]


def test_memory_at_named_places(make_run, tmp_path):
    folder = make_run()
    rows = [{"phase": "forward", "at": name, "allocated": value} for name, value in (("a", 1), ("b", 2), ("c", 3))]
    (folder / "memory.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert figures.memory_curve(read_run(folder)) == [(0.0, 1.0, "a"), (0.495, 2.0, "b"), (0.99, 3.0, "c")]


def test_bytes_by_what_backward_reads_and_what_was_left_alone(make_run):
    run = read_run(make_run("ours", method="fixed", ratio=8.0))
    shares = figures.shares(run.layers)
    assert list(shares) == ["values", "mask", "window", "metadata", "exact"]
    assert shares["values"]["raw"] == 12 * MIB and shares["values"]["saves"] == 2
    assert figures.left_alone(run.layers) == {
        "recurrent op": {"saves": 1, "raw": MIB, "held": MIB},
        "smaller than min_size": {"saves": 2, "raw": 64, "held": 64},
    }


def test_the_ratio_of_a_site_over_time(make_run):
    past = figures.histories(read_run(make_run("ours", method="fixed", ratio=8.0)))
    steps, ratios = zip(*past["bn1:native_batch_norm.input"], strict=True)
    assert steps == (10, 20, 30)
    assert ratios == pytest.approx((8 / 1.1, 8 / 1.2, 8 / 1.3), rel=1e-6)
    assert "relu:relu.result" not in past
