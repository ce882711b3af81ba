"""How much gradient noise does a training run tolerate? Plain training with noise added to gradients, dose by dose.

    PYTHONPATH=src python benchmarks/tolerance.py resnet18 --data cifar10:PATH --set stem=cifar --epochs 15 --seeds 5
    PYTHONPATH=src python benchmarks/tolerance.py gpt --data text:PATH --data-set length=128 --batch 32 --epochs 1
    PYTHONPATH=src python benchmarks/tolerance.py --data digits --tiny --device cpu --batch 64 --epochs 3 --seeds 2

Nothing is compressed here. What method ``budget`` does to training is that it adds noise to gradients, of an energy
that is a given share of the gradient's own (its option ``noise``) and without a bias. This adds such noise by itself,
many times as much as anybody would ask for, so that a few runs tell what the small share of ``budget`` costs: as long
as the effect is in proportion to the dose, it is known ``dose / share`` times as well as from runs at that share.

Every weight's gradient g gets normal noise of the energy ``dose * |g|^2``; scales and biases of norms get ``--scales``
times as much, about what they see under ``budget``. Runs of one seed begin with the same weights and see the same
batches, crops and dropout masks; the noise has a generator of its own. Everything else is as ``lowtide train`` does it
(docs/train.md). Rows are appended to a CSV file, and a run whose row is there is not repeated.

The table has for each dose the differences from the same seeds without noise, with 95 % intervals over the seeds; then
the slope, a line through the origin for each seed, and what it makes of ``--share``. If the differences at two doses
are not in the ratio of the doses, the line is not one: then use smaller doses. With ``--shorter``, runs without noise
that end so many epochs earlier, with a learning rate that follows its cycle in fewer steps, say what a dose costs in
training: noise of what energy does as much harm as one per cent less training?
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.app import data, zoo
from lowtide.app.compare.runs import read_seeds
from lowtide.app.compare.student import Estimate
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.config import PRECISIONS, Config
from lowtide.app.train.prepare import understand
from lowtide.app.train.seeds import mix
from lowtide.app.train.trainer import Trainer, settings
from lowtide.reports.text import table

NOISE = 3  # a stream of random numbers beside those of ``lowtide.app.train.seeds``
COLUMNS = (
    *(*ENVIRONMENT, "model", "options", "data", "data_options", "batch", "epochs", "precision", "channels_last"),
    *("settings", "scales", "seed", "dose", "steps", "accuracy", "loss", "elapsed_s"),
)
Doses = dict[int, dict[float, float]]  # differences by seed and dose
_TINY = ("width", "stem", "depth", "heads")  # of a zoo model's test size, what does not depend on the data


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_data(parser, model="resnet18", batch=512, epochs=15, example="length=128")
    add("--doses", default="0.3,1", help="energies of noise, as shares of the gradient's (default: %(default)s)")
    add("--seeds", default="5", help="how many, 3-6 or 1,4,9 (default: %(default)s)")
    add("--scales", type=float, default=4.0, help="what parameters of norms get of a dose (default: %(default)s times)")
    add("--shorter", type=int, default=0, metavar="N", help="also train without noise for N epochs less (default: no)")
    add("--share", type=float, default=0.03, help="of noise, whose cost is to be told (default: %(default)s)")
    add("--lr", type=float, help="the largest learning rate (default: what lowtide train chooses)")
    add("--label-smoothing", type=float, default=0.0, help="share of a label given to all classes (default: none)")
    add("--precision", default="fp32", help=f"one of {', '.join(PRECISIONS[:3])} (default: %(default)s)")
    add("--channels-last", action="store_true", help="memory layout of conv nets")
    arguments.add_model(parser)
    where = parser.add_argument_group("where and how")
    where.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    arguments.add_output(where, out="benchmarks/results/tolerance.csv")


@dataclass(frozen=True, slots=True)
class Job:
    """What tells one run from the others."""

    seed: int
    dose: float
    epochs: int

    @classmethod
    def of(cls, row: dict[str, Any]) -> Job:
        return cls(row["seed"], row["dose"], row["epochs"])


class Noise:
    """Adds noise to the gradient of each parameter when backward has made it."""

    def __init__(self, model: nn.Module, *, dose: float, scales: float, seed: int) -> None:
        self._dose, self._scales = dose, scales
        parameters = [item for item in model.parameters() if item.requires_grad]
        self._generator = torch.Generator(parameters[0].device).manual_seed(mix(seed, NOISE))
        self._hooks = [item.register_post_accumulate_grad_hook(self._add) for item in parameters] if dose else []

    def _add(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "the hook runs when a gradient has been accumulated"
        share = self._dose * (self._scales if parameter.dim() == 1 else 1.0)
        drawn = torch.randn(gradient.shape, generator=self._generator, device=gradient.device, dtype=gradient.dtype)
        with torch.no_grad():
            gradient += drawn * (torch.linalg.vector_norm(gradient) * math.sqrt(share / gradient.numel()))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def prepare(options: argparse.Namespace, seed: int, epochs: int) -> Config:
    name, path = data.parse(options.data)
    tiny = {key: value for key, value in zoo.describe(options.model).tiny.items() if key in _TINY}
    train = {name: getattr(options, name) for name in ("batch", "precision", "channels_last")}
    return Config.read({
        "model": {"name": options.model, "options": (tiny if options.tiny else {}) | specs.parse_options(options.set)},
        "data": {"name": name, "path": path, "options": specs.parse_options(options.data_set)},
        "optimizer": {} if options.lr is None else {"lr": options.lr},
        "train": {**train, "epochs": epochs, "label_smoothing": options.label_smoothing, "seed": seed},
    })  # fmt: skip


def train(options: argparse.Namespace, job: Job, device: torch.device) -> dict[str, Any]:
    """One run; what the test split says at its end."""
    begin = time.perf_counter()
    config, found, model = understand(prepare(options, job.seed, job.epochs))
    trainer = Trainer(config, found, model, device)
    noise = Noise(trainer.model, dose=job.dose, scales=options.scales, seed=job.seed)
    with settings(config, device):
        for number in range(trainer.steps):
            trainer.step(number)
        accuracy, loss = trainer.evaluate()
    noise.close()
    trainer.close()
    return {"steps": trainer.steps, "accuracy": accuracy, "loss": loss, "elapsed_s": time.perf_counter() - begin}


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """What runs have to share to be compared."""
    row: dict[str, Any] = {name: getattr(options, name) for name in ("model", "batch", "precision")}
    row |= {"channels_last": options.channels_last, "scales": options.scales}
    row |= {"options": " ".join([*(["tiny"] if options.tiny else []), *options.set])}
    row |= {"data": options.data.partition(":")[0], "data_options": " ".join(options.data_set)}
    given = {"lr": options.lr, "label_smoothing": options.label_smoothing or None}
    return row | {"settings": " ".join(f"{key}={value:g}" for key, value in given.items() if value is not None)}


def read_doses(text: str) -> list[float]:
    try:
        doses = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        doses = []
    if not doses or min(doses) <= 0 or not all(map(math.isfinite, doses)) or len(set(doses)) != len(doses):
        raise UsageError(f"cannot read {text!r} as doses; write shares above zero, as 0.3,1")
    return sorted(doses)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each run, those that were there included."""
    arguments.require_positive(options, "batch", "epochs")
    if not 0 <= options.shorter < options.epochs:
        raise UsageError(f"--shorter is less than the {options.epochs} epochs of a run, got {options.shorter}")
    doses, seeds, device = read_doses(options.doses), read_seeds(options.seeds), arguments.find_device(options)
    specs.choose("precision", options.precision, PRECISIONS[:3])
    shared = describe(options)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    kinds = [(dose, options.epochs) for dose in (0.0, *doses)]
    kinds += [(0.0, options.epochs - options.shorter)] if options.shorter else []
    jobs = [Job(seed, *kind) for seed in seeds for kind in kinds]
    rows = [row for row in past(out, shared) if Job.of(row) in jobs]
    done = {Job.of(row) for row in rows}
    left = [job for job in jobs if job not in done]
    environment = describe_environment(device, options.revision)
    for number, job in enumerate(left, 1):
        row = {**environment, **shared, **dataclasses.asdict(job), "date": now()}
        row |= train(options, job, device)
        out.append(row)
        rows.append(row)
        text = f"accuracy {row['accuracy']:.2%}, loss {row['loss']:.4f}, {row['elapsed_s']:.0f} s"
        arguments.say(f"[{number} of {len(left)}] seed {job.seed}, dose {job.dose:g}, {job.epochs} epochs: {text}")
    return [{**row, "share": options.share} for row in rows]


def past(out: ResultFile, shared: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of runs like these."""
    if out.path is None:
        return []
    with out.path.open(encoding="utf-8", newline="") as file:
        found = [row for row in csv.DictReader(file) if is_like(row, shared)]
    whole, numbers = ("seed", "epochs"), ("dose", "accuracy", "loss")
    return [
        {**row, **{name: int(row[name]) for name in whole}, **{name: float(row[name]) for name in numbers}}
        for row in found
    ]


def is_like(row: dict[str, str], shared: dict[str, Any]) -> bool:
    """Where there is no noise, it does not matter how much of it norms would have had."""
    return all(
        float(row[name]) == value if isinstance(value, float) else row[name] == str(value)
        for name, value in shared.items()
        if name != "scales" or float(row["dose"])
    )


def differences(rows: Sequence[dict[str, Any]], metric: str, scale: float) -> tuple[Doses, dict[int, float]]:
    """By seed and dose, what the metric is beyond that of the same seed without noise; and by seed, what it is more if
    training is shorter, for each whole training that it is shorter by."""
    longest = max(row["epochs"] for row in rows)
    values = {Job.of(row): scale * row[metric] for row in rows}
    of_doses: Doses = {}
    of_lengths: dict[int, float] = {}
    for job, value in values.items():
        plain = values.get(Job(job.seed, 0.0, longest))
        if plain is not None and job.dose:
            of_doses.setdefault(job.seed, {})[job.dose] = value - plain
        elif plain is not None and job.epochs < longest:
            of_lengths[job.seed] = (value - plain) * longest / (longest - job.epochs)
    return of_doses, of_lengths


def slopes(of_doses: Doses) -> dict[int, float]:
    """For each seed the line through the origin that fits its differences best."""
    return {
        seed: sum(dose * value for dose, value in values.items()) / sum(dose * dose for dose in values)
        for seed, values in of_doses.items()
    }


def show(rows: list[dict[str, Any]]) -> list[str]:
    points, losses = differences(rows, "accuracy", 100.0), differences(rows, "loss", 1.0)
    longest = max(row["epochs"] for row in rows)
    cells = []
    for dose, epochs in sorted({(row["dose"], row["epochs"]) for row in rows}):
        here = [row for row in rows if (row["dose"], row["epochs"]) == (dose, epochs)]
        accuracy = Estimate.of([100 * row["accuracy"] for row in here])
        loss = Estimate.of([row["loss"] for row in here])
        cells.append((
            f"{dose:g}", str(epochs), str(len(here)), f"{accuracy.mean:.2f}", of_kind(points, dose, epochs, longest, 2),
            f"{loss.mean:.4f}", of_kind(losses, dose, epochs, longest, 4),
        ))  # fmt: skip
    lines = table(("dose", "epochs", "runs", "accuracy %", "points", "test loss", "difference"), cells)
    for name, (of_doses, of_lengths), digits in (("points", points, 4), ("test loss", losses, 5)):
        found = slopes(of_doses)
        if found:
            share = rows[0]["share"]
            cost = written([share * slope for slope in found.values()], digits)
            lines.append(f"{name}: {written(list(found.values()), 3)} for a dose of 1, so {cost} for one of {share:g}")
        if of_lengths:
            lines.append(f"{name}: {written(list(of_lengths.values()), 3)} for a whole training less")
        if found and of_lengths and (less := fmean(of_lengths.values())):
            each = fmean(found.values()) / less
            lines.append(f"{name}: noise of 1 % costs as much as {each:.2f} % less training")
    return lines


def of_kind(found: tuple[Doses, dict[int, float]], dose: float, epochs: int, longest: int, digits: int) -> str:
    """The mean difference of runs of a kind, with its interval."""
    of_doses, of_lengths = found
    if epochs < longest:
        return written([value * (longest - epochs) / longest for value in of_lengths.values()], digits)
    return written([values[dose] for values in of_doses.values() if dose in values], digits)


def written(values: Sequence[float], digits: int) -> str:
    """A mean and its interval."""
    if not values:
        return ""
    found = Estimate.of(values)
    mean = f"{found.mean:+.{digits}f}"
    return mean if found.half is None else f"{mean} ({found.low:+.{digits}f} to {found.high:+.{digits}f})"


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
