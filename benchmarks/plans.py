"""Budgets for what is held for backward: asked for, planned, and measured, with the step that each costs.

    PYTHONPATH=src python benchmarks/plans.py resnet50 --batch 256 --precision bf16 --budgets 2GiB,4GiB,8GiB
    PYTHONPATH=src python benchmarks/plans.py resnet18 --tiny --device cpu --batch 32 --budgets 2MiB,4MiB

The planner (docs/methods/recompute.md) measures a model once and plans for each budget in turn; its table is printed.
Then the plan is attached, as a user would, for ``--warm`` steps and ``--repeats`` timed ones, and one more step says
what is held at the end of forward: ``ledger_held`` and ``held`` as by ``lowtide bench step`` (docs/bench.md),
``staged`` what of it is on its way to the host. ``deviation`` is ``held`` beside ``budget``, or the ledger's figure
where there is no GPU. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

from lowtide import sizes
from lowtide.app.bench import meters, timing
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.workload import Task
from lowtide.planner import Plan, Planner
from lowtide.registry import METHODS
from lowtide.reports.text import size, table
from lowtide.session import attach
from lowtide.stores.host import Host

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "precision", "method", "seed", "steps", "warm", "repeats", "ok", "error", "budget"),
    *("foreseen", "planned", "held", "ledger_held", "ledger_raw", "staged", "deviation", "plain_ms", "planned_ms"),
    *("step_ms", "step_ms_min", "step_ms_max", "step_x_plain", "peak", "survey_s", "plan_s", "choices"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--batch", type=int, default=256, help="samples in a batch (default: %(default)s)")
    add("--precision", default="bf16", choices=workload.PRECISIONS, help="(default: %(default)s)")
    add("--budgets", default="2GiB,4GiB,8GiB", help="sizes, separated by commas (default: %(default)s)")
    add("--method", default="fixed", choices=METHODS.names(), help="of compressed blocks (default: %(default)s)")
    add("--steps", type=int, default=4, help="that the planner runs in each way (default: %(default)s)")
    add("--warm", type=int, default=4, help="untimed steps with a plan (default: %(default)s)")
    add("--repeats", type=int, default=8, help="timed steps, of which the median counts (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/plans.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each budget."""
    arguments.require_positive(options, "batch", "repeats")
    budgets = [sizes.parse(text, what="budget") for text in specs.split(options.budgets)]
    device = arguments.find_device(options)
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    given = [*(["tiny"] if options.tiny else []), *options.set]
    shared = {**describe_environment(device, options.revision), "model": load.name, "options": " ".join(given)}
    shared |= {name: getattr(options, name) for name in
               ("batch", "precision", "method", "seed", "steps", "warm", "repeats")}  # fmt: skip
    rows = []
    with workload.applied(options.precision):
        task = Task(load, options.precision, batch=options.batch, device=device, seed=options.seed,
                    channels_last=options.channels_last)  # fmt: skip
        began = time.perf_counter()
        planner = Planner.measure(
            task.step, task.model, state=[task.model, task.optimizer], method=options.method, steps=options.steps
        )
        survey_s = time.perf_counter() - began
        arguments.say(f"{load.name}, batch {options.batch}, {options.precision}: measured in {survey_s:.1f} s")
        for budget in budgets:
            row = {**shared, "date": now(), "budget": budget, "plain_ms": planner.plain_ms, "survey_s": survey_s}
            row |= attempt(try_budget(planner, task, budget, options), options)
            out.append(row)
            rows.append(row)
            gc.collect()
    print("\n".join(show(rows)))
    return rows


def try_budget(planner: Planner, task: Task, budget: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What is planned, then what comes of it."""
    began = time.perf_counter()
    plan = planner.plan(budget)
    yield {"plan_s": time.perf_counter() - began}
    print(f"{plan}\n", flush=True)
    yield {"foreseen": plan.foreseen, "planned": plan.held, "planned_ms": plan.step_ms}
    yield {"choices": "; ".join(f"{block}={choice}" for block, choice in plan.choices.items())}
    yield from measure(plan, task, options)


def measure(plan: Plan, task: Task, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train with the plan; the model and its optimizer go on from where the last budget left them."""
    session = attach(task.model, optimizer=task.optimizer, seed=options.seed, **plan.options)
    try:
        for _ in range(options.warm):
            task.step()
        times = timing.interleave({"step": task.step}, task.device, repeats=options.repeats)["step"]
        yield times.cells("step_ms") | {"step_x_plain": times.median / plan.plain_ms}
        hosts = {id(rule.store): rule.store for rule in plan.options.get("rules", ()) if isinstance(rule.store, Host)}
        staged: list[int] = []
        hook = task.model.register_forward_hook(lambda *_: staged.append(sum(store.staged for store in hosts.values())))
        memory = meters.measure_memory(task, session)
        hook.remove()
    finally:
        session.detach()
    yield {name: memory.get(name) for name in ("held", "peak", "ledger_held", "ledger_raw")}
    held = memory["held"] if "held" in memory else memory["ledger_held"] + staged[0]
    yield {"staged": staged[0], "deviation": held / plan.budget - 1}


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("budget", "planned", "ledger", "staged", "held", "deviation", "step ms", "x plain", "peak", "result")
    cells = []
    for row in rows:
        bytes_of = [amount(row.get(name)) for name in ("planned", "ledger_held", "staged", "held")]
        deviation = f"{100 * row['deviation']:+.1f} %" if "deviation" in row else ""
        times = [f"{row[name]:.4g}" if name in row else "" for name in ("step_ms", "step_x_plain")]
        cells.append((size(row["budget"]), *bytes_of, deviation, *times, amount(row.get("peak")),
                      "ok" if row["ok"] else row["error"]))  # fmt: skip
    return table(heads, cells)


def amount(value: int | None) -> str:
    return "" if value is None else size(value)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run))
