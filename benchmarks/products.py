"""How many matrix products does a step run once more, and what is held for it?

    PYTHONPATH=src python benchmarks/products.py gpt llama vit_b_16 [--out benchmarks/results/products.csv]

Models of the zoo at real widths on a CPU, method ``budget``, which makes no products again, the default, and with
``remake="linear"``. Some steps let bounds set themselves; the floating-point operations of the next one, in which
nothing is measured, are counted as torch.utils.flop_counter does: ``products`` are those of mm, addmm and bmm,
``attention`` those of the attention op. Both are counted for plain training, too. ``more`` and ``more_attention`` are
what a step runs beyond it, as shares of all that plain training runs. Products depend on sizes alone, so one step is
enough for them. ``smaller`` is what plain training saves over what is held, the loss left out; it means something after
some 17 steps only. Weights and data are random. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula, sdpa_backward_flop_count, sdpa_flop_count

import lowtide
from lowtide.app import zoo
from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.specs import UsageError
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *(
        "model",
        "options",
        "batch",
        "length",
        "steps",
        "remake",
        "ok",
        "products",
        "attention",
        "more",
        "more_attention",
    ),
    *("raw", "held", "smaller", "error"),
)
# Widths of GPT-2 small, of a Llama as large, and of ViT-B/16; the number of blocks changes little in the shares.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({"vocab_size": 50257, "context": 1024, "depth": 12, "width": 768, "heads": 12}, 1024),
    "llama": (
        {"vocab_size": 32000, "context": 1024, "depth": 12, "width": 768, "heads": 12, "kv_heads": 4, "hidden": 2048},
        1024,
    ),
    "vit_b_16": ({}, 0),
}
WAYS: tuple[bool | str, ...] = (True, "linear")
_ATTENTION = "attention"

# Half of the scores of a causal op are not computed; torch's own formulas count them, so they are counted here.
_FOR_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FOR_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@register_flop_formula(_FOR_CPU)
def _forward(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


@register_flop_formula(_FOR_CPU_BACKWARD)
def _backward(grad: Any, query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


class Task:
    """A model with a batch; ``step`` is forward and backward."""

    def __init__(self, name: str, batch: int, blocks: int) -> None:
        given, length = MODELS[name]
        self.options = {**given, **({"depth": blocks} if blocks else {})}
        entry = zoo.describe(name)
        torch.manual_seed(0)
        self.model: nn.Module = entry.build(**self.options)
        self._inputs, self._targets = entry.example(batch, **({"length": length} if length else {}), **_known(given))
        self._loss = entry.loss

    def step(self) -> None:
        self.model.zero_grad()
        self._loss(self.model(self._inputs), self._targets).backward()

    def count(self) -> Counter[str]:
        """Of one step: operations of products, and of attention."""
        with FlopCounterMode(display=False) as counter:
            self.step()
        found: Counter[str] = Counter()
        for op, flops in counter.get_flop_counts()["Global"].items():
            found[_ATTENTION if _ATTENTION in str(op) else "products"] += flops
        return found


def _known(given: dict[str, Any]) -> dict[str, Any]:
    return {"vocab_size": given["vocab_size"]} if "vocab_size" in given else {}


def measure(task: Task, remake: bool | str, plain: Counter[str], steps: int) -> Iterator[dict[str, Any]]:
    tide = lowtide.attach(task.model, remake=remake, coder="blocks")
    try:
        for _ in range(steps):
            task.step()
            tide.step()
        tide.ledger.raw_peak = tide.ledger.held_peak = 0  # of the last step alone
        found = task.count()
    finally:
        tide.detach()
    ledger, total = tide.ledger, sum(plain.values())
    yield {
        **found, "raw": ledger.raw_peak, "held": ledger.held_peak, "smaller": ledger.raw_peak / ledger.held_peak,
        "more": (found["products"] - plain["products"]) / total,
        "more_attention": (found[_ATTENTION] - plain[_ATTENTION]) / total,
    }  # fmt: skip


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)} (default: all)")
    add("--batch", type=int, default=1, help="samples in a batch (default: %(default)s)")
    add("--blocks", type=int, default=0, help="in a model (default: twelve)")
    add("--steps", type=int, default=3, help="in which bounds set themselves; an odd number (default: %(default)s)")
    arguments.add_output(parser, out="benchmarks/results/products.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "batch", "steps")
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        raise UsageError(f"no model {', '.join(unknown)} here; there are {', '.join(MODELS)}")
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    shared = {**describe_environment(torch.device("cpu"), options.revision), "batch": options.batch}
    rows = []
    for name in options.models:
        task = Task(name, options.batch, options.blocks)
        plain = task.count()
        said = {"model": name, "options": " ".join(f"{key}={value}" for key, value in task.options.items())}
        said |= {"length": MODELS[name][1] or "", "steps": options.steps}
        for remake in ("", *WAYS):
            found: dict[str, Any] = {"ok": True, **plain}
            if remake:
                found = attempt(measure(task, remake, plain, options.steps), options)
            row = {**shared, **said, "date": now(), "remake": remake, **found}
            out.append(row)
            rows.append(row)
            arguments.say(" ".join(_cells(row)))
        del task
        gc.collect()
    return rows


def _cells(row: dict[str, Any]) -> list[str]:
    way = {"": "plain", True: "default"}.get(row["remake"], row["remake"])
    if not row["ok"]:
        return [row["model"], way, row["error"], "", "", ""]
    cells = [row["model"], way, f"{(row['products'] + row[_ATTENTION]) / 1e9:.1f}"]
    if not row["remake"]:
        return [*cells, "", "", ""]
    return [*cells, f"{100 * row['more']:.1f}", f"{100 * row['more_attention']:.1f}", f"{row['smaller']:.1f}x"]


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("model", "way", "GFLOP a step", "more products, %", "more attention, %", "smaller")
    return table(heads, [_cells(row) for row in rows])


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
