"""The report as one HTML page that needs nothing else: styles, script and drawings are in it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from lowtide._version import __version__
from lowtide.app.report import scales
from lowtide.app.report.chart import Chart
from lowtide.app.report.charts import charts_of
from lowtide.app.report.figures import Summary, summarise
from lowtide.app.report.layers import render_layers
from lowtide.app.report.runs import Run
from lowtide.app.report.tables import Cell, Html, table

# Nothing is loaded from anywhere: the page says so to the browser.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
SUMMARY_HEADS = (
    "run", "method", "test accuracy", "to plain, points", "best", "plain would hold", "held", "ratio", "peak", "time",
    "images/s",
)  # fmt: skip


def render_page(runs: Sequence[Run]) -> str:
    """The whole page."""
    summaries = summarise(runs)
    charts = charts_of(runs)
    sections = [
        ("summary", "Summary", _summary(summaries, runs)),
        ("curves", "Accuracy and loss", _figures(charts.curves, "No run has recorded a loss or an evaluation yet.")),
        ("memory", "Memory", _figures(charts.memory, "No run has recorded memory.")),
        *render_layers(runs),
        ("configuration", "Configuration and environment", _configuration(runs)),
    ]
    links = "".join(f'<li><a href="#{ident}">{escape(title)}</a></li>' for ident, title, _ in sections)
    body = "\n".join(
        f'<section aria-labelledby="{ident}"><h2 id="{ident}">{escape(title)}</h2>\n{content}</section>'
        for ident, title, content in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="generator" content="lowtide {escape(__version__)}">
<title>{escape(_title(runs))}</title>
<style>
{_asset("style.css")}</style>
</head>
<body>
<header>
<h1>{escape(_title(runs))}</h1>
<p class="lead">{escape(_lead(runs))}</p>
<nav aria-label="Sections"><ul>{links}</ul></nav>
</header>
<main>
{_tiles(summaries)}
{body}
</main>
<footer><p>Written by lowtide {escape(__version__)} from the files in the run folders; docs/report.md explains the \
columns. A chart that has the focus reads its values at the arrow keys.</p></footer>
<script>
{_asset("script.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _title(runs: Sequence[Run]) -> str:
    models = list(dict.fromkeys(run.model for run in runs if run.model))
    return f"Lowtide report: {', '.join(models)}" if models else "Lowtide report"


def _lead(runs: Sequence[Run]) -> str:
    return f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}: {', '.join(run.name for run in runs)}."


def _tiles(summaries: Sequence[Summary]) -> str:
    """The first run with Lowtide beside plain training, in four numbers."""
    ours = next((item for item in summaries if item.method != "plain"), None)
    if ours is None:
        return ""
    plain = next((item for item in summaries if item.method == "plain"), None)
    tiles = []
    if ours.ratio is not None:
        tiles.append((f"{ours.ratio:.1f}x less", "held between forward and backward"))
    if ours.difference is not None:
        tiles.append((f"{ours.difference:+.2f} points", "test accuracy, to plain training"))
    if plain is not None and plain.peak and ours.peak:
        tiles.append((f"{plain.peak / ours.peak:.1f}x less", "at the peak of a step"))
    if plain is not None and plain.seconds and ours.seconds:
        tiles.append((f"{ours.seconds / plain.seconds:.2f}x", "the time of plain training"))
    items = "".join(f"<li><b>{escape(number)}</b><span>{escape(text)}</span></li>" for number, text in tiles)
    return f'<ul class="tiles" aria-label="{escape(ours.name)} in numbers">{items}</ul>' if tiles else ""


def summary_cells(item: Summary) -> list[str]:
    """One run in the columns of ``SUMMARY_HEADS``; empty where it does not say."""
    return [
        item.name,
        item.method,
        _show(item.accuracy, scales.percent),
        _show(item.difference, scales.points_of),
        _show(item.best, scales.percent),
        _show(item.raw if item.method != "plain" else None, scales.nbytes),
        _show(item.held, scales.nbytes),
        _show(item.ratio if item.method != "plain" else None, scales.times),
        _show(item.peak, scales.nbytes),
        _show(item.seconds, scales.duration),
        _show(item.speed, lambda speed: f"{speed:.0f}"),
    ]


def used_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns in which some row has something."""
    return [column for column in range(len(SUMMARY_HEADS)) if column < 2 or any(row[column] for row in rows)]


def _show(value: float | None, form: scales.Format) -> str:
    return form(value) if value is not None else ""


def _summary(summaries: Sequence[Summary], runs: Sequence[Run]) -> str:
    rows = [summary_cells(item) for item in summaries]
    columns = used_columns(rows)
    shown: list[list[Cell]] = [[_coloured(row[column], column) for column in columns] for row in rows]
    heads = [SUMMARY_HEADS[column] for column in columns]
    notes = [f'<p class="note">{escape(run.name)}: {escape(note)}</p>' for run in runs for note in run.notes]
    return table(heads, shown, left=2, label="Summary of the runs") + "".join(notes)


def _coloured(text: str, column: int) -> Cell:
    if SUMMARY_HEADS[column] != "to plain, points" or not text or float(text) == 0:
        return text
    return Html(f'<span class="{"up" if float(text) > 0 else "down"}">{escape(text)}</span>')


def _figures(charts: Sequence[Chart], otherwise: str) -> str:
    if not charts:
        return f'<p class="soft">{escape(otherwise)}</p>'
    return f'<div class="charts">{"".join(chart.render() for chart in charts)}</div>'


def _configuration(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        parts.append(f'<h3>{escape(run.name)}</h3><p class="soft">{escape(str(run.folder))}</p>')
        for title, values in (("Configuration", run.config), ("Environment", run.environment), ("Result", run.result)):
            if values:
                parts.append(
                    f"<details><summary>{title}</summary>{table(('key', 'value'), _flat(values), left=2)}</details>"
                )
    return "".join(parts)


def _flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", str(value)))
    return rows
