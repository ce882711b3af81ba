"""A line chart as inline SVG: readable without scripts, by keyboard, and as a table.

Lines differ in colour and in dashes, so that they can be told apart without colours. The places of all points travel
along as JSON for ``script.js``, which shows the values under the mouse or at the arrow keys.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from lowtide.app.report.scales import Axis, Format
from lowtide.app.report.tables import table

WIDTH, HEIGHT = 560.0, 280.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 12.0, 14.0, 42.0
COLOURS = 8
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "7 3", "2 3", "9 3 2 3")


@dataclass(frozen=True, slots=True)
class Series:
    """A line. ``places`` say in words where each point is, if its x says too little."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    places: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """What a chart shows. ``sections`` name stretches of the x axis, which then has no ticks."""

    ident: str
    title: str
    caption: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    x_format: Format
    y_format: Format
    y_ticks: Format
    zero: bool = False
    binary: bool = False
    stepped: bool = False
    sections: Sequence[tuple[str, float, float]] = ()
    marks: Sequence[tuple[float, float, str, int]] = field(default_factory=tuple)

    def render(self) -> str:
        """The whole figure: title, legend, drawing, readout, table."""
        x_axis, y_axis = self._axes()
        name = escape(self.ident)
        return "\n".join(
            [
                f'<figure class="chart" id="{name}">',
                f"<h3>{escape(self.title)}</h3>",
                f'<figcaption id="{name}-caption">{escape(self.caption)}</figcaption>',
                self._legend(),
                # A slider: the role whose arrow keys and spoken values fit reading a curve point by point.
                f'<div class="plot" tabindex="0" role="slider" aria-valuemin="0" aria-valuemax="{self._most() - 1}" '
                f'aria-valuenow="0" aria-valuetext="" aria-label="{escape(self.title)}: left and right arrow keys read '
                f'the values" aria-describedby="{name}-caption">',
                f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(self.title)}">',
                *self._grid(x_axis, y_axis),
                *[self._line(series, x_axis, y_axis) for series in self.series],
                *[self._mark(mark, x_axis, y_axis) for mark in self.marks],
                '<g class="cursor" visibility="hidden"></g>',
                "</svg>",
                '<p class="readout" aria-hidden="true">&nbsp;</p>',
                f'<script type="application/json">{self._json(x_axis, y_axis)}</script>',
                "</div>",
                f"<details><summary>Data of this chart as a table</summary>{self._table()}</details>",
                "</figure>",
            ]
        )

    def _most(self) -> int:
        return max((len(series.points) for series in self.series), default=1)

    def _axes(self) -> tuple[Axis, Axis]:
        xs = [x for series in self.series for x, _ in series.points]
        ys = [y for series in self.series for _, y in series.points]
        xs += [edge for _, *edges in self.sections for edge in edges]
        x_axis = Axis.fit(xs, start=_LEFT, stop=WIDTH - _RIGHT, count=7, whole=True)
        if xs and max(xs) > min(xs):  # lines begin and end at the edges, whether these are ticks or not
            low, high = min(xs), max(xs)
            ticks = tuple(tick for tick in x_axis.ticks if low <= tick <= high)
            x_axis = Axis(low, high, _LEFT, WIDTH - _RIGHT, ticks)
        y_axis = Axis.fit(ys, start=HEIGHT - _BOTTOM, stop=_TOP, zero=self.zero, binary=self.binary)
        return x_axis, y_axis

    def _grid(self, x_axis: Axis, y_axis: Axis) -> list[str]:
        parts = []
        for tick in y_axis.ticks:
            y = y_axis.place(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text class="tick" x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{self.y_ticks(tick)}</text>'
            )
        base = HEIGHT - _BOTTOM
        for text, begin, end in self.sections:
            middle = (x_axis.place(begin) + x_axis.place(end)) / 2
            parts.append(f'<text class="tick" x="{middle}" y="{base + 18}" text-anchor="middle">{escape(text)}</text>')
            if begin > x_axis.low:
                x = x_axis.place(begin)
                parts.append(f'<line class="border" x1="{x}" x2="{x}" y1="{_TOP}" y2="{base}"/>')
        if not self.sections:
            for tick in x_axis.ticks:
                x = x_axis.place(tick)
                parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="{base}" y2="{base + 5}"/>')
                label = escape(self.x_format(tick))
                parts.append(f'<text class="tick" x="{x}" y="{base + 18}" text-anchor="middle">{label}</text>')
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}"/>')
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text class="name" x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x_name)}</text>'
        )
        return parts

    def _line(self, series: Series, x_axis: Axis, y_axis: Axis) -> str:
        places = [(x_axis.place(x), y_axis.place(y)) for x, y in series.points]
        path = ""
        for index, (x, y) in enumerate(places):
            if not index:
                path = f"M{x:g} {y:g}"
            else:
                path += f"H{x:g}V{y:g}" if self.stepped else f"L{x:g} {y:g}"
        dots = "".join(f'<circle cx="{x:g}" cy="{y:g}" r="2.6"/>' for x, y in places) if len(places) <= 40 else ""
        dash = "" if self.stepped else _dash(series.style)  # dashes would pass for steps
        return f'<g class="{_class(series.style)}"><path d="{path}"{dash}/>{dots}</g>'

    def _mark(self, mark: tuple[float, float, str, int], x_axis: Axis, y_axis: Axis) -> str:
        x, y, text, style = x_axis.place(mark[0]), y_axis.place(mark[1]), mark[2], mark[3]
        anchor, dx = ("end", -8) if x > WIDTH / 2 else ("start", 8)
        return (
            f'<g class="mark {_class(style)}"><circle cx="{x}" cy="{y}" r="4.5"/>'
            f'<text x="{x + dx}" y="{max(y - 7, 11)}" text-anchor="{anchor}">{escape(text)}</text></g>'
        )

    def _legend(self) -> str:
        items = [
            f'<li class="{_class(series.style)}"><svg viewBox="0 0 30 8" aria-hidden="true"><path d="M0 4H30"'
            f"{'' if self.stepped else _dash(series.style)}/></svg>{escape(series.name)}</li>"
            for series in self.series
        ]
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _json(self, x_axis: Axis, y_axis: Axis) -> str:
        series = [
            {
                "name": item.name,
                "class": _class(item.style),
                "points": [[x_axis.place(x), y_axis.place(y), self._say(item, index), self.y_format(y)]
                           for index, (x, y) in enumerate(item.points)],
            }
            for item in self.series
        ]  # fmt: skip
        data = {"series": series, "top": _TOP, "base": HEIGHT - _BOTTOM, "x": self.x_name}
        return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")

    def _say(self, series: Series, index: int) -> str:
        if self.sections:
            return series.places[index] if series.places else ""
        return self.x_format(series.points[index][0])

    def _table(self) -> str:
        if self.sections:
            rows = [
                (series.name, series.places[index] if series.places else "", self.y_format(y))
                for series in self.series
                for index, (_, y) in enumerate(series.points)
            ]
            return table(("run", self.x_name, self.y_name), rows)
        values: dict[float, dict[int, str]] = {}
        for column, series in enumerate(self.series):
            for x, y in series.points:
                values.setdefault(x, {})[column] = self.y_format(y)
        heads = (self.x_name, *(f"{series.name}: {self.y_name}" for series in self.series))
        lines = [
            [self.x_format(x), *(cells.get(column, "") for column in range(len(self.series)))]
            for x, cells in sorted(values.items())
        ]
        return table(heads, lines)


def _class(style: int) -> str:
    return f"s{style % COLOURS}"


def _dash(style: int) -> str:
    dash = _DASHES[style % len(_DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def sparkline(points: Sequence[tuple[float, float]], title: str) -> str:
    """A line of two words' width; ``title`` says it in words."""
    if len(points) < 2:
        return ""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_span, y_span = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    path = " ".join(f"{2 + 56 * (x - min(xs)) / x_span:.1f},{14 - 12 * (y - min(ys)) / y_span:.1f}" for x, y in points)
    return (
        f'<svg class="spark" viewBox="0 0 60 16" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        f'<polyline points="{path}"/></svg>'
    )
