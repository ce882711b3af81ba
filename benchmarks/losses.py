"""What does a bound on log-probabilities do to the gradient of the logits, and what does it save?

    PYTHONPATH=src python benchmarks/losses.py [--rows 512] [--vocabulary 5000] [--out benchmarks/results/losses.csv]

Cross-entropy over three kinds of logits, recorded by ``Session.recording``: ``random`` (normal), ``language`` (a prior
that falls as that of words does, with the target among the likely ones) and ``peaked`` (nearly every row is sure and
right, so that little of the gradient is left). Per bound: the relative error of the gradient in one step, that of the
mean over many steps, which would fall with the root of their number if the error had no bias at all, the part of the
bias that is a change of length, what is left, in the mean, of the gradient that pushes rare words down (those with a
probability below a millionth; 1 if there is no bias), and how much smaller the log-probabilities become (float32, coder
rans). Bounds are on the logarithms, or on the probabilities themselves.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.reports.text import table

BOUNDS = ("0.02", "0.05", "0.1", "0.2", "0.0003 probability", "0.001 probability", "0.003 probability")
HEADS = ("vocabulary", "logits", "bound", "error", "error_of_mean", "length", "rare", "ratio")
RARE = 1e-6


class Logits(nn.Module):
    """A model whose output is its only parameter, so that the gradient of that is the one in question."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)

    def forward(self) -> Tensor:
        return self.values * 1.0


def make_logits(kind: str, rows: int, vocabulary: int) -> Tensor:
    noise, row = torch.randn(rows, vocabulary), torch.arange(rows)
    if kind == "random":
        return noise
    if kind == "peaked":
        logits = 2 * noise
        logits[row, torch.randint(vocabulary, (rows,))] += 14
        return logits
    return 1.5 * noise - 1.1 * torch.arange(1, vocabulary + 1).log()


def gradient(model: Logits, target: Tensor, tide: lowtide.Session | None = None) -> tuple[Tensor, float]:
    """Of the logits, and how many times smaller what the loss saved is held."""
    model.values.grad = None
    if tide is None:
        F.cross_entropy(model(), target).backward()
        ratio = 1.0
    else:
        with tide.recording():
            loss = F.cross_entropy(model(), target)
        ratio = tide.ledger.raw / tide.ledger.held
        loss.backward()
        tide.step()
    assert model.values.grad is not None
    return model.values.grad.double(), ratio


def measure(kind: str, rows: int, vocabulary: int, repeats: int) -> list[dict[str, str | float]]:
    torch.manual_seed(0)
    model = Logits(make_logits(kind, rows, vocabulary))
    target = torch.multinomial(model.values.detach().softmax(-1), 1).squeeze(1)
    exact, _ = gradient(model, target)
    rare = model.values.detach().softmax(-1) < RARE
    rare[torch.arange(rows), target] = False
    is_told = float(exact[rare].sum()) * rows * repeats > 0.3  # 100 times the coarsest step: or all is chance
    found: list[dict[str, str | float]] = []
    for bound in BOUNDS:
        tide = lowtide.attach(model, "fixed", log_probability=bound, coder="rans")
        total, errors, ratio = torch.zeros_like(exact), 0.0, 1.0
        for _ in range(repeats):
            lossy, ratio = gradient(model, target, tide)
            total += lossy
            errors += float((lossy - exact).norm() / exact.norm())
        tide.detach()
        mean = total / repeats
        figures = (
            errors / repeats,
            float((mean - exact).norm() / exact.norm()),
            float((mean * exact).sum() / exact.square().sum()) - 1,
            float(mean[rare].sum() / exact[rare].sum()) if is_told else math.nan,
            ratio,
        )
        found.append(dict(zip(HEADS, (vocabulary, kind, bound, *figures), strict=True)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=24)
    parser.add_argument("--out", type=Path, help="append the rows to this CSV file")
    options = parser.parse_args()
    rows = []
    for kind in ("random", "language", "peaked"):
        rows += measure(kind, options.rows, options.vocabulary, options.repeats)
    cells = [[str(row[head]) for head in HEADS[:3]] + [f"{row[head]:.3g}" for head in HEADS[3:]] for row in rows]
    print("\n".join(table(HEADS, cells)))
    if options.out:
        is_new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=HEADS)
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
