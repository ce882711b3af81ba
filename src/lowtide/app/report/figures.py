"""The figures of runs: what the summary table, the charts and the tables under them are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from lowtide.app.report.runs import Row, Run, number_in

Point = tuple[float, float]
MOST_POINTS = 240  # of a curve; a screen shows no more of them
_WIDTH = 0.99  # of a phase, so that the last point of forward and the first of backward can be told apart
NEEDS = ("values", "mask", "window", "metadata", "exact")
NEED_TEXTS = {
    "values": "values",
    "mask": "which branch",
    "window": "place in a window",
    "metadata": "the shape only",
    "exact": "everything",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in one line. None where the run does not say; ``difference`` is to its plain run, in points."""

    name: str
    method: str
    seed: int | None
    accuracy: float | None
    best: float | None
    loss: float | None
    raw: float | None
    held: float | None
    peak: float | None
    ratio: float | None
    seconds: float | None
    speed: float | None
    steps: int
    difference: float | None = None


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """All runs, in the order given."""
    plain = [run for run in runs if run.is_plain]
    return [_summary(run, _partner(run, plain)) for run in runs]


def _summary(run: Run, plain: Run | None) -> Summary:
    result, last = run.result, run.evals[-1] if run.evals else {}
    seed = number_in(result, "seed")
    accuracy = _first(number_in(result, "accuracy"), number_in(last, "accuracy"))
    held = _first(number_in(result, "held"), _most(run.steps, "held_nbytes"))
    raw = _most(run.steps, "raw_nbytes")
    baseline = accuracy_of(plain) if plain is not None else None
    return Summary(
        name=run.name,
        method=run.method,
        seed=int(seed) if seed is not None else None,
        accuracy=accuracy,
        best=_first(number_in(result, "best"), _most(run.evals, "accuracy")),
        loss=number_in(last, "loss"),
        raw=raw,
        held=held,
        # A CPU has no allocator to ask: there the peak is the one of the step that was followed.
        peak=_first(number_in(result, "peak"), _most(run.steps, "peak_nbytes"), _most(run.memory, "allocated")),
        ratio=_first(number_in(result, "ratio"), raw / held if raw and held else None),
        seconds=number_in(result, "seconds"),
        speed=_median(run.steps, "images_per_second"),
        steps=int(max((number_in(row, "step") or 0 for row in run.steps), default=0)),
        difference=100 * (accuracy - baseline) if accuracy is not None and baseline is not None else None,
    )


def accuracy_of(run: Run) -> float | None:
    return _first(number_in(run.result, "accuracy"), number_in(run.evals[-1], "accuracy") if run.evals else None)


def _partner(run: Run, plain: Sequence[Run]) -> Run | None:
    """The plain run to compare with: the one of the same seed, or the only one."""
    if run.is_plain:
        return None
    same = [other for other in plain if other.result.get("seed") == run.result.get("seed")]
    return same[0] if len(same) == 1 else plain[0] if len(plain) == 1 else None


def has_epochs(runs: Iterable[Run]) -> bool:
    """Whether every evaluation says at which epoch it was, so that epochs can be the axis."""
    rows = [row for run in runs for row in run.evals]
    return bool(rows) and all(number_in(row, "epoch") is not None for row in rows)


def curve(rows: Iterable[Row], x: str, y: str) -> list[Point]:
    """The points that have both numbers, thinned to what a screen can show: each is then the mean of its neighbours."""
    points = [(a, b) for row in rows if (a := number_in(row, x)) is not None and (b := number_in(row, y)) is not None]
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return points
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(fmean(a for a, _ in group), fmean(b for _, b in group)) for group in groups]


def memory_curve(run: Run) -> list[tuple[float, float, str]]:
    """Bytes allocated within one step, forward drawn between 0 and 1 and backward from 1 on, with where it was.

    Phases differ in length from run to run; each is stretched to the same width so that they can be compared.
    """
    points = []
    for offset, phase in enumerate(("forward", "backward")):
        rows = [row for row in run.memory if row.get("phase") == phase and number_in(row, "allocated") is not None]
        places = [number_in(row, "at") for row in rows]
        values = [place for place in places if place is not None]
        if len(values) != len(rows):  # named places, in order
            values = [float(index) for index in range(len(rows))]
        first, width = (values[0], values[-1] - values[0]) if values else (0.0, 0.0)
        for row, value in zip(rows, values, strict=True):
            at = (value - first) / width if width > 0 else 0.5
            points.append((offset + _WIDTH * at, float(row["allocated"]), _place(row)))
    return points


def _place(row: Row) -> str:
    label = row.get("label", row.get("at"))
    return label if isinstance(label, str) else ""


def shares(layers: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Saves and bytes by what backward reads, in the order of the table of needs."""
    groups = _group(layers, lambda row: str(row.get("need", "")))
    known = [need for need in NEEDS if need in groups]
    return {need: groups[need] for need in [*known, *(need for need in groups if need not in NEEDS)]}


def left_alone(layers: Iterable[Row]) -> dict[str, dict[str, int]]:
    """Saves and bytes that were kept as they are, by reason, the largest first."""
    kept = [row for row in layers if row.get("codec") == "kept"]
    groups = _group(kept, lambda row: str(row.get("reason", "")))
    return dict(sorted(groups.items(), key=lambda item: -item[1]["held"]))


def _group(layers: Iterable[Row], key: Callable[[Row], str]) -> dict[str, dict[str, int]]:
    groups: dict[str, dict[str, int]] = {}
    for row in layers:
        group = groups.setdefault(key(row), {"saves": 0, "raw": 0, "held": 0})
        group["saves"] += int(number_in(row, "saves") or 0)
        group["raw"] += int(number_in(row, "raw_nbytes") or 0)
        group["held"] += int(number_in(row, "held_nbytes") or 0)
    return groups


def histories(run: Run) -> dict[str, list[Point]]:
    """By site: how many times less it held, over the steps at which the session reported."""
    points: dict[str, list[Point]] = {}
    for index, record in enumerate(run.sites):
        step = number_in(record, "step")
        for row in record["sites"]:
            raw, held = number_in(row, "raw_nbytes"), number_in(row, "held_nbytes")
            if raw and held:
                points.setdefault(row["name"], []).append((float(index) if step is None else step, raw / held))
    return points


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _most(rows: Iterable[Row], key: str) -> float | None:
    return max((value for row in rows if (value := number_in(row, key)) is not None), default=None)


def _median(rows: Iterable[Row], key: str) -> float | None:
    values = [value for row in rows if (value := number_in(row, key)) is not None]
    return median(values) if values else None
