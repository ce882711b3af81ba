"""HTML tables: cells are escaped unless they are marked as HTML already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Html:
    """A cell that is HTML already; ``sort`` is what its column is sorted by."""

    text: str
    sort: float | str = ""


Cell = str | Html


def table(
    heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, sortable: bool = False, left: int = 1, label: str = ""
) -> str:
    """A table whose first ``left`` columns are words and whose other columns are numbers.

    It scrolls within its own box, which the keyboard can reach.
    """
    names = [
        f'<th scope="col"{_number(column, left)}>'
        + (f'<button type="button">{escape(head)}</button>' if sortable else escape(head))
        + "</th>"
        for column, head in enumerate(heads)
    ]
    lines = [f"<tr>{''.join(_cell(cell, column, left) for column, cell in enumerate(row))}</tr>" for row in rows]
    title = f' aria-label="{escape(label)}"' if label else ' aria-label="table"'
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex="0" role="region"{title}><table{kind}><thead><tr>{"".join(names)}</tr></thead>\n'
        f"<tbody>\n{chr(10).join(lines)}\n</tbody></table></div>"
    )


def bars(parts: Sequence[tuple[str, float]], title: str) -> str:
    """Bars under each other, each a share from 0 to 1 of the cell's width, in the class that it names."""
    inner = "".join(f'<i class="{name}" style="width:{100 * share:.2f}%"></i>' for name, share in parts if share > 0)
    return f'<span class="bars" role="img" aria-label="{escape(title)}" title="{escape(title)}">{inner}</span>'


def _cell(cell: Cell, column: int, left: int) -> str:
    tag = 'th scope="row"' if not column else "td"
    text, sort = (cell.text, f' data-sort="{escape(str(cell.sort))}"') if isinstance(cell, Html) else (escape(cell), "")
    return f"<{tag}{_number(column, left)}{sort}>{text}</{tag[:2]}>"


def _number(column: int, left: int) -> str:
    return ' class="number"' if column >= left else ""
