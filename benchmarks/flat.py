"""Is memory flat? Allocated and reserved bytes between two steps, over thousands of them.

    PYTHONPATH=src python benchmarks/flat.py resnet18 --batch 256 --precision bf16 --methods budget --steps 2000
    PYTHONPATH=src python benchmarks/flat.py --tiny --device cpu --precision fp32 --steps 40 --warm 10 --every 5

Every step has a new batch. Every ``--every`` steps the allocator is asked, after all that was launched has run: what is
allocated between two steps (weights, the optimizer's state, what methods keep), the largest that was allocated within
the steps since, and what is reserved. ``allocated_growth`` and ``reserved_growth`` are the largest of the second half
of the run over the largest of the first half after ``--warm`` steps, less one. Rows are appended to a CSV file, one for
every look, with the growth so far. On a CPU bytes are those of Lowtide's own count.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from lowtide import Session
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "precision", "channels_last", "method", "seed", "steps", "warm", "step", "loss"),
    *("allocated", "peak", "reserved", "allocated_growth", "reserved_growth", "elapsed_s"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet18", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--batch", type=int, default=256, help="samples in a batch (default: %(default)s)")
    add("--precision", default="bf16", choices=workload.PRECISIONS, help="(default: %(default)s)")
    add("--methods", default="budget", help="as for lowtide bench step (default: %(default)s)")
    add("--steps", type=int, default=2000, help="(default: %(default)s)")
    add("--warm", type=int, default=200, help="steps that do not count (default: %(default)s)")
    add("--every", type=int, default=100, help="steps between two looks (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/flat.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all methods."""
    arguments.require_positive(options, "batch", "steps", "warm", "every")
    if options.warm + 2 * options.every > options.steps:
        raise specs.UsageError("two looks at least come after --warm steps: give more --steps, or look more often")
    device = arguments.find_device(options)
    variants = [Variant.parse(text) for text in specs.split(options.methods)]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    given = " ".join([*(["tiny"] if options.tiny else []), *options.set])
    shared = describe_environment(device, options.revision) | {"model": load.name, "options": given}
    shared |= {name: getattr(options, name) for name in ("batch", "precision", "seed", "steps", "warm")}
    rows: list[dict[str, Any]] = []
    for variant in variants:
        with workload.applied(options.precision):
            for found in train(options, load, variant, device):
                row = {**shared, "date": now(), "method": variant.text, **found}
                out.append(row)
                rows.append(row)
                arguments.say(f"{variant.text}, step {row['step']}: {_text(row)}")
    return rows


def train(
    options: argparse.Namespace, load: Workload, variant: Variant, device: torch.device
) -> Iterator[dict[str, Any]]:
    task = Task(load, options.precision, batch=options.batch, device=device, seed=options.seed,
                channels_last=options.channels_last)  # fmt: skip
    batches = itertools.cycle([task.draw() for _ in range(8)])
    looks: list[dict[str, Any]] = []
    begin = time.perf_counter()
    variant.prepare(task)
    with variant.attached(task, seed=options.seed, warm=options.warm) as session:
        for number in range(1, options.steps + 1):
            task.inputs, task.target = next(batches)
            loss = task.step()
            if number % options.every == 0:
                found = {"channels_last": task.channels_last, "step": number, "loss": float(loss)}
                looks.append(found | look(device, session))
                yield {**looks[-1], **growth(looks, options), "elapsed_s": time.perf_counter() - begin}


def look(device: torch.device, session: Session | None) -> dict[str, int]:
    """Bytes, now that the step has ended and what it launched has run."""
    if device.type != "cuda":
        ledger = session.ledger if session is not None else None
        held, peak = (ledger.held, ledger.held_peak) if ledger is not None else (0, 0)
        return {"allocated": held, "peak": peak, "reserved": peak}
    torch.cuda.synchronize(device)
    found = {
        "allocated": torch.cuda.memory_allocated(device),
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.memory_reserved(device),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found


def growth(looks: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, float | None]:
    """Of the second half of the run over the first; None before it has begun."""
    middle = options.warm + (options.steps - options.warm) // 2
    early = [item for item in looks if options.warm < item["step"] <= middle]
    late = [item for item in looks if item["step"] > middle]
    if not early or not late:
        return {"allocated_growth": None, "reserved_growth": None}
    found: dict[str, float | None] = {}
    for name in ("allocated", "reserved"):
        before, after = (max(item[name] for item in half) for half in (early, late))
        found[f"{name}_growth"] = (after - before) / max(before, 1)
    return found


def _text(row: dict[str, Any]) -> str:
    text = f"{size(row['allocated'])} allocated, peak {size(row['peak'])}, {size(row['reserved'])} reserved"
    if row["reserved_growth"] is None:
        return text
    return f"{text}; {row['allocated_growth']:+.2%} and {row['reserved_growth']:+.2%} since the first half"


def show(rows: list[dict[str, Any]]) -> list[str]:
    last = {row["method"]: row for row in rows}
    heads = ("method", "steps", "allocated", "peak", "reserved", "allocated, growth", "reserved, growth")
    cells = []
    for row in last.values():
        bytes_of = [size(row[name]) for name in ("allocated", "peak", "reserved")]
        grown = [f"{row[name]:+.2%}" for name in ("allocated_growth", "reserved_growth")]
        cells.append((row["method"], str(row["step"]), *bytes_of, *grown))
    return list(table(heads, cells))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
