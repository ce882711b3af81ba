"""The frame of a benchmark script: arguments, attempts, one line for an error of use, a table, an exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lowtide.app.shared.allocator import use_expandable_segments
from lowtide.app.shared.rows import explain
from lowtide.errors import LowtideError
from lowtide.growth import is_out_of_memory

Rows = list[dict[str, Any]]


def run_script(
    doc: str | None,
    configure: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Rows],
    show: Callable[[Rows], list[str]] | None = None,
    *,
    is_fine: Callable[[dict[str, Any]], bool] = lambda row: bool(row.get("ok", True)),
) -> int:
    """0 if every row is fine, 1 if one is not, 2 for what cannot be carried out as it was written."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    configure(parser)
    options = parser.parse_args()
    use_expandable_segments()
    try:
        rows = run(options)
    except LowtideError as error:
        if options.traceback:
            raise
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        return 2
    if show is not None:
        print("\n".join(show(rows)))
    return 0 if all(is_fine(row) for row in rows) else 1


def attempt(findings: Iterable[Mapping[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """One row of what is found, piece by piece, as columns.

    What fails has a row that says so, with what was found before, and the others go on. With ``--traceback`` the error
    is raised instead, unless memory ran out: that is a result.
    """
    row: dict[str, Any] = {"ok": True, "error": ""}
    try:
        for found in findings:
            row |= found
    except Exception as error:
        if options.traceback and not is_out_of_memory(error):
            raise
        row |= {"ok": False, "error": explain(error)}
    return row
