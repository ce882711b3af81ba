"""Does a noise budget hold while a net is trained? Total gradient noise and ratios, layer by layer, over a run.

    PYTHONPATH=src python benchmarks/track.py --data cifar10:PATH --batch 512 --precision bf16 --channels-last
    PYTHONPATH=src python benchmarks/track.py gpt --data text:PATH --data-set length=128 --precision fp32 --batch 32
    PYTHONPATH=src python benchmarks/track.py --data digits --tiny --device cpu --batch 32 --steps 40 --every 10

Trains as ``lowtide train`` does (docs/train.md), with the optimizer and the cycle of the learning rate that it chooses
for the data and the model, and with method ``budget`` at its default period. Every ``--every`` steps, with the weights
held still, the gradient g of the batch that comes next is computed plainly, and g' for several draws of the dither
under the bounds in force:
- ``noise`` is the mean of |g' - g|^2 / |g|^2 over the draws, all parameters together;
- ``floor`` is the same for a second plain run: what the device does not repeat;
- ``weight_mean`` and ``weight_most`` are the mean and the largest of the same for each weight by itself (scales and
  biases left out), and ``weight`` is the one that saw the most: its share is three quarters of the budget;
- ``scale_mean`` and ``scale_most`` are the same for the scales of norms, whose share is ten times the budget;
- ``bias`` is what the errors of all draws have in common, as a share of the noise: zero, but for chance, if their mean
  is zero, and one if they are all alike. Chance makes it about sqrt(2 / n) / (draws - 1), n the number of errors that
  are independent.
Measuring is done on a copy of the model whose session continues from the state of the one in training: running
statistics, random numbers and the controller of the run do not notice. Rows are appended to a CSV file, and those of
single sites to a second one.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide import Session, attach
from lowtide.app import data, zoo
from lowtide.app.shared import arguments, specs
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.squares import squares
from lowtide.app.train.config import PRECISIONS, Config
from lowtide.app.train.prepare import understand
from lowtide.app.train.trainer import Trainer, settings
from lowtide.reports.text import table

METHOD = "budget"
RUN = (*ENVIRONMENT, "model", "options", "data", "batch", "precision", "channels_last", "seed", "steps", "budget",
       "settings")  # fmt: skip
COLUMNS = (
    *RUN,
    *("draws", "step", "lr", "loss", "noise", "noise_min", "noise_max", "floor", "raw", "held", "ratio", "events"),
    *("elapsed_s", "weight_mean", "weight_most", "weight", "bias", "scale_mean", "scale_most"),
)
SITE_COLUMNS = (*RUN, "step", "site", "module", "need", "codec", "bound", "raw", "held", "ratio")


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_data(parser, model="resnet18", batch=512, steps=2000, example="length=128")
    add("--every", type=int, default=200, help="steps between two measurements (default: %(default)s)")
    add("--lr", type=float, help="the largest learning rate (default: what lowtide train chooses)")
    add("--noise", type=float, default=0.01, help="the budget (default: %(default)s)")
    add(
        "--budget-set", action="append", default=[], metavar="KEY=VALUE",
        help="an option of method budget, as flow=false (may be repeated)",
    )  # fmt: skip
    add("--draws", type=int, default=4, help="of the dither, whose mean counts (default: %(default)s)")
    add("--precision", default="bf16", help=f"one of {', '.join(PRECISIONS[:3])} (default: %(default)s)")
    add("--channels-last", action="store_true", help="memory layout of conv nets")
    add(
        "--sites", default="benchmarks/results/track_sites.csv",
        help="CSV file for the rows of single sites, - for none (default: %(default)s)",
    )  # fmt: skip
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/track.csv")


def prepare(options: argparse.Namespace, device: torch.device) -> Trainer:
    """A run of as many whole epochs as have ``--steps`` steps; the learning rate follows its cycle over all of them."""
    name, path = data.parse(options.data)
    tiny = {
        key: value
        for key, value in zoo.describe(options.model).tiny.items()
        if key in ("width", "stem", "depth", "heads")
    }
    given = {**(tiny if options.tiny else {}), **specs.parse_options(options.set)}
    train = {name: getattr(options, name) for name in ("batch", "seed", "precision", "channels_last")}
    config = Config.read({
        "model": {"name": options.model, "options": given},
        "data": {"name": name, "path": path, "options": specs.parse_options(options.data_set)},
        "method": {"name": METHOD, "options": {"noise": options.noise, **specs.parse_options(options.budget_set)}},
        "optimizer": {} if options.lr is None else {"lr": options.lr},
        "train": train,
    })  # fmt: skip
    config, found, model = understand(config)
    epochs = math.ceil(options.steps / max(found.train.per_epoch // options.batch, 1))
    return Trainer(config.replace(train={"epochs": epochs}), found, model, device)


class Gradients:
    """Gradients of one batch at the weights of a trainer, computed on copies of its model."""

    def __init__(self, trainer: Trainer, number: int) -> None:
        self._trainer, self._seed = trainer, number
        inputs, self._targets = trainer.batches.training(number)
        self._inputs = inputs if trainer.pictures is None else trainer.pictures.training(inputs, number)

    def of(self, model: nn.Module, session: Session | None = None) -> dict[str, Tensor]:
        """Dropout draws the same masks each time. What the loss saves counts, too, where there is a session."""
        train, device = self._trainer.config.train, self._trainer.device
        torch.manual_seed(self._seed)
        model.zero_grad()
        with nullcontext() if session is None else session.recording():
            with torch.autocast(device.type, torch.bfloat16, enabled=train.precision == "bf16"):
                output = model(self._inputs)
            loss = self._trainer.score(output, self._targets, smoothing=train.label_smoothing)
        loss.backward()
        return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


def measure(trainer: Trainer, number: int, draws: int) -> dict[str, Any]:
    """The noise of step ``number``, which comes next, without taking it."""
    assert trainer.session is not None
    batch, plain, lossy = Gradients(trainer, number), copy.deepcopy(trainer.model), copy.deepcopy(trainer.model)
    exact = {name: part.clone() for name, part in batch.of(plain).items()}
    energies = squares(exact)
    energy = sum(energies.values())
    floor = sum(squares(batch.of(plain), exact).values()) / energy
    # Values do not depend on the coder, and this one has no tables that would have to be fitted first.
    options = {**trainer.config.method.options, "coder": "blocks", "seed": trainer.config.train.seed}
    probe = attach(lossy, METHOD, **options)
    probe.load_state_dict(trainer.session.state_dict())
    drawn = []
    total = {name: torch.zeros_like(part, dtype=torch.float64) for name, part in exact.items()}
    for _ in range(draws):  # dither differs from pass to pass
        gradients = batch.of(lossy, probe)
        drawn.append(squares(gradients, exact))
        for name, part in gradients.items():
            total[name] += part.double() - exact[name]
    probe.detach()
    found = [sum(errors.values()) / energy for errors in drawn]
    noise = statistics.mean(found)
    single = {
        name: statistics.mean(errors[name] for errors in drawn) / energies[name] for name in exact if energies[name] > 0
    }
    weights = {name: share for name, share in single.items() if exact[name].dim() > 1}
    scales = [share for name, share in single.items() if exact[name].dim() == 1 and name.endswith("weight")]
    noisiest = max(weights, key=lambda name: weights[name])
    return {
        "noise": noise, "noise_min": min(found), "noise_max": max(found), "floor": floor,
        "weight_mean": statistics.mean(weights.values()), "weight_most": weights[noisiest], "weight": noisiest,
        "scale_mean": statistics.mean(scales) if scales else None, "scale_most": max(scales, default=None),
        "bias": common(sum(squares(total).values()) / energy, noise, draws),
    }  # fmt: skip


def common(of_sum: float, noise: float, draws: int) -> float | None:
    """What errors have in common, as a share of their noise, from the energy of their sum over the draws."""
    return (of_sum / (draws * noise) - 1) / (draws - 1) if draws > 1 and noise > 0 else None


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each measurement."""
    arguments.require_positive(options, "batch", "steps", "every", "draws")
    device = arguments.find_device(options)
    specs.choose("precision", options.precision, PRECISIONS[:3])
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    sites = ResultFile(None if options.sites == "-" else Path(options.sites), SITE_COLUMNS).begin()
    begin = time.perf_counter()
    trainer = prepare(options, device)
    shared = describe(options, trainer, device)
    rows: list[dict[str, Any]] = []
    arguments.say(f"{options.model} on {options.data}: {options.steps} steps at batch {options.batch}")
    with settings(trainer.config, device):
        for number in range(options.steps):
            loss = trainer.step(number)
            done = number + 1
            if done % options.every and done != options.steps:
                continue
            row = {**shared, "date": now(), "step": done, "lr": trainer.rate(number), "loss": float(loss)}
            row |= held(trainer) | measure(trainer, done, options.draws)
            row |= {"draws": options.draws, "elapsed_s": time.perf_counter() - begin}
            out.append(row)
            rows.append(row)
            write_sites(sites, trainer, {**shared, "date": row["date"], "step": done})
            arguments.say(f"[{row['elapsed_s']:6.1f} s] step {done}: {progress(row)}")
    trainer.close()
    return rows


def describe(options: argparse.Namespace, trainer: Trainer, device: torch.device) -> dict[str, Any]:
    names = ("model", "batch", "precision", "channels_last", "seed", "steps")
    row: dict[str, Any] = {name: getattr(options, name) for name in names}
    given = " ".join(f"{key}={value}" for key, value in trainer.config.model.options.items())
    row |= {"options": given, "data": trainer.config.data.name, "budget": options.noise}
    rate = [] if options.lr is None else [f"lr={options.lr:g}"]
    row["settings"] = " ".join([*options.data_set, *options.budget_set, *rate])
    return describe_environment(device, options.revision) | row


def held(trainer: Trainer) -> dict[str, Any]:
    """At the end of the last step's forward, as the ledger counts it."""
    raw, kept = trainer.meter.raw, trainer.meter.held
    assert raw is not None and kept is not None and trainer.session is not None
    return {"raw": raw, "held": kept, "ratio": raw / kept, "events": len(trainer.session.report().events)}


def write_sites(sites: ResultFile, trainer: Trainer, shared: dict[str, Any]) -> None:
    assert trainer.session is not None
    for entry in trainer.session.report().sites:
        row = {**shared, "site": entry.name, "raw": entry.raw_nbytes, "held": entry.held_nbytes}
        row |= {name: getattr(entry, name) for name in ("module", "need", "codec", "bound")}
        row["ratio"] = entry.raw_nbytes / entry.held_nbytes if entry.held_nbytes else None
        sites.append(row)


def progress(row: dict[str, Any]) -> str:
    return f"loss {row['loss']:.4f}, noise {row['noise']:.3%}, {row['ratio']:.2f}x less held"


def show(rows: list[dict[str, Any]]) -> list[str]:
    cells = [
        (
            str(row["step"]), f"{row['lr']:.3g}", f"{row['loss']:.4f}", f"{row['noise']:.3%}",
            f"{row['noise_min']:.3%} to {row['noise_max']:.3%}", f"{row['floor']:.2g}", f"{row['weight_most']:.2%}",
            "" if row["bias"] is None else f"{row['bias']:.1%}",
            f"{row['ratio']:.2f}x", str(row["events"]),
        )
        for row in rows
    ]  # fmt: skip
    heads = ("step", "lr", "loss", "total noise", "draws", "floor", "noisiest weight", "bias", "held less", "events")
    noises = [row["noise"] for row in rows]
    found = f"{min(noises):.3%} to {max(noises):.3%}, {statistics.mean(noises):.3%} in the mean"
    return [*table(heads, cells), f"a budget of {rows[0]['budget']:.3%} gave {found}"]


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
