"""Does it work with the model that I have, compiled? Architectures of transformers, each eagerly and as graphs.

    pip install transformers
    PYTHONPATH=src python benchmarks/architectures_compiled.py [llama,bert,...] [--precision fp32,bf16]

The models and batches of architectures.py. With fixed bounds, samples of every decode compared with what was saved,
and the backend ``aot_eager``, which runs torch's own ops:
- graphs: into how many torch.compile divides a forward; one is what one hopes for;
- same: whether the gradients of the compiled model are those of the eager one bit for bit. Where a model takes another
  way when it is compiled, or an op rounds otherwise, they are not; then
- noise, eager and compiled: what each adds to the gradient of all weights, as a share of its energy, against plain
  training eagerly, random numbers and all;
- held: bytes, eagerly and compiled.
Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from architectures import ARCHITECTURES, Bench, are_equal, bench_of, choose, energy
from torch import Tensor

import lowtide
from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *("transformers", "architecture", "precision", "ok", "graphs", "same", "noise", "noise_compiled", "held"),
    *("held_compiled", "error"),
)
_MIN_SIZE = 1024  # bytes: the models are small


def measure(name: str, precision: str) -> Iterator[dict[str, Any]]:
    plain = bench_of(name, precision).gradients()
    eager, held, _ = _run(bench_of(name, precision), is_compiled=False)
    yield {"noise": _noise(eager, plain), "held": held}
    compiled, held, graphs = _run(bench_of(name, precision), is_compiled=True)
    yield {"noise_compiled": _noise(compiled, plain), "held_compiled": held}
    yield {"graphs": graphs, "same": are_equal(eager, compiled)}


def _run(bench: Bench, *, is_compiled: bool) -> tuple[dict[str, Tensor], int, int]:
    """Gradients, bytes held, and graphs that ran."""
    torch._dynamo.reset()
    tide = lowtide.attach(bench.model, "fixed", min_size=_MIN_SIZE, check=True)
    if is_compiled:
        tide.compile(backend="aot_eager")
    gradients = bench.gradients()
    graphs = tide._calls._backend.ran if tide._calls is not None else 0
    tide.detach()
    torch._dynamo.reset()
    gc.collect()  # now: Python 3.11 may crash where it happens while a tensor that several graphs have seen is freed
    return gradients, tide.ledger.held_peak, graphs


def _noise(one: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    return energy({key: one[key] - plain[key] for key in plain}) / max(energy(plain), 1e-300)


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("architectures", nargs="?", default=",".join(ARCHITECTURES), metavar="NAMES", help="(default: all)")
    add("--precision", default="fp32,bf16", help="of fp32, bf16 (autocast) (default: %(default)s)")
    arguments.add_output(parser, out="benchmarks/results/architectures_compiled.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    names, precisions, version = choose(options)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    shared = {**describe_environment(torch.device("cpu"), options.revision), "transformers": version}
    rows = []
    for name in names:
        for precision in precisions:
            arguments.say(f"{name}, {precision}")
            row = {**shared, "date": now(), "architecture": name, "precision": precision}
            rows.append({**row, **attempt(measure(name, precision), options)})
            out.append(rows[-1])
    return rows


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("architecture", "precision", "graphs", "same bits", "noise", "compiled", "held", "compiled", "")
    cells = []
    for row in rows:
        if not row["ok"]:
            cells.append((row["architecture"], row["precision"], *[""] * 6, row["error"]))
            continue
        noises = (f"{row[part]:.4f}" for part in ("noise", "noise_compiled"))
        sizes = (f"{row[part] / 1024:.0f} KiB" for part in ("held", "held_compiled"))
        same = "yes" if row["same"] else "no"
        cells.append((row["architecture"], row["precision"], str(row["graphs"]), same, *noises, *sizes, ""))
    return list(table(heads, cells))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
