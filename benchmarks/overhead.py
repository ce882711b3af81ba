"""What do statistics and controller cost? Steps that measure, those that follow with new bounds, and ordinary ones.

    PYTHONPATH=src python benchmarks/overhead.py resnet50 --batch 256 --precision bf16,tf32
    PYTHONPATH=src python benchmarks/overhead.py resnet18 --tiny --device cpu --batch 8 --precision fp32 --window 8

Method ``budget`` measures every 400 steps. Here it does so every ``--window`` steps, and steps are timed
by their place in the window, over several of them:
- place 0, ``statistics``: hooks reduce gradients, one layer is checked, the numbers go to the host;
- place 1, ``update``: at its end they have arrived, and new bounds are computed;
- place 2, ``new bounds``: grids are made anew for bounds that moved, and codes surveyed for new tables;
- from 3 on, ``tables``: they are fitted in the background and adopted one by one;
- the last quarter, ``ordinary``.
What a measurement costs in all is ``extra_ms``, the sum over the places before the last quarter of what their medians
(``extra_mean_ms``: means) take beyond the ordinary step. ``overhead`` is that over the time of as many ordinary steps
as the default period has. ``moved`` is how many bounds differ from one window to the next, in the mean. Plain training
is timed in the same run. Rows are appended to a CSV file, ``places`` being the medians of all places.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide import Session
from lowtide.app.bench import timing
from lowtide.app.bench.timing import Times
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.methods.budget import Budget
from lowtide.reports.text import table

PERIOD = Budget().period
KINDS = ("statistics", "update", "new_bounds")  # places 0, 1 and 2 of a window
COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "precision", "channels_last", "method", "seed", "period", "window", "windows"),
    *("warm", "ok", "error", "plain_ms", "ordinary_ms", "ordinary_ms_min", "ordinary_ms_max"),
    *(f"{kind}_ms" for kind in KINDS),
    *("tables_ms", "extra_ms", "extra_mean_ms", "overhead", "overhead_mean", "sites", "moved", "events", "places"),
    "elapsed_s",
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--batch", type=int, default=256, help="samples in a batch (default: %(default)s)")
    add("--precision", default="bf16,tf32", help=f"of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--methods", default="budget", help="budget with other options, as budget(checks=0) (default: %(default)s)")
    add("--window", type=int, default=32, help="steps between two measurements, 8 or more (default: %(default)s)")
    add("--windows", type=int, default=3, help="timed ones (default: %(default)s)")
    add("--warm", type=int, default=2, help="untimed ones before them, 2 or more (default: %(default)s)")
    add("--batches", type=int, default=8, help="on the device, used in turn (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/overhead.csv")


class Steps:
    """Training steps on batches that lie ready, in turn."""

    def __init__(self, task: Task, count: int) -> None:
        self._task = task
        self._batches: Iterator[tuple[Tensor, Tensor]] = itertools.cycle([task.draw() for _ in range(count)])
        self.bounds: list[dict[str, str]] = []

    def step(self) -> None:
        self._task.inputs, self._task.target = next(self._batches)
        self._task.step()

    def last(self, session: Session) -> None:
        """The last step of a window: bounds are looked at as well, which the device does not notice."""
        self.step()
        self.bounds.append({entry.name: entry.bound for entry in session.ledger.sites.values() if entry.bound})

    def moved(self) -> float:
        """Bounds that differ from one window to the next, in the mean."""
        pairs = list(itertools.pairwise(self.bounds))
        return sum(sum(after[name] != before.get(name) for name in after) for before, after in pairs) / len(pairs)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each method in each precision."""
    arguments.require_positive(options, "batch", "windows", "warm", "batches")
    if options.window < 8:
        raise specs.UsageError(f"--window has to be at least 8, got {options.window}")
    if options.warm < 2:
        raise specs.UsageError(
            f"--warm has to be at least 2, the first windows are measured within; got {options.warm}"
        )
    device = arguments.find_device(options)
    precisions = specs.choose("precision", options.precision, workload.PRECISIONS)
    variants = [_with_period(text, options.window) for text in specs.split(options.methods)]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    given = [*(["tiny"] if options.tiny else []), *options.set]
    shared = describe_environment(device, options.revision) | {"model": load.name, "options": " ".join(given)}
    shared |= {name: getattr(options, name) for name in ("batch", "seed", "window", "windows", "warm")}
    rows: list[dict[str, Any]] = []
    for precision, variant in itertools.product(precisions, variants):
        arguments.say(f"{load.name}, batch {options.batch}, {precision}, {variant.text}: ", end="")
        begin = time.perf_counter()
        with workload.applied(precision):
            row = {**shared, "date": now(), "precision": precision, "method": variant.text, "period": PERIOD}
            row |= attempt(measure(options, load, variant, precision, device), options)
        row["elapsed_s"] = time.perf_counter() - begin
        out.append(row)
        rows.append(row)
        arguments.say(f"{progress(row)} ({row['elapsed_s']:.1f} s)")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def _with_period(text: str, window: int) -> Variant:
    variant = Variant.parse(text)
    if variant.method != "budget" or {"period", "memory"} & set(variant.options):
        raise specs.UsageError(f"this measures method budget with a noise, and sets its period itself; got {text!r}")
    return Variant(variant.text, variant.method, {**variant.options, "period": window})


def measure(
    options: argparse.Namespace, load: Workload, variant: Variant, precision: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    task = Task(load, precision, batch=options.batch, device=device, seed=options.seed,
                channels_last=options.channels_last)  # fmt: skip
    steps = Steps(task, options.batches)
    plain = timing.interleave({"step": steps.step}, device, repeats=8, warm=4)["step"]
    yield {"channels_last": task.channels_last, "plain_ms": plain.median}
    with variant.attached(task, seed=options.seed) as session:
        assert session is not None
        actions = dict.fromkeys(map(str, range(options.window - 1)), steps.step)
        actions["last"] = lambda: steps.last(session)
        times = timing.interleave(actions, device, repeats=options.windows, warm=options.warm)
        yield {"events": "; ".join(session.report().events)}
    yield summarise(list(times.values())) | {"sites": len(steps.bounds[-1]), "moved": steps.moved()}


def summarise(places: list[Times]) -> dict[str, Any]:
    """From the times of all places of a window to the share of a period."""
    late = len(places) - len(places) // 4
    ordinary = Times(tuple(sample for place in places[late:] for sample in place.samples))
    row: dict[str, Any] = ordinary.cells("ordinary_ms")
    row |= {f"{kind}_ms": place.median for kind, place in zip(KINDS, places, strict=False)}
    row["tables_ms"] = statistics.mean(place.median for place in places[len(KINDS) : late])
    row["extra_ms"] = sum(place.median - ordinary.median for place in places[:late])
    mean = statistics.mean(ordinary.samples)
    row["extra_mean_ms"] = sum(statistics.mean(place.samples) - mean for place in places[:late])
    row["overhead"] = row["extra_ms"] / (PERIOD * ordinary.median)
    row["overhead_mean"] = row["extra_mean_ms"] / (PERIOD * mean)
    row["places"] = " ".join(f"{place.median:.4g}" for place in places)
    return row


def progress(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"FAILED, {row['error']}"
    return f"{row['ordinary_ms']:.2f} ms, a measurement takes {row['extra_ms']:.1f} ms, overhead {row['overhead']:.2%}"


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("method", "precision", "plain", "ordinary", "statistics", "update", "new bounds", "tables", "extra",
             "overhead", "by means", "moved", "result")  # fmt: skip
    names = ("plain_ms", "ordinary_ms", *(f"{kind}_ms" for kind in KINDS), "tables_ms", "extra_ms")
    cells = []
    for row in rows:
        figures = [f"{row[name]:.4g}" if row["ok"] else "" for name in names]
        shares = [f"{row[name]:.2%}" if row["ok"] else "" for name in ("overhead", "overhead_mean")]
        moved = f"{row['moved']:.1f} of {row['sites']}" if row["ok"] else ""
        result = (row["events"] or "ok") if row["ok"] else row["error"]
        cells.append((row["method"], row["precision"], *figures, *shares, moved, result))
    return [f"milliseconds of a step; overhead over a period of {PERIOD}", *table(heads, cells)]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
