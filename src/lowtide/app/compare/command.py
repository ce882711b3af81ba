"""Compare methods over paired seeds, with confidence intervals.

Every method trains with every seed: the same weights at the beginning, the
same batches. Differences from the first method are taken seed by seed and
given with their 95 % confidence interval. Results are appended to a CSV
file; a run whose row is there is not repeated. docs/compare.md
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.app.compare.runs import COLUMNS, Run, Runner, plan, read_method, read_seeds
from lowtide.app.compare.summary import METRICS, render, summarize
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ResultFile
from lowtide.app.train.config import Config, read_file
from lowtide.app.train.flags import add_flags, read_flags
from lowtide.app.train.prepare import merge, name_run, understand
from lowtide.app.train.progress import clock
from lowtide.app.train.rundir import RunFolder, write_json

EXAMPLES = """examples:
  lowtide compare --model resnet18 --data digits --epochs 5 --seeds 3 \\
      --methods plain,exact,careful
  lowtide compare --config cifar.toml --seeds 5 --jobs 4 \\
      --methods "plain,fixed(linear=0.4 std),fixed(linear=1.0 std)"
"""
_WITHOUT = ("method", "option", "seed")


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--methods", required=True, metavar="LIST", help='as plain,bold,"fixed(linear=0.4 std)"; the first is the base'
    )
    group.add_argument("--seeds", default="3", metavar="SEEDS", help="how many, 3-6 or 1,4,9 (default: %(default)s)")
    group.add_argument(
        "--metric", default="accuracy", metavar="NAME", help="accuracy, best or loss (default: accuracy)"
    )
    group.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time (default: %(default)s)")
    group.add_argument("--config", type=Path, metavar="PATH", help="a TOML file with settings; flags go before it")
    group.add_argument("--out", type=Path, metavar="FOLDER", help="folder of the runs (default: in runs/, by its name)")
    group.add_argument("--results", type=Path, metavar="PATH", help="CSV file (default: results.csv in FOLDER)")
    group.add_argument("--traceback", action="store_true", help="show where an error came from")
    add_flags(parser, without=_WITHOUT)


def run(options: argparse.Namespace) -> int:
    """0 if every run has a result."""
    arguments.require_positive(options, "jobs")
    methods = list(dict.fromkeys(specs.split(options.methods)))
    metric = specs.choose("metric", options.metric, METRICS)[0]
    config = Config.read(merge(read_file(options.config) if options.config else {}, read_flags(options)))
    seeds = read_seeds(options.seeds)
    if not methods:
        raise specs.UsageError("no methods given; write --methods plain,bold")
    variants = {text: read_method(text) for text in methods}
    config, _, _ = understand(config)
    runs = plan(config, variants, seeds)
    folder = options.out or Path("runs") / f"compare-{name_run(config)}"
    results = ResultFile(options.results or folder / "results.csv", COLUMNS)
    with RunFolder(folder):
        failed = _carry_out(runs, folder, results.begin(), jobs=options.jobs)
        rows = _read_rows(results, runs)
        summaries = summarize(list(rows.values()), methods, metric)
        print("\n".join(render(summaries, metric)))
        write_json(folder / "summary.json", {"metric": metric, "methods": [item.as_dict() for item in summaries]})
    return 1 if failed else 0


def _carry_out(runs: Sequence[Run], folder: Path, results: ResultFile, *, jobs: int) -> int:
    """Do what has no row yet; how many failed."""
    done = _read_rows(results, runs)
    missing = [run for run in runs if run.key not in done]
    if done:
        arguments.say(f"{len(runs) - len(missing)} of {len(runs)} runs are in {results.path} already")
    begin, failed = time.perf_counter(), 0
    for number, (run, row) in enumerate(Runner(folder, jobs).carry_out(missing), 1):
        results.append(row)
        failed += "error" in row
        text = f"failed: {row['error']}" if "error" in row else f"accuracy {100 * row['accuracy']:.2f} %"
        passed = clock(time.perf_counter() - begin)
        arguments.say(f"[{number}/{len(missing)}] {passed}  {run.method}, seed {run.seed}: {text}")
    return failed


def _read_rows(results: ResultFile, runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The rows with a result for these runs, by key; the last one where there are several."""
    wanted = {run.key: run for run in runs}
    if results.path is None or not results.path.exists():
        return {}
    with results.path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["key"] in wanted and not row["error"]]
    # A method may be written in more than one way; here it goes by the way of this command.
    return {row["key"]: {**row, "method": wanted[row["key"]].method} for row in rows}
