"""Train a small network plainly and with Lowtide, side by side, and compare.

Nothing is downloaded: a ResNet-18 of an eighth of the width learns the handwritten digits that come with Lowtide. Ends
with a table and the path of a report to open in a browser. Under three minutes on two CPU cores; a GPU is used if there
is one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lowtide.app.report import scales
from lowtide.app.report.command import write_whole
from lowtide.app.report.figures import Summary, summarise
from lowtide.app.report.page import render_page
from lowtide.app.report.runs import load_runs
from lowtide.app.shared import arguments, specs
from lowtide.app.train.command import train
from lowtide.app.train.config import PLAIN
from lowtide.app.train.recipe import resolve_method
from lowtide.reports.text import table
from lowtide.session import DEFAULT_METHOD
from lowtide.threads import one_thread

EXAMPLES = """examples:
  lowtide demo
  lowtide demo --methods exact,fixed --epochs 4 --device cpu
"""
# Pictures of 8 x 8 pixels, enlarged so that all four stages of the network have something to do.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "model": {"name": "resnet18", "options": {"width": 8}},
    "data": {"name": "digits", "options": {"size": 16}},
    "train": {"batch": 64},
}
HEADS = ("method", "test accuracy", "held", "ratio", "peak", "time")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--methods", default=DEFAULT_METHOD, metavar="LIST", help="to compare with plain (default: %(default)s)")
    add("--epochs", type=int, default=10, metavar="N", help="how often to go through the data (default: %(default)s)")
    add(
        "--seed", type=int, default=0, metavar="N", help="of weights and order, the same for all (default: %(default)s)"
    )
    add("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    add(
        "--out",
        default="runs/demo",
        metavar="FOLDER",
        help="where to write (default: %(default)s, or the next free one)",
    )
    add("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    arguments.require_positive(options, "epochs")
    methods = [PLAIN, *(name for name in specs.split(options.methods) if name != PLAIN)]
    for method in methods:
        resolve_method(method, {})  # what is wrong is said before anything is trained
    device = arguments.find_device(options)
    folder = find_free(Path(options.out))
    with one_thread():
        for number, method in enumerate(methods, 1):
            arguments.say(f"\n[{number}/{len(methods)}] {method}: ResNet-18 (width 8) on handwritten digits, {device}")
            train(_settings(method, options, str(device)), out=folder / method)
    runs = load_runs([folder / method for method in methods])
    report = folder / "report.html"
    write_whole(report, render_page(runs))
    print("\n".join(show(summarise(runs))))
    if device.type == "cpu":
        print("On a CPU codecs are plain torch, and slow; kernels are for GPUs.")
    print(f"\nreport: {report.resolve()}")
    return 0


def _settings(method: str, options: argparse.Namespace, device: str) -> dict[str, Mapping[str, Any]]:
    settings = {section: dict(values) for section, values in SETTINGS.items()}
    settings["train"] |= {"epochs": options.epochs, "seed": options.seed}
    return {**settings, "method": {"name": method}, "run": {"device": device}}


def find_free(folder: Path) -> Path:
    """The folder, or the first of ``folder-2``, ``folder-3``, ... that is not there yet: earlier results stay."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return folder if not folder.exists() else next(name for name in names if not name.exists())


def show(summaries: Sequence[Summary]) -> list[str]:
    """The table at the end."""
    rows = [
        (
            item.method,
            _cell(item.accuracy, scales.percent),
            _cell(item.held, scales.nbytes),
            _cell(item.ratio, scales.times),
            _cell(item.peak, scales.nbytes),
            _cell(item.seconds, scales.duration),
        )
        for item in summaries
    ]
    return [*table(HEADS, rows), "", "held: for backward, between forward and backward; peak: the most in a step"]


def _cell(value: float | None, form: scales.Format) -> str:
    return form(value) if value is not None else ""
