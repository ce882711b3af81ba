"""Show training runs: accuracy, memory, layers, what was left alone and why.

RUN is the folder of a run, or a folder that holds runs. The page is one file that
needs no network: curves of all runs together, ratio over time, memory over a step,
a table of layers. With --format md or json the same figures are printed as text.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lowtide.app.report.markdown import render_markdown
from lowtide.app.report.page import render_page
from lowtide.app.report.record import render_json
from lowtide.app.report.runs import Run, load_runs

EXAMPLES = """examples:
  lowtide report runs/demo
  lowtide report runs/plain runs/budget --out comparison.html
  lowtide report runs/demo --format md
"""
FORMATS: dict[str, Callable[[Sequence[Run]], str]] = {
    "html": render_page,
    "md": render_markdown,
    "json": render_json,
}


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="folder of a run, or of runs")
    add("--format", choices=tuple(FORMATS), default="html", help="default: %(default)s")
    add(
        "--out",
        metavar="PATH",
        help="file to write, - for the terminal (default: report.html in RUN if there is one RUN, else here; "
        "the terminal for md and json)",
    )
    add("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    text = FORMATS[options.format](load_runs(options.runs))
    out = options.out or ("-" if options.format != "html" else _default_path(options.runs))
    if out == "-":
        sys.stdout.write(text)
        return 0
    write_whole(Path(out), text)
    print(out)
    return 0


def _default_path(runs: Sequence[str]) -> str:
    return str(Path(runs[0], "report.html") if len(runs) == 1 else Path("report.html"))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
