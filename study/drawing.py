"""Lines over epochs as an SVG file that stands by itself: readable on light and on dark pages, and without colours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from lowtide.app.report.scales import Axis

Line = tuple[str, Sequence[tuple[float, float]]]

_COLUMNS = 2
_WIDTH, _HEIGHT, _GAP = 420.0, 260.0, 24.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 18.0, 26.0, 36.0
# After Okabe and Ito, whose colours people tell apart whatever they see of colour; dashes tell them apart too.
_COLOURS = ("#666666", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1", "#a6761d")
_DASHES = ("", "", "7 3", "2 3", "9 3 2 3", "7 3", "2 3", "9 3 2 3", "")


def draw(title: str, panels: Sequence[tuple[str, Sequence[Line]]], *, form: Callable[[float], str]) -> str:
    """Panels two by two, each with a heading and its lines; one legend for all. ``form`` writes the ticks."""
    names = list(dict.fromkeys(name for _, lines in panels for name, _ in lines))
    styles = {name: index % len(_COLOURS) for index, name in enumerate(names)}
    width = _COLUMNS * _WIDTH + (_COLUMNS - 1) * _GAP
    bottom = math.ceil(len(panels) / _COLUMNS) * (_HEIGHT + _GAP) - _GAP
    height = bottom + 18.0 * len(names) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        "<style>text{font:12px sans-serif;fill:#555}.grid{stroke:#999;stroke-opacity:.3}.line{fill:none;"
        "stroke-width:1.8}@media(prefers-color-scheme:dark){text{fill:#bbb}}</style>",
    ]
    for index, (heading, lines) in enumerate(panels):
        row, column = divmod(index, _COLUMNS)
        parts.append(f'<g transform="translate({column * (_WIDTH + _GAP):g} {row * (_HEIGHT + _GAP):g})">')
        parts += [*_panel(heading, lines, styles, form), "</g>"]
    for index, name in enumerate(names):
        y = bottom + 18.0 * index + 8
        parts.append(f'<path class="line" d="M{_LEFT:g} {y:g}h30"{_stroke(styles[name])}/>')
        parts.append(f'<text x="{_LEFT + 38:g}" y="{y + 4:g}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(heading: str, lines: Sequence[Line], styles: dict[str, int], form: Callable[[float], str]) -> list[str]:
    xs = [x for _, points in lines for x, _ in points]
    ys = [y for _, points in lines for _, y in points]
    x_axis = Axis.fit(xs, start=_LEFT, stop=_WIDTH - _RIGHT, count=6, whole=True)
    y_axis = Axis.fit(ys, start=_HEIGHT - _BOTTOM, stop=_TOP)
    parts = [f'<text x="{_LEFT:g}" y="14">{escape(heading)}</text>']
    for tick in y_axis.ticks:
        y = y_axis.place(tick)
        parts.append(f'<path class="grid" d="M{_LEFT:g} {y:g}H{_WIDTH - _RIGHT:g}"/>')
        parts.append(f'<text x="{_LEFT - 6:g}" y="{y + 4:g}" text-anchor="end">{escape(form(tick))}</text>')
    base = _HEIGHT - _BOTTOM
    for tick in x_axis.ticks:
        x = x_axis.place(tick)
        parts.append(f'<text x="{x:g}" y="{base + 16:g}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{_WIDTH / 2:g}" y="{_HEIGHT - 4:g}" text-anchor="middle">epoch</text>')
    for name, points in lines:
        path = " ".join(f"{x_axis.place(x):g},{y_axis.place(y):g}" for x, y in points)
        parts.append(f'<polyline class="line" points="{path}"{_stroke(styles[name])}/>')
    return parts


def _stroke(style: int) -> str:
    dash = f' stroke-dasharray="{_DASHES[style]}"' if _DASHES[style] else ""
    return f' stroke="{_COLOURS[style]}"{dash}'
