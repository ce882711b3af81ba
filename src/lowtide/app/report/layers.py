"""The part of the page about layers: shares by what backward reads, a row for each site, what was left alone."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lowtide.app.report import figures, scales
from lowtide.app.report.chart import sparkline
from lowtide.app.report.runs import Row, Run, number_in
from lowtide.app.report.tables import Cell, Html, bars, table
from lowtide.reports.text import short

# What a controller knows about a site's noise, if it does: key, head. Shares of the energy of the weight's gradient.
NOISE = (("share", "noise allowed"), ("predicted", "predicted"), ("measured", "measured"))
_KEYS = '<p class="soft"><span class="key plain"></span>plain training<span class="key held"></span>held by Lowtide</p>'


def render_layers(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Sections (id, title, content): the layers of each run that has a session's report, and what was left alone."""
    shown = [run for run in runs if run.layers]
    if not shown:
        text = '<p class="soft">No run has recorded its layers.</p>'
        return [("layers", "Layers", text)]
    layers = "".join(_layers(run, is_open=index == 0) for index, run in enumerate(shown))
    rest = "".join(_left_alone(run) for run in shown)
    sections = [("layers", "Layers", _KEYS + layers), ("left-alone", "Left alone, and why", rest)]
    events = "".join(_events(run) for run in shown if run.events)
    return [*sections, ("events", "Events", events)] if events else sections


def _layers(run: Run, *, is_open: bool) -> str:
    step = run.sites[-1].get("step")
    title = escape(run.name) + (f", step {step}" if step is not None else "")
    return (
        f"<details{' open' if is_open else ''}><summary>{title}: {len(run.layers)} sites</summary>"
        f"{_shares(run)}{_sites(run)}</details>"
    )


def _shares(run: Run) -> str:
    groups = figures.shares(run.layers)
    most = max((group["raw"] for group in groups.values()), default=0) or 1
    rows: list[list[Cell]] = [
        [
            figures.NEED_TEXTS.get(need, need),
            Html(_bars(group["raw"], group["held"], most)),
            str(group["saves"]),
            scales.nbytes(group["raw"]),
            scales.nbytes(group["held"]),
            _ratio(group["raw"], group["held"]),
        ]
        for need, group in groups.items()
    ]
    heads = ("backward reads", "bytes", "saves", "plain", "held", "ratio")
    return table(heads, rows, left=2, label=f"{run.name}: bytes by what backward reads")


def _sites(run: Run) -> str:
    rows, noise = decided(run.layers), noise_columns(run)
    past = figures.histories(run)
    with_past = any(len(points) > 2 for points in past.values())
    most = max((number_in(row, "raw_nbytes") or 0 for row in rows), default=0) or 1
    heads = ["site", "codec", "bound", "bytes", "plain", "held", "ratio", *(head for _, head in noise)]
    heads += ["over time"] if with_past else []
    cells: list[list[Cell]] = []
    for row in rows:
        raw, held = number_in(row, "raw_nbytes") or 0, number_in(row, "held_nbytes") or 0
        line: list[Cell] = [
            str(row["name"]),
            str(row.get("codec", "")),
            short(str(row.get("bound") or "exact")),
            Html(_bars(raw, held, most), raw),
            Html(scales.nbytes(raw), raw),
            Html(scales.nbytes(held), held),
            Html(_ratio(raw, held), raw / held if held else 0),
        ]
        line += [_noise(run, row["name"], key) for key, _ in noise]
        if with_past:
            points = past.get(row["name"], [])
            text = f"from {scales.times(points[0][1])} to {scales.times(points[-1][1])}" if points else ""
            line.append(Html(sparkline(points, text), points[-1][1] if points else 0))
        cells.append(line)
    note = (
        '<p class="soft">A tensor that several ops read is held once and counted at the first of them; '
        "the others have no bytes of their own. Click a head to sort.</p>"
    )
    return note + table(heads, cells, left=4, sortable=True, label=f"{run.name}: sites")


def decided(rows: Sequence[Row]) -> list[Row]:
    """The rows about which the op decided; what was passed over before that is in the list of what was left alone."""
    return [row for row in rows if not str(row["name"]).endswith(f"({row.get('reason')})")]


def noise_columns(run: Run) -> list[tuple[str, str]]:
    """The columns of ``NOISE`` that some site has a number in."""
    known = [row for row in run.noise.values() if isinstance(row, dict)]
    return [column for column in NOISE if any(number_in(row, column[0]) is not None for row in known)]


def noise_of(run: Run, site: str, key: str) -> float | None:
    row = run.noise.get(site)
    return number_in(row, key) if isinstance(row, dict) else None


def _noise(run: Run, site: str, key: str) -> Cell:
    value = noise_of(run, site, key)
    return Html(scales.short_percent(value), value) if value is not None else ""


def _bars(raw: float, held: float, most: float) -> str:
    title = f"{scales.nbytes(raw)} in plain training, {scales.nbytes(held)} held"
    return bars((("plain", raw / most), ("held", held / most)), title)


def _ratio(raw: float, held: float) -> str:
    return scales.times(raw / held) if raw and held else ""


def _events(run: Run) -> str:
    items = "".join(f"<li>{escape(event)}</li>" for event in run.events)
    return f"<h3>{escape(run.name)}</h3><ul>{items}</ul>"


def _left_alone(run: Run) -> str:
    groups = figures.left_alone(run.layers)
    if not groups:
        return f"<h3>{escape(run.name)}</h3><p>Nothing was left alone.</p>"
    total = sum(number_in(row, "held_nbytes") or 0 for row in run.layers) or 1
    rows = [
        (reason, str(group["saves"]), scales.nbytes(group["held"]), scales.percent(group["held"] / total))
        for reason, group in groups.items()
    ]
    heads = ("reason", "saves", "held", "share of all that is held")
    return f"<h3>{escape(run.name)}</h3>" + table(heads, rows, label=f"{run.name}: left alone")
