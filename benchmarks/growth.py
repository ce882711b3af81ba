"""The largest batch that a method trains in a given amount of GPU memory, and its speed at that batch.

    PYTHONPATH=src python benchmarks/growth.py [resnet50] [--cap 16GiB] [--precision tf32] [--methods plain,bold]

Torch's allocator is capped (``torch.cuda.set_per_process_memory_fraction``), so a step beyond the cap really runs out
of memory. For each method ``lowtide.find_batch_size`` looks for the largest batch with 5 % of the cap held back; then
steps at that batch are timed. Methods are written as for ``lowtide bench step`` (docs/bench.md); each one gets a new
model from the same seed. What a method gives is relative to the first row with method ``plain``. Rows are appended to
a CSV file.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch

from lowtide import find_batch_size, sizes
from lowtide.app.bench import timing
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.growth import BatchSize, Meter
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "precision", "channels_last", "method", "optimizer", "seed", "cap", "reserve", "start"),
    *("maximum", "granularity", "steps", "warm", "repeats", "ok", "error", "batch", "peak", "predicted", "allowed"),
    *("tried", "why", "loss", "step_ms", "step_ms_min", "step_ms_max", "unit", "units_per_s"),
    *("batch_x_plain", "speed_x_plain"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--cap", default="16GiB", help="of GPU memory (default: %(default)s)")
    add("--precision", default="tf32", help=f"one of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--methods", default="plain,checkpoint,bold,careful", help="what to compare (default: %(default)s)")
    add("--start", type=int, default=32, help="the first batch to try (default: %(default)s)")
    add("--maximum", type=int, default=8192, help="the largest (default: %(default)s)")
    add("--granularity", default="power of two", help="a number, or 'power of two' (default: %(default)s)")
    add("--reserve", type=float, default=0.05, help="the share of the cap to hold back (default: %(default)s)")
    add("--steps", type=int, default=3, help="of a trial (default: %(default)s)")
    add("--warm", type=int, default=8, help="untimed steps at the batch found (default: %(default)s)")
    add("--repeats", type=int, default=10, help="timed steps, of which the median counts (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/growth.csv")


def run(options: argparse.Namespace, meter: Meter | None = None) -> list[dict[str, Any]]:
    """One row for each method; ``meter`` measures memory where there is no GPU."""
    device = arguments.find_device(options)
    precision = specs.choose("precision", options.precision, workload.PRECISIONS)[0]
    variants = [Variant.parse(text) for text in specs.split(options.methods)]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    shared = describe_environment(device, options.revision) | _describe(options, load, precision)
    rows: list[dict[str, Any]] = []
    with workload.applied(precision):
        for number, variant in enumerate(variants, 1):
            arguments.say(f"[{number}/{len(variants)}] {load.name}, {precision}, {variant.text}: ", end="")
            row = {**shared, "date": now(), "method": variant.text}
            row |= attempt(_measure(options, load, variant, device, meter), options)
            plain = next((other for other in rows if other["method"] == "plain" and other["ok"]), row)
            _relate(row, plain)
            out.append(row)
            rows.append(row)
            arguments.say(_progress(row))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def _describe(options: argparse.Namespace, load: Workload, precision: str) -> dict[str, Any]:
    names = ("seed", "cap", "reserve", "start", "maximum", "granularity", "steps", "warm", "repeats")
    given = [*(["tiny"] if options.tiny else []), *options.set]
    row = {"model": load.name, "options": " ".join(given), "precision": precision, "unit": load.unit}
    return row | {name: getattr(options, name) for name in names}


def _measure(
    options: argparse.Namespace, load: Workload, variant: Variant, device: torch.device, meter: Meter | None
) -> Iterator[dict[str, Any]]:
    task = Task(load, options.precision, batch=options.start, device=device, seed=options.seed,
                channels_last=options.channels_last)  # fmt: skip
    variant.prepare(task)
    yield {"channels_last": task.channels_last, "optimizer": type(task.optimizer).__name__}
    with variant.attached(task, seed=options.seed) as session:
        granularity = specs.parse_value(options.granularity)
        result = find_batch_size(
            lambda batch: _step(task, batch), state=[task.model, task.optimizer, *([session] if session else [])],
            start=options.start, maximum=options.maximum, granularity=granularity, budget=options.cap,
            reserve=options.reserve, steps=options.steps, device=device, meter=meter,
        )  # fmt: skip
        yield _found(result)
        if result.batch:
            for _ in range(options.warm):
                _step(task, result.batch)
            times = timing.interleave({"step": task.step}, device, repeats=options.repeats)["step"]
            yield times.cells("step_ms") | {"units_per_s": 1e3 * task.items / times.median}
            yield {"loss": float(task.step())}


def _step(task: Task, batch: int) -> None:
    """A step of any size: a batch of that size is drawn when the size changes."""
    if task.batch != batch:
        task.items = task.items // task.batch * batch
        task.batch = batch
        task.inputs = task.target = torch.empty(0)  # the old batch goes before the new one comes
        task.inputs, task.target = task.draw()
    task.step()


def _found(result: BatchSize) -> dict[str, Any]:
    names = ("batch", "peak", "predicted", "allowed", "why")
    tried = [f"{trial.batch} {trial.outcome}{f' {trial.peak}' if trial.peak else ''}" for trial in result.tried]
    return {name: getattr(result, name) for name in names} | {"tried": "; ".join(tried)}


def _relate(row: dict[str, Any], plain: dict[str, Any]) -> None:
    if not row["ok"]:
        return
    for column, name in (("batch_x_plain", "batch"), ("speed_x_plain", "units_per_s")):
        if row.get(name) and plain.get(name) and plain["method"] == "plain":
            row[column] = row[name] / plain[name]


def _progress(row: dict[str, Any]) -> str:
    if not row["ok"]:
        found = f" with the batch found, {row['batch']}" if "batch" in row else ""
        return f"FAILED{found}, {row['error']}"
    speed = f", {row['units_per_s']:.4g} {row['unit']} a second" if "units_per_s" in row else ""
    return f"batch {row['batch']}{speed} ({row['why']})"


def show(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        (
            row["method"], str(row.get("batch", "")), _times(row.get("batch_x_plain")),
            size(row["peak"]) if row.get("peak") else "", f"{row['units_per_s']:.4g}" if "units_per_s" in row else "",
            _times(row.get("speed_x_plain")), "" if row["ok"] else row["error"],
        )
        for row in rows
    ]  # fmt: skip
    return table(("method", "batch", "x plain", "peak", "per second", "x plain", "error"), cells)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def capped(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same under the cap."""
    arguments.require_positive(options, "start", "maximum", "steps", "repeats")
    device, cap = arguments.find_device(options), sizes.parse(options.cap, what="--cap")
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0), device)
    return run(options)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, capped, show))
