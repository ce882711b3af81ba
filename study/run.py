"""Train what the tables of the study ask for and has not been trained yet.

    python study/run.py study/cifar10_resnet18.toml --data DATA --parallel 8 --minutes 9
    python study/run.py study/*.toml --data DATA --parallel 8

Every run is a process of its own, ``lowtide train``. When one ends, a row is appended to ``results/NAME.csv`` and its
curve is written beside it; a run that has a row there is not repeated. After ``--minutes`` the runs under way are
stopped and leave no row. They continue at the next call if their folders (``--work``) are still there, else they begin
again. ``python study/page.py`` makes docs/results.md of the rows.
"""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import Experiment, Variant
from outcomes import (
    COLUMNS,
    count_fp32,
    make_row,
    name_file,
    read_curve,
    read_layers,
    write_curve,
    write_layers,
)
from summaries import as_compared, find_rows

from lowtide.app.compare.runs import Run, Runner
from lowtide.app.compare.summary import render, summarize
from lowtide.app.shared.arguments import require_positive, say
from lowtide.app.shared.rows import ResultFile
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.prepare import find_device, understand
from lowtide.app.train.progress import clock
from lowtide.app.train.rundir import RunFolder
from lowtide.errors import LowtideError, UnknownNameError

STUDY = Path(__file__).parent
_SPEED = re.compile(r"(\d+) \w+/s")
_THREADS = 1  # of a process: those of several would wait for each other


@dataclass(slots=True)
class Table:
    """An experiment with its file of results, and its runs that are not there."""

    experiment: Experiment
    results: Path
    missing: list[tuple[Variant, Run]] = field(default_factory=list)
    saved_fp32: int = 0

    @property
    def path(self) -> Path:
        return self.results / f"{self.experiment.name}.csv"

    def rows(self) -> list[tuple[Variant, dict[str, str]]]:
        return find_rows(self.experiment, self.results)

    def prepare(self, options: argparse.Namespace) -> Table:
        """Find the runs that are missing; for these, see that data and settings are as they should be."""
        ResultFile(self.path, COLUMNS)  # refuses a file with other columns
        done = {(variant.text, int(row["seed"])) for variant, row in self.rows()}
        config = self.experiment.configure(options.data, options.device)
        wanted = self.experiment.runs(config, options.only)
        if all((variant.text, run.seed) in done for variant, run in wanted):
            return self
        config = config.replace(run={"checkpoints": False})  # one is written when a run is stopped
        config, data, module = understand(config)
        self.saved_fp32 = count_fp32(config, data, module, find_device(options.device))
        wanted = self.experiment.runs(config, options.only)
        self.missing = [(variant, run) for variant, run in wanted if (variant.text, run.seed) not in done]
        return self

    def append(self, variant: Variant, run: Run, row: Mapping[str, Any], *, alone: bool) -> dict[str, Any]:
        """Write the files of a run that has ended, then its row: where a row is, all is."""
        curve: list[dict[str, Any]] = []
        place = Path("curves") / self.experiment.name / name_file(self.experiment, variant, run.seed)
        if not row.get("error"):
            folder = Path(row["folder"])
            curve = read_curve(folder, run.config.train.precision, self.saved_fp32)
            write_curve(self.results / place, curve)
            if run.seed == 0 and (layers := read_layers(folder)):
                write_layers(self.results / "layers" / self.experiment.name / place.name, layers)
        made = make_row(self.experiment, variant, row, curve)
        made |= {"alone": alone, "curve": "" if row.get("error") else place.as_posix()}
        ResultFile(self.path, COLUMNS).begin().append(made)
        return made

    def show(self) -> list[str]:
        """The table as far as it is known."""
        heading = f"{self.experiment.title} (held: mean over training; ratio: the same, in float32 terms)"
        texts = [variant.text for variant in self.experiment.variants]
        metric = self.experiment.metric
        return ["", heading, *render(summarize(as_compared(self.rows()), texts, metric), metric)]


class Ticker:
    """One line for every epoch of every run."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._speeds: dict[str, str] = {}

    def watch(self, run: Run, line: str) -> None:
        speed = _SPEED.search(line)
        if speed is not None:
            self._speeds[run.key] = speed[1]
        if "test accuracy" in line or line.startswith("resuming"):
            self.say(f"{describe(run)}: {line}  {self._speeds.get(run.key, '?')}/s")

    def say(self, text: str) -> None:
        say(f"{clock(time.monotonic() - self._begin)}  {text}")


def describe(run: Run) -> str:
    return f"{run.config.model.name} {run.config.data.name} {run.method}, seed {run.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if every run that was asked for has a row, 3 if time ran out before, 1 if one failed, 2 if none was begun."""
    options = parse(arguments)
    try:
        require_positive(options, "parallel")
        tables = [Table(Experiment.read(path), options.results).prepare(options) for path in options.tables]
        with RunFolder(options.work):
            failed = carry_out(tables, options)
    except (UsageError, UnknownNameError) as error:
        say(f"study: {error}")
        return 2
    except KeyboardInterrupt:
        say("study: interrupted; the rows so far are kept")
        return 130
    except LowtideError as error:
        say(f"study: {type(error).__name__}: {error}")
        return 1
    for table in tables:
        print("\n".join(table.show()))
    if failed:
        return 1
    return 3 if any(table.missing for table in tables) else 0


def carry_out(tables: Iterable[Table], options: argparse.Namespace) -> int:
    """Do what is missing, as far as time allows; how many failed. What is done is taken out of the tables."""
    begin = time.monotonic()
    owners: dict[str, tuple[Table, Variant, Run]] = {}
    for table in tables:
        owners |= {run.key: (table, variant, run) for variant, run in table.missing}
        say(f"{table.experiment.name}: {len(table.rows())} runs are there, {len(table.missing)} are to be done")
    ticker = Ticker()
    deadline = begin + 60 * options.minutes
    runner = Runner(options.work, options.parallel, deadline=deadline, threads=_THREADS, watch=ticker.watch)
    failed = 0
    for number, (run, row) in enumerate(runner.carry_out([run for _, _, run in owners.values()]), 1):
        table, variant, _ = owners[run.key]
        made = table.append(variant, run, row, alone=runner.was_alone(run))
        table.missing = [(other, its) for other, its in table.missing if its.key != run.key]
        failed += bool(row.get("error"))
        ticker.say(f"[{number}/{len(owners)}] {describe(run)}: {_outcome(made, table.experiment.metric)}")
    return failed


def _outcome(row: Mapping[str, Any], metric: str) -> str:
    if row.get("error"):
        return f"failed: {row['error']}"
    value = f"loss {row['loss']:.4f}" if metric == "loss" else f"accuracy {100 * row['accuracy']:.2f} %"
    ratio, conv = row.get("ratio_fp32_mean"), row.get("conv_ratio_fp32_mean")
    sizes = "" if ratio is None else f", {ratio:.1f}x less" + ("" if conv is None else f", convolutions {conv:.1f}x")
    return f"{value}{sizes}, {row['seconds']:.0f} s"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("tables", type=Path, nargs="+", metavar="TABLE", help="TOML files, as study/cifar10_resnet18.toml")
    add("--data", type=Path, default=Path("data"), help="folder that the paths of the data are in (default: data)")
    add("--parallel", type=int, default=1, metavar="N", help="runs at the same time (default: %(default)s)")
    add("--minutes", type=float, default=math.inf, metavar="M", help="then stop (default: when all is done)")
    add("--only", nargs="+", default=(), metavar="NAME", help="these methods, as the table writes them")
    add("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    add("--results", type=Path, default=STUDY / "results", metavar="FOLDER", help="default: results beside this file")
    add(
        "--work", type=Path, default=Path("runs") / "study", metavar="FOLDER", help="of the runs (default: %(default)s)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs under way are asked to end then too
    sys.exit(main())
