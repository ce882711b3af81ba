"""Rows of runs to one line for each method: means, and differences from the first method with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.app.compare.student import Estimate
from lowtide.reports.text import size, table

METRICS = ("accuracy", "best", "loss")


@dataclass(frozen=True, slots=True)
class Summary:
    """What the runs of one method say. Accuracies are in per cent, differences in points."""

    method: str
    value: Estimate
    difference: Estimate | None
    held: float | None
    ratio: float | None
    peak: float | None
    speed: float

    def as_dict(self) -> dict[str, Any]:
        about: dict[str, Any] = {"method": self.method, "runs": self.value.count, "mean": self.value.mean}
        about["half_width"] = self.value.half
        if self.difference is not None:
            about |= {"pairs": self.difference.count, "difference": self.difference.mean}
            about |= {"low": self.difference.low, "high": self.difference.high}
        return about | {name: getattr(self, name) for name in ("held", "ratio", "peak", "speed")}


def summarize(rows: Sequence[Mapping[str, Any]], methods: Sequence[str], metric: str) -> list[Summary]:
    """One for each method that has a result; ``methods[0]`` is what the others are compared with."""
    scale = 1.0 if metric == "loss" else 100.0
    values: dict[str, dict[int, float]] = {method: {} for method in methods}
    for row in rows:
        values[row["method"]][int(row["seed"])] = scale * float(row[metric])
    summaries = []
    for method in methods:
        if not values[method]:
            continue
        own = [row for row in rows if row["method"] == method]
        base = values[methods[0]]
        pairs = [value - base[seed] for seed, value in sorted(values[method].items()) if seed in base]
        is_base = method == methods[0]
        summaries.append(
            Summary(
                method=method,
                value=Estimate.of(list(values[method].values())),
                difference=None if is_base or not pairs else Estimate.of(pairs),
                held=_mean(own, "held"),
                ratio=_mean(own, "ratio"),
                peak=_mean(own, "peak"),
                speed=_mean(own, "images_per_second") or 0.0,
            )
        )
    return summaries


def render(summaries: Sequence[Summary], metric: str) -> list[str]:
    """The table, and in words what it says about each method."""
    unit = "" if metric == "loss" else " %"
    heads = ("method", "runs", f"{metric}{unit}", "difference", "95 % interval", "held", "ratio", "peak", "per s")
    cells = [
        (
            item.method,
            str(item.value.count),
            _number(item.value.mean, metric),
            "" if item.difference is None else _signed(item.difference.mean, metric),
            "" if item.difference is None else _interval(item.difference, metric),
            _size(item.held),
            "" if item.ratio is None else f"{item.ratio:.2f}x",
            _size(item.peak),
            f"{item.speed:.0f}",
        )
        for item in summaries
    ]
    lines = table(heads, cells)
    if not summaries:
        return lines
    base = summaries[0].method
    return [*lines, "", *(_explain(item, base, metric) for item in summaries if item.difference is not None)]


def _explain(item: Summary, base: str, metric: str) -> str:
    difference = item.difference
    assert difference is not None, "only methods with a difference are explained"
    what = "loss" if metric == "loss" else "points"
    text = f"{item.method} - {base}: {_signed(difference.mean, metric)} {what}"
    if difference.low is None or difference.high is None:
        return f"{text} with one seed; an interval needs two or more"
    if difference.low == difference.high == 0:
        return f"{text}: equal with each of {difference.count} seeds"
    verdict = "no difference shown" if difference.low <= 0 <= difference.high else "a difference"
    return f"{text}, 95 % interval {_interval(difference, metric)}, {difference.count} paired seeds: {verdict}"


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    found = [float(row[name]) for row in rows if row.get(name) not in (None, "")]
    return sum(found) / len(found) if found else None


def _number(value: float, metric: str) -> str:
    return f"{value:.4f}" if metric == "loss" else f"{value:.2f}"


def _signed(value: float, metric: str) -> str:
    return f"{value:+.4f}" if metric == "loss" else f"{value:+.2f}"


def _interval(difference: Estimate, metric: str) -> str:
    if difference.low is None or difference.high is None:
        return "needs 2 seeds"
    return f"[{_signed(difference.low, metric)}, {_signed(difference.high, metric)}]"


def _size(nbytes: float | None) -> str:
    return "" if nbytes is None else size(round(nbytes))
