"""The report as Markdown: its tables, without the drawings."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.app.report import figures, scales
from lowtide.app.report.layers import decided, noise_columns, noise_of
from lowtide.app.report.page import SUMMARY_HEADS, summary_cells, used_columns
from lowtide.app.report.runs import Run, number_in
from lowtide.reports.text import short


def render_markdown(runs: Sequence[Run]) -> str:
    """The whole report."""
    rows = [summary_cells(item) for item in figures.summarise(runs)]
    columns = used_columns(rows)
    parts = ["# Lowtide report", ""]
    parts += _table(
        [SUMMARY_HEADS[column] for column in columns], [[row[column] for column in columns] for row in rows]
    )
    parts += [f"\n{run.name}: {note}" for run in runs for note in run.notes]
    for run in runs:
        parts += ["", f"## {run.name}", *_evals(run), *_layers(run), *_left_alone(run), *_events(run)]
    return "\n".join(parts) + "\n"


def _evals(run: Run) -> list[str]:
    if not run.evals:
        return []
    rows = [
        [
            _text(row, "epoch", scales.count),
            _text(row, "step", scales.count),
            _text(row, "accuracy", scales.percent),
            _text(row, "loss", scales.plain),
        ]
        for row in run.evals
    ]
    return ["", "### Evaluations", "", *_table(["epoch", "step", "test accuracy", "test loss"], rows)]


def _layers(run: Run) -> list[str]:
    if not run.layers:
        return []
    noise = noise_columns(run)
    rows = []
    for row in decided(run.layers):
        raw, held = number_in(row, "raw_nbytes") or 0, number_in(row, "held_nbytes") or 0
        cells = [str(row["name"]), str(row.get("codec", "")), short(str(row.get("bound") or "exact"))]
        cells += [scales.nbytes(raw), scales.nbytes(held), scales.times(raw / held) if raw and held else ""]
        values = [noise_of(run, row["name"], key) for key, _ in noise]
        rows.append([*cells, *(scales.short_percent(value) if value is not None else "" for value in values)])
    heads = ["site", "codec", "bound", "plain", "held", "ratio", *(head for _, head in noise)]
    return ["", "### Layers", "", *_table(heads, rows)]


def _left_alone(run: Run) -> list[str]:
    groups = figures.left_alone(run.layers)
    if not groups:
        return []
    rows = [[reason, str(group["saves"]), scales.nbytes(group["held"])] for reason, group in groups.items()]
    return ["", "### Left alone", "", *_table(["reason", "saves", "held"], rows)]


def _events(run: Run) -> list[str]:
    return ["", "### Events", "", *(f"- {event}" for event in run.events)] if run.events else []


def _text(row: dict[str, object], key: str, form: scales.Format) -> str:
    value = number_in(row, key)
    return form(value) if value is not None else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]
