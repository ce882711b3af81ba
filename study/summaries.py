"""What the rows of a table say about each of its methods: means, paired differences, ratios."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments import Experiment, Variant
from outcomes import read_rows

from lowtide.app.compare.student import Estimate
from lowtide.app.compare.summary import summarize

DEFAULT = "budget"
RATIOS = (
    *("conv_ratio_fp32_mean", "conv_ratio_fp32", "conv_ratio_mean"),
    *("ratio_fp32_mean", "ratio_fp32", "ratio_mean"),
)
_MEANS = (*RATIOS, "conv_raw_fp32", "conv_held_mean", "held_mean", "raw_fp32", "peak", "seconds")
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One method of a table. ``value`` is None where no run of it has ended; accuracies are in per cent.

    ``loss`` is the difference of test losses from those of plain training, whatever the metric of the table is.
    """

    variant: Variant
    rows: Sequence[Row]
    value: Estimate | None
    difference: Estimate | None
    loss: Estimate | None

    @property
    def is_default(self) -> bool:
        return DEFAULT in self.variant.text.split(" = ")

    def mean(self, column: str) -> float | None:
        """Over the seeds; None where no row has it."""
        found = [float(row[column]) for row in self.rows if row[column]]
        return fmean(found) if found else None

    @property
    def speed(self) -> float | None:
        """Samples a second, of the runs that had the device to themselves."""
        found = [float(row["images_per_second"]) for row in self.rows if row["alone"] == "True"]
        return fmean(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"method": self.variant.text, "seeds": self.variant.seeds, "runs": len(self.rows)}
        estimates = (("value", self.value), ("difference", self.difference), ("loss_difference", self.loss))
        for name, estimate in estimates:
            if estimate is not None:
                about[name] = {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}
        return about | {name: self.mean(name) for name in _MEANS} | {"speed_alone": self.speed}


@dataclass(frozen=True, slots=True)
class Summary:
    """A table as far as it is known."""

    experiment: Experiment
    outcomes: Sequence[Outcome]
    failures: Sequence[Row]

    @property
    def rows(self) -> list[Row]:
        return [row for outcome in self.outcomes for row in outcome.rows]

    @property
    def base(self) -> Outcome:
        return self.outcomes[0]

    @property
    def default(self) -> Outcome | None:
        return next((outcome for outcome in self.outcomes if outcome.is_default), None)

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.experiment.title,
            "metric": self.experiment.metric,
            "methods": [outcome.as_dict() for outcome in self.outcomes],
        }


def find_rows(experiment: Experiment, results: Path) -> list[tuple[Variant, Row]]:
    """The results that a table wants, each with its variant; the last one where there are several."""
    found: dict[tuple[str, str], tuple[Variant, Row]] = {}
    for row in read_rows(results / f"{experiment.name}.csv"):
        if row["key"] != experiment.key or row["error"]:
            continue
        for variant in experiment.variants:
            if variant.is_of(row) and int(row["seed"]) < variant.seeds:
                found[variant.text, row["seed"]] = variant, row
    return list(found.values())


def as_compared(found: Sequence[tuple[Variant, Row]]) -> list[Row]:
    """Rows under the names that ``lowtide compare`` has for their columns."""
    return [
        {**row, "method": variant.text, "held": row["held_mean"], "ratio": row["ratio_fp32_mean"]}
        for variant, row in found
    ]


def summarize_table(experiment: Experiment, results: Path) -> Summary:
    found = find_rows(experiment, results)
    texts = [variant.text for variant in experiment.variants]
    compared = as_compared(found)
    known = {item.method: item for item in summarize(compared, texts, experiment.metric)}
    losses = {item.method: item for item in summarize([row for row in compared if row["loss"]], texts, "loss")}
    outcomes = [
        Outcome(
            variant,
            sorted((row for other, row in found if other is variant), key=lambda row: int(row["seed"])),
            known[variant.text].value if variant.text in known else None,
            known[variant.text].difference if variant.text in known else None,
            losses[variant.text].difference if variant.text in losses else None,
        )
        for variant in experiment.variants
    ]
    return Summary(experiment, outcomes, _find_failures(experiment, results, outcomes))


def _find_failures(experiment: Experiment, results: Path, outcomes: Sequence[Outcome]) -> list[Row]:
    """Runs that failed and have not succeeded since, each once."""
    failures: dict[tuple[str, str], Row] = {}
    for row in read_rows(results / f"{experiment.name}.csv"):
        if row["key"] != experiment.key or not row["error"]:
            continue
        for outcome in outcomes:
            variant, seed = outcome.variant, row["seed"]
            is_wanted = variant.is_of(row) and int(seed) < variant.seeds
            if is_wanted and all(other["seed"] != seed for other in outcome.rows):
                failures[variant.text, seed] = {**row, "method": variant.text}
    return list(failures.values())


def mean_curve(outcome: Outcome, results: Path, column: str) -> list[tuple[float, float]]:
    """A column of the runs' curves over the epochs, the mean over the seeds."""
    points: dict[int, list[float]] = {}
    for row in outcome.rows:
        with (results / row["curve"]).open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                if line[column]:
                    points.setdefault(int(line["epoch"]), []).append(float(line[column]))
    return [(float(epoch), fmean(values)) for epoch, values in sorted(points.items())]
