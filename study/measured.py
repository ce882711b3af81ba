"""Sections of docs/results.md about single steps: the rows of benchmarks/methods.py and benchmarks/growth.py."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Row = Mapping[str, str]

OURS = ("budget", "fixed", "bold", "careful", "bold:blocks")
RIVALS = ("division", "actnn", "gact")
_GRAPH = "graph=true"
_NOISE = """For every rival the setting of Lowtide that stores least in the same run, of those that add no more noise.
Noise is the mean square of what is added to the gradient, over the variance of the gradient from batch to batch;
*smaller* is what is saved for backward. [All methods](methods/README.md#side-by-side)."""
_TIME = """Steps at equal batch, replayed as CUDA graphs, so that none of them waits for the host; the rows of one run
([graphs.md](graphs.md)), early in training: in bf16 tables were still being fitted in the steps that were timed. `bold`
and `careful` are `fixed` with 1.0 and 0.4 standard deviations."""
_BATCH = """The largest batch within a memory limit, and what it processes: the newest row of each method, beside plain
training of its own run ([growth.md](growth.md)). No rival has been grown yet."""


def read(path: Path) -> list[Row]:
    """The rows that went well; none without a file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["ok"] == "True"]


def sections(benchmarks: Path) -> Iterator[list[str]]:
    methods, growth = read(benchmarks / "methods.csv"), read(benchmarks / "growth.csv")
    for part in (at_equal_noise(methods), at_equal_batch(methods), at_equal_memory(growth)):
        lines = list(part)
        if lines:
            yield lines


def at_equal_noise(rows: Sequence[Row]) -> Iterator[str]:
    """What Lowtide takes where it adds no more noise than a rival."""
    cells = []
    for run in newest_runs(rows, lambda row: bool(row["noise_share"])):
        ours = [row for row in run if base_of(row) in OURS]
        for rival in (row for row in run if base_of(row) in RIVALS):
            noise, ratio = float(rival["noise_share"]), float(rival["ledger_x_less"])
            better = [row for row in ours if float(row["noise_share"]) <= noise]
            if not better:
                continue
            best = max(better, key=lambda row: float(row["ledger_x_less"]))
            factor = float(best["ledger_x_less"]) / ratio
            of_theirs = _share(rival), f"{ratio:.3g}x"
            of_ours = _share(best), f"{float(best['ledger_x_less']):.3g}x"
            names = f"`{rival['method']}`", *of_theirs, f"`{best['method']}`", *of_ours
            cells.append([title_of(rival), *names, f"{factor:.2f}x", rival["revision"][:7]])
    if cells:
        yield from ("## At equal gradient noise", "", _NOISE, "")
        heads = ["", "rival", "its noise", "smaller", "Lowtide", "its noise", "smaller", "fewer bytes", "revision"]
        yield from markdown(heads, cells)
        yield from ("", "![What is saved, times smaller, against the noise that is added](methods/resnet50_tf32.svg)")


def at_equal_batch(rows: Sequence[Row]) -> Iterator[str]:
    """What a step takes, beside that of the rivals."""
    cells = []
    for run in newest_runs(rows, lambda row: _GRAPH in row["method"] and bool(row["step_x_plain"])):
        for row in sorted(run, key=lambda row: float(row["step_x_plain"])):
            numbers = f"{float(row['step_x_plain']):.2f}x", f"{float(row['ledger_x_less']):.3g}x"
            cells.append([title_of(row), f"`{row['method']}`", *numbers, _share(row), row["revision"][:7]])
    if cells:
        yield from ("## What a step takes", "", _TIME, "")
        yield from markdown(["", "method", "step / plain", "smaller", "noise", "revision"], cells)


def at_equal_memory(rows: Sequence[Row]) -> Iterator[str]:
    """What larger batches buy."""
    newest: dict[tuple[str, ...], Row] = {}
    for row in rows:
        if row["units_per_s"] and row["batch_x_plain"]:
            key = tuple(row[name] for name in ("model", "precision", "channels_last", "cap", "granularity", "method"))
            newest[key] = row
    groups: dict[tuple[str, ...], list[Row]] = {}
    for key, row in newest.items():
        groups.setdefault(key[:-1], []).append(row)
    cells = []
    for group in (group for group in groups.values() if len(group) > 2):
        for row in sorted(group, key=lambda row: int(row["batch"])):
            times = f"{float(row['batch_x_plain']):.1f}x", f"{float(row['speed_x_plain']):.2f}x"
            what = f"{row['model']}, {row['precision']}, {row['cap']}"
            numbers = row["batch"], times[0], f"{float(row['units_per_s']):,.0f}", times[1]
            cells.append([what, f"`{row['method']}`", *numbers, row["revision"][:8]])
    if cells:
        yield from ("## What larger batches buy", "", _BATCH, "")
        heads = ["", "method", "batch", "of plain's", "samples/s", "of plain's", "revision"]
        yield from markdown(heads, cells)


def newest_runs(rows: Sequence[Row], counts: Callable[[Row], bool]) -> Iterator[list[Row]]:
    """Of every net and precision the rows that count of the last run in which both sides have one."""
    runs: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        if row["method"] != "plain" and counts(row):
            runs.setdefault((row["model"], row["precision"]), {}).setdefault(row["run"], []).append(row)
    for of_net in runs.values():
        both = [run for run in of_net.values() if all(_has(run, side) for side in (OURS, RIVALS))]
        if both:
            yield both[-1]


def _has(run: Iterable[Row], side: Sequence[str]) -> bool:
    return any(base_of(row) in side for row in run)


def _share(row: Row) -> str:
    return f"{float(row['noise_share']):.3g}"


def base_of(row: Row) -> str:
    return row["method"].partition("(")[0]


def title_of(row: Row) -> str:
    return f"{row['model']}, batch {row['batch']}, {row['precision']}"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
