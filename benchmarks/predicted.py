"""What ``predict="row"`` makes of the payloads of ``sz`` in a net that learns, beside what was expected of it.

    PYTHONPATH=src python benchmarks/predicted.py resnet18 --data cifar10:PATH --batch 64 --steps 300,900
    PYTHONPATH=src python benchmarks/predicted.py resnet18 --data imagefolder:PATH --batch 32 --steps 300,900

The net trains as in prediction.py, and the same tensors are taken from it. Each is encoded whole, twice, by the coder
``rans``: without prediction, and where a sample may choose it; tables are those that a survey gives, chunks those of
large tensors. Bits a value of either payload, all of its parts counted, and whether it is predicted. What both decode
to is compared, bit for bit. Beside them ``coded_plain`` and ``coded_row`` of prediction.py, which takes differences
within rows of maps, tables fitted to the tensor itself, and of a batch the first samples. One row for each tensor and
bound is appended to a CSV file; the table at the end has totals over all values.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import prediction
import torch
from prediction import CASE, FORCED, LARGE, RUN, Codes, Read, code
from torch import Tensor

from lowtide.app.shared.script import run_script
from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Sz
from lowtide.coding import layout
from lowtide.reports.text import table

COLUMNS = (
    *RUN,
    *("site", "family", "shape", "zeros", "layout", "rounding", "bound", "digits", "predicted", "payload"),
    *("payload_row", "coded_plain", "coded_row"),
)


def configure(parser: argparse.ArgumentParser) -> None:
    prediction.configure(parser, samples=8, bounds="1.0,0.4,0.2", out="benchmarks/results/predicted.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    return prediction.run(options, columns=COLUMNS, look=measure)


def measure(read: Read, rule: BoundRule, rounding: str, samples: int) -> dict[str, Any]:
    """What is asked of one tensor under one bound."""
    x, bound = read.x, rule.resolve(read.x, read.need)
    kept, grid, zero_code = [], None, Sz().plan(read.x, bound).zero_code
    found: dict[str, Any] = {}
    for name, predict in (("payload", "off"), ("payload_row", "row")):
        codec = Sz(coder="rans", rounding=rounding, predict=predict)
        grid = codec.grid(x, bound) if grid is None else grid
        plan = codec.fit(grid, codec.survey(x, grid).cpu(), LARGE, zero_code)
        encoded = codec.encode(x, seed=1, plan=plan)
        found[name] = 8 * encoded.nbytes / x.numel()
        found["digits"] = plan.model.alphabet.values if plan.model is not None else 0
        found["predicted"] = int(plan.model is not None and plan.model.alphabet.predicted)
        kept.append(layout.memory_view(codec.decode(encoded)))
    assert _are_equal(*kept), f"{read.site}: values depend on prediction"
    codes = Codes.of(read, rule, rounding, samples)
    for name, stream in (("coded_plain", codes), ("coded_row", codes.predicted("row"))):
        parts = [(stream.q, stream.zero)]
        found[name] = min(code(parts, size, x.numel(), strict=True) for size in FORCED)
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def show(rows: list[dict[str, Any]]) -> list[str]:
    """Bits of all values together, how prediction changes them, and how it was expected to where that helps."""
    cells = []
    for case in dict.fromkeys(tuple(row[name] for name in CASE) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in CASE) == case]
        for family in (*sorted({row["family"] for row in mine}), "all"):
            chosen = [row for row in mine if family in (row["family"], "all")]
            expected = [{**row, "best": min(row["coded_plain"], row["coded_row"])} for row in chosen]
            off, row = total(chosen, "payload"), total(chosen, "payload_row")
            gain = total(expected, "best") / total(chosen, "coded_plain") - 1
            count = f"{sum(item['predicted'] for item in chosen)} of {len(chosen)}"
            cells.append(
                (*map(str, case), family, f"{off:.3f}", f"{row:.3f}", f"{row / off - 1:+.1%}", f"{gain:+.1%}", count)
            )
    return table((*CASE, "sites", "off", "row", "change", "expected", "predicted"), cells)


def total(rows: list[dict[str, Any]], name: str) -> float:
    """Bits a value over all sites."""
    sizes = [math.prod(map(int, row["shape"].split("x"))) for row in rows]
    return sum(size * row[name] for size, row in zip(sizes, rows, strict=True)) / sum(sizes)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
