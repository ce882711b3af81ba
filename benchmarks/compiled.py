"""What a step takes in memory with torch.compile and Lowtide, on a CPU: the process itself is measured, not a ledger.

    PYTHONPATH=src python benchmarks/compiled.py [resnet18,gpt] [--method fixed] [--steps 3]

Four ways of training, each in a process of its own: plain, with Lowtide, and both compiled by Inductor. After some
steps
- held: what the process has grown by between forward and backward, above what it was before the step;
- peak: the most that it has grown by within a step, looked at every millisecond;
- ledger: what Lowtide counts as held, and what plain training would hold by its count. It does not see the copies of
  conv weights in another layout that Inductor makes and hands to backward, with Lowtide or without;
- step: the median time of a step, which says little about a GPU: codecs are plain torch here.
The allocator is told to give every block of 64 KiB or more back to the system when it is freed, so that growth is what
is in use. Gradients are there before the step. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide
from lowtide.app import zoo
from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.specs import UsageError
from lowtide.errors import LowtideError
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "batch", "method", "compiled", "steps", "held", "peak", "ledger_raw", "ledger_held", "step_ms"),
)
# Options of the zoo, and samples of a batch.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": ({"image_size": 128, "num_classes": 100}, 32),
    "gpt": ({"vocab_size": 2048, "context": 256, "depth": 6, "width": 384, "heads": 6}, 8),
}
_WARM = 3
_LARGE = 1 << 16  # bytes of a block that goes back to the system when it is freed


def _resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Sampler:
    """Looks at the process every millisecond, in a thread."""

    def __init__(self) -> None:
        self.most = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self.most = max(self.most, _resident())

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()


def measure(name: str, method: str, *, compiled: bool, steps: int) -> dict[str, Any]:
    """In this process."""
    options, batch = MODELS[name]
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model: nn.Module = entry.build(**{key: value for key, value in options.items() if key in entry.options})
    inputs, target = entry.example(batch, **options)
    tide = None
    if method != "plain":
        tide = lowtide.attach(model, method)
        if compiled:
            tide.compile(fullgraph=True)
    elif compiled:
        model.compile(fullgraph=True)
    rows = []
    for number in range(_WARM + steps):
        model.zero_grad(set_to_none=False)
        gc.collect()
        before, sampler, begin = _resident(), _Sampler(), time.perf_counter()
        with sampler.watching():
            loss = entry.loss(model(inputs), target)
            held = _resident() - before
            raw = (tide.ledger.raw, tide.ledger.held) if tide is not None else (None, None)
            loss.backward()
        elapsed = time.perf_counter() - begin
        if tide is not None:
            tide.step()
        if number >= _WARM:
            rows.append((held, sampler.most - before, *raw, 1e3 * elapsed))
    columns = [None if None in values else statistics.median(values) for values in zip(*rows, strict=True)]
    return dict(zip(("held", "peak", "ledger_raw", "ledger_held", "step_ms"), columns, strict=True))


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="?", default=",".join(MODELS), help="of %(default)s")
    add("--method", default="fixed", help="of Lowtide (default: %(default)s)")
    add("--steps", type=int, default=3, help="that count, after some that do not (default: %(default)s)")
    add("--child", help=argparse.SUPPRESS)
    arguments.add_output(parser, out="benchmarks/results/compiled.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "steps")
    if options.child:
        print(json.dumps(measure(**json.loads(options.child), steps=options.steps)))
        return []
    names = options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: not a model that is measured here; known: {', '.join(MODELS)}")
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    shared = describe_environment(torch.device("cpu"), options.revision)
    rows = []
    for name in names:
        for compiled in (False, True):
            for method in ("plain", options.method):
                arguments.say(f"{name}, {method}{', compiled' if compiled else ''}")
                found = _in_a_process({"name": name, "method": method, "compiled": compiled}, options.steps)
                row = {**shared, "date": now(), "model": name, "batch": MODELS[name][1], "method": method}
                rows.append({**row, "compiled": compiled, "steps": options.steps, **found})
                out.append(rows[-1])
    return rows


def _in_a_process(what: dict[str, Any], steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--steps", str(steps), "--child", json.dumps(what)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(_LARGE), "MALLOC_TRIM_THRESHOLD_": str(_LARGE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise LowtideError(f"{what}: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[0])
    return found


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("model", "method", "compiled", "held", "peak", "ledger: plain", "held", "step, ms")
    sizes = ("held", "peak", "ledger_raw", "ledger_held")
    cells = [
        (row["model"], row["method"], "yes" if row["compiled"] else "no",
         *("" if row[part] is None else size(row[part]) for part in sizes), f"{row['step_ms']:.0f}")
        for row in rows
    ]  # fmt: skip
    return list(table(heads, cells)) if rows else []


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
