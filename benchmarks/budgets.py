"""Is a memory budget met? What ``budget(memory=...)`` holds beside what it was asked for, and the noise that it costs.

    PYTHONPATH=src python benchmarks/budgets.py resnet50 --batch 256 --precision tf32,bf16
    PYTHONPATH=src python benchmarks/budgets.py resnet18 --tiny --device cpu --batch 8 --precision fp32

For each budget a new model is trained for some steps, every one on a new batch, while bounds are fitted. Then one step
is measured as by ``lowtide bench step`` (docs/bench.md), and compared with plain training in the same run:
- ``ledger_off`` is what the ledger counts at the end of forward over the budget's share of what it counts for plain
  training, less one;
- ``held_off`` is the same by the allocator, when the device has computed the loss (needs a GPU);
- ``met_step`` is the step by which the controller called the budget met, ``noise`` the added gradient noise that it
  predicted then; ``least`` and ``most`` are the ledger's share in the steps after it.
The last budget, ``--impossible``, cannot be met: its row has the error that names the smallest one that could be. Rows
are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from lowtide import Session
from lowtide.app.bench import meters
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.errors import BudgetError
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "precision", "channels_last", "seed", "steps", "budget", "ok", "error", "loss"),
    *("static", "held", "held_requested", "peak", "peak_requested", "ledger_raw", "ledger_held", "saves"),
    *("plain_held", "ledger_asked", "held_asked", "ledger_off", "held_off", "met_step", "noise", "least", "most"),
    *("smallest", "elapsed_s"),
)
_MET = re.compile(r"step (\d+): memory .*: met, added noise about (\S+)")
_SMALLEST = re.compile(r"smallest budget that can be met here is (\d+) bytes")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--batch", type=int, default=256, help="samples in a batch (default: %(default)s)")
    add("--precision", default="tf32,bf16", help=f"of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--budgets", default="0.5,0.25,0.12", help="shares of what plain training holds (default: %(default)s)")
    add("--impossible", default="0.01", help="a budget that cannot be met, - for none (default: %(default)s)")
    add("--steps", type=int, default=60, help="in which bounds are fitted (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/budgets.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for plain training and one for each budget, in each precision."""
    arguments.require_positive(options, "batch", "steps")
    device = arguments.find_device(options)
    precisions = specs.choose("precision", options.precision, workload.PRECISIONS)
    budgets = [*specs.split(options.budgets), *([] if options.impossible == "-" else [options.impossible])]
    variants = [Variant("plain"), *(Variant.parse(f"budget(memory={text})") for text in budgets)]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    given = [*(["tiny"] if options.tiny else []), *options.set]
    shared = describe_environment(device, options.revision) | {"model": load.name, "options": " ".join(given)}
    shared |= {name: getattr(options, name) for name in ("batch", "seed", "steps")}
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        plain: dict[str, Any] = {}
        for variant in variants:
            arguments.say(f"{load.name}, batch {options.batch}, {precision}, {variant.text}: ", end="")
            begin = time.perf_counter()
            with workload.applied(precision):
                row = {**shared, "date": now(), "precision": precision, "budget": variant.options.get("memory")}
                row |= attempt(try_budget(options, load, variant, precision, device), options)
            plain = plain or row
            relate(row, plain)
            row["elapsed_s"] = time.perf_counter() - begin
            out.append(row)
            rows.append(row)
            arguments.say(f"{progress(row)} ({row['elapsed_s']:.1f} s)")
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def try_budget(
    options: argparse.Namespace, load: Workload, variant: Variant, precision: str, device: torch.device
) -> Iterator[dict[str, Any]]:
    """That a budget cannot be met is a result, too."""
    task = Task(load, precision, batch=options.batch, device=device, seed=options.seed,
                channels_last=options.channels_last)  # fmt: skip
    yield {"channels_last": task.channels_last}
    try:
        with variant.attached(task, seed=options.seed) as session:
            yield measure(task, session, options.steps)
    except BudgetError as error:
        found = _SMALLEST.search(str(error))
        yield {"ok": False, "error": f"BudgetError: {error}", "smallest": int(found[1]) if found else None}


def measure(task: Task, session: Session | None, steps: int) -> dict[str, Any]:
    shares = []
    for _ in range(steps if session is not None else 2):
        task.inputs, task.target = task.draw()
        loss = task.step()
        if session is not None:
            shares.append(share(session))
    task.inputs, task.target = task.draw()
    row = {"loss": float(loss), **meters.measure_memory(task, session)}
    if session is None:
        return row
    events = session.report().events
    met = next((found for found in map(_MET.match, events) if found), None)
    if met is not None:
        after = shares[int(met[1]) :] or shares[-1:]
        row |= {"met_step": int(met[1]), "noise": float(met[2]), "least": min(after), "most": max(after)}
    return row


def share(session: Session) -> float:
    """Of what plain training holds, in the last step, as it was saved."""
    sites = session.ledger.sites.values()
    return sum(entry.held_nbytes for entry in sites) / sum(entry.raw_nbytes for entry in sites)


def relate(row: dict[str, Any], plain: dict[str, Any]) -> None:
    """What is held beside what was asked for."""
    if row is plain or not row["ok"]:
        return
    row["ledger_asked"] = round(row["budget"] * row["ledger_raw"])
    row["ledger_off"] = row["ledger_held"] / row["ledger_asked"] - 1
    if "held" in row and "held" in plain:
        row["plain_held"] = plain["held"]
        row["held_asked"] = round(row["budget"] * plain["held"])
        row["held_off"] = row["held"] / row["held_asked"] - 1


def progress(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return row["error"]
    if row["budget"] is None:
        return f"holds {size(row['held'])}" if "held" in row else "done"
    return f"ledger {row['ledger_off']:+.2%}{_percent(row, 'held_off', ', allocator {:+.2%}')}{_met(row)}"


def _met(row: dict[str, Any]) -> str:
    return f", met by step {row['met_step']}, noise {row['noise']:.3g}" if "met_step" in row else ", NOT called met"


def _percent(row: dict[str, Any], name: str, form: str = "{:+.2%}") -> str:
    return form.format(row[name]) if name in row else ""


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("budget", "precision", "asked", "ledger", "off", "asked", "allocator", "off", "met by", "noise",
             "share after it")  # fmt: skip
    cells, errors = [], []
    for row in rows:
        name = "plain" if row["budget"] is None else f"{row['budget']:.0%}"
        cells.append((
            name, row["precision"], _size(row, "ledger_asked"), _size(row, "ledger_held"), _percent(row, "ledger_off"),
            _size(row, "held_asked"), _size(row, "held"), _percent(row, "held_off"), str(row.get("met_step", "")),
            f"{row['noise']:.3g}" if "noise" in row else "",
            f"{row['least']:.2%} to {row['most']:.2%}" if "least" in row else "",
        ))  # fmt: skip
        if not row["ok"]:
            errors.append(f"{name} {row['precision']}: {row['error']}")
    return [*table(heads, cells), *errors]


def _size(row: dict[str, Any], name: str) -> str:
    return size(row[name]) if row.get(name) is not None else ""


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show, is_fine=lambda row: row["ok"] or bool(row.get("smallest"))))
