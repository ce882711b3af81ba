"""Which charts a report has: accuracy and loss of the runs together, ratio over time, memory over a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lowtide.app.report import figures, scales
from lowtide.app.report.chart import Chart, Series
from lowtide.app.report.figures import Point
from lowtide.app.report.runs import Run


@dataclass(frozen=True, slots=True)
class Charts:
    curves: list[Chart]
    memory: list[Chart]


def charts_of(runs: Sequence[Run]) -> Charts:
    """All charts that have something to show."""
    x = "epoch" if figures.has_epochs(runs) else "step"
    curves = [
        _accuracy(runs, x),
        _test_loss(runs, x),
        _training_loss(runs),
    ]
    memory = [_ratio(runs), _memory(runs)]
    return Charts([chart for chart in curves if chart.series], [chart for chart in memory if chart.series])


def _lines(runs: Sequence[Run], points: Callable[[Run], Sequence[Point]]) -> list[Series]:
    """A line for each run that has points; a run has the same style in all charts."""
    found = [(index, run.name, points(run)) for index, run in enumerate(runs)]
    return [Series(name, values, index) for index, name, values in found if values]


def _ends(series: Sequence[Series], form: scales.Format) -> str:
    return ", ".join(f"{line.name} ends at {form(line.points[-1][1])}" for line in series)


def _accuracy(runs: Sequence[Run], x: str) -> Chart:
    series = _lines(runs, lambda run: figures.curve(run.evals, x, "accuracy"))
    return Chart(
        "accuracy", "Test accuracy", f"{_ends(series, scales.percent)}.", x, "accuracy", series,
        x_format=scales.count, y_format=scales.percent, y_ticks=scales.short_percent,
    )  # fmt: skip


def _test_loss(runs: Sequence[Run], x: str) -> Chart:
    series = _lines(runs, lambda run: figures.curve(run.evals, x, "loss"))
    return Chart(
        "test-loss", "Test loss", f"{_ends(series, scales.plain)}.", x, "loss", series,
        x_format=scales.count, y_format=scales.plain, y_ticks=scales.plain, zero=True,
    )  # fmt: skip


def _training_loss(runs: Sequence[Run]) -> Chart:
    series = _lines(runs, lambda run: figures.curve(run.steps, "step", "loss"))
    thinned = any(len(run.steps) > figures.MOST_POINTS for run in runs)
    note = " A point is the mean of neighbouring steps." if thinned else ""
    return Chart(
        "loss", "Training loss", f"{_ends(series, scales.plain)}.{note}", "step", "loss", series,
        x_format=scales.count, y_format=scales.plain, y_ticks=scales.plain, zero=True,
    )  # fmt: skip


def _ratio(runs: Sequence[Run]) -> Chart:
    series = _lines(runs, lambda run: [] if run.is_plain else figures.curve(run.steps, "step", "ratio"))
    return Chart(
        "ratio", "Ratio over time",
        f"What plain training would hold for backward, divided by what is held: {_ends(series, scales.times)}.",
        "step", "ratio", series,
        x_format=scales.count, y_format=scales.times, y_ticks=scales.short_times, zero=True,
    )  # fmt: skip


def _memory(runs: Sequence[Run]) -> Chart:
    series, marks = [], []
    for index, run in enumerate(runs):
        points = figures.memory_curve(run)
        if points:
            series.append(Series(run.name, [(x, y) for x, y, _ in points], index, [place for _, _, place in points]))
            x, y, place = max(points, key=lambda point: point[1])
            marks.append((x, y, place or ("forward" if x < 1 else "backward"), index))
    peaks = ", ".join(
        f"{line.name} has its peak of {scales.nbytes(y)} in {'forward' if x < 1 else 'backward'}"
        for line, (x, y, _, _) in zip(series, marks, strict=True)
    )
    return Chart(
        "step-memory", "Memory over one step",
        f"Bytes allocated above what is there between steps: {peaks}.",
        "module", "allocated", series,
        x_format=scales.count, y_format=scales.nbytes, y_ticks=scales.short_nbytes,
        zero=True, binary=True, stepped=True,
        sections=[("forward", 0.0, 1.0), ("backward", 1.0, 2.0)],
        marks=[(x, y, f"{runs[index].name}: {scales.nbytes(y)}", index) for x, y, _, index in marks],
    )  # fmt: skip
