"""What does each zoo model save for backward: share by need class, before and after.

    PYTHONPATH=src python benchmarks/saves.py [--device cuda] [--amp] [--out benchmarks/results/saves.csv]

"plain" is what stock autograd would hold: unique storages, in their own dtype; parameters, buffers and the model's
inputs are not counted, since somebody else holds them. "held" is what Lowtide holds, method ``fixed`` at its defaults.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch

import lowtide
from lowtide.app import zoo
from lowtide.reports.text import table

# Full-size architectures at a batch that a CPU can run; the shares do not depend on the batch.
CASES: dict[str, dict[str, Any]] = {
    "alexnet": {"batch": 4},
    "vgg16": {"batch": 1},
    "resnet18": {"batch": 4},
    "resnet50": {"batch": 2},
    "vit_b_16": {"batch": 2},
    "gpt2_small": {"batch": 1, "example": {"length": 256}},
    "unet": {"batch": 1, "example": {"image_size": 128}},
    "lstm": {"batch": 8},
}
NEEDS = ("values", "mask", "window", "metadata", "exact")


def measure(name: str, device: str, amp: bool) -> dict[str, Any]:
    """One forward of one model, with its loss, under ``lowtide.compress``."""
    case = CASES[name]
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model = entry.build().to(device)
    inputs, target = entry.example(case["batch"], **case.get("example", {}))
    inputs, target = inputs.to(device), target.to(device)
    with lowtide.compress(model, "fixed") as tide:
        with torch.autocast(device, torch.bfloat16, enabled=amp):
            output = model(inputs)
        entry.loss(output.float(), target).backward()
    report = tide.report().to_dict()
    needs = report["needs"]
    row: dict[str, Any] = {"model": name, "batch": case["batch"], "precision": "bf16" if amp else "fp32"}
    row |= {"plain": sum(need["raw"] for need in needs.values()), "held": sum(need["held"] for need in needs.values())}
    for need in NEEDS:
        row[f"{need}_plain"] = needs.get(need, {}).get("raw", 0)
        row[f"{need}_held"] = needs.get(need, {}).get("held", 0)
    return row


def show(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        cells = [f"{row['model']} {row['precision']}", f"{row['plain'] / 2**20:.1f}", f"{row['held'] / 2**20:.1f}"]
        cells.append(f"{row['plain'] / row['held']:.1f}x")
        cells += [
            f"{100 * row[f'{need}_plain'] / row['plain']:.1f} > {100 * row[f'{need}_held'] / row['held']:.1f}"
            for need in NEEDS
        ]
        lines.append(cells)
    heads = ("model", "plain MiB", "held MiB", "ratio", *(f"{need} %" for need in NEEDS))
    return "\n".join(["share by need class, plain > held", *table(heads, lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--out", type=Path, help="write the rows as CSV")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        print(f"{name} ...", flush=True)
        rows.append(measure(name, options.device, options.amp))
    print(show(rows))
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
