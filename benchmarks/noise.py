"""Is the noise of a weight's gradient the one that was predicted? Layer by layer, on a net in training.

    PYTHONPATH=src python benchmarks/noise.py resnet50 --batch 64 [--noise 0.001,0.01,0.1]
    PYTHONPATH=src python benchmarks/noise.py gpt --batch 16 --precision bf16

The net is trained plainly for some steps on a task that it can learn, then under method ``budget``, which sets its
bounds for one noise after the other. For each, with the weights held still, the gradients of one new batch are computed
exactly and, for several draws of the dither, from what the bounds leave of the activations:
- by weight: the squared error over the gradient's energy, and over its prediction, with only the layers' own inputs
  lossy (the output of attention is the next layer's input, so for that layer it is lossy, too);
- in total: the same for all parameters together with everything lossy, so with what propagates from layer to layer;
- what each weight contributes to the energy, and how many times less was held.
A plain second run of the same batch (``floor``) tells what the device's own lack of determinism amounts to. Measuring
is done on copies of the model, whose sessions continue from the state of the one in training. Every layer's input is
stored (``remake=False``): one that is made again has the noise of what it is made of, which is exact here. Rows, one
for each weight, are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import Session, attach
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.squares import squares
from lowtide.app.shared.workload import Task, Workload
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "precision", "channels_last", "coder", "seed", "warm", "updates", "draws", "noise"),
    *("loss", "site", "bound", "share", "predicted", "measured", "ratio", "energy", "total", "total_min", "total_max"),
    *("held_x_less", "floor"),
)
LINEAR = ("convolution", "addmm", "mm", "linear")
PERIOD = 2  # steps from one update of the bounds to the next


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo: resnet18, gpt, ... (default: %(default)s)")
    add("--batch", type=int, default=64, help="samples in a batch (default: %(default)s)")
    add("--precision", default="tf32", help=f"one of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--noise", default="0.001,0.01,0.1", help="the shares to set bounds for, in turn (default: %(default)s)")
    add("--warm", type=int, default=60, help="steps of plain training (default: %(default)s)")
    add("--updates", type=int, default=8, help="of the bounds for each noise, two steps each (default: %(default)s)")
    add("--draws", type=int, default=4, help="of the dither, whose mean counts (default: %(default)s)")
    add(
        "--coder", default="blocks", help="of payloads; values do not depend on it, and blocks has no tables to fit "
        "(default: %(default)s)",
    )  # fmt: skip
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/noise.csv")


class Pictures:
    """Ten smooth patterns under as much noise, moved sideways; one label in five is drawn at random."""

    def __init__(self, like: Tensor, seed: int) -> None:
        self._shape, self._draw = like.shape[1:], torch.Generator(like.device).manual_seed(seed)
        channels, height, width = self._shape
        coarse = self._normal(10, channels, max(height // 16, 2), max(width // 16, 2))
        self._patterns = F.interpolate(coarse, size=(height, width), mode="bicubic")
        self._moves = torch.Generator().manual_seed(seed)  # on the host, which need not wait for it

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        seen, target = self._choose(10, count), self._choose(10, count)
        target = torch.where(self._choose(5, count) > 0, seen, target)
        move = int(torch.randint(self._shape[-1], (), generator=self._moves))
        return self._patterns[seen].roll(move, -1) + self._normal(count, *self._shape), target

    def _choose(self, high: int, count: int) -> Tensor:
        return torch.randint(high, (count,), generator=self._draw, device=self._draw.device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw, device=self._draw.device)


class Texts:
    """Each token determines the next one, in seven of ten cases: all follow each other in one large circle."""

    def __init__(self, like: Tensor, vocabulary: int, seed: int) -> None:
        self._length, self._draw = like.shape[1] + 1, torch.Generator(like.device).manual_seed(seed)
        self._circle = torch.randperm(vocabulary, generator=self._draw, device=like.device)

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        device, vocabulary = self._draw.device, len(self._circle)
        drawn = torch.randint(vocabulary, (count, self._length), generator=self._draw, device=device)
        jumps = torch.rand(count, self._length, generator=self._draw, device=device) >= 0.7
        place = torch.arange(self._length, device=device).expand(count, -1)
        last = torch.where(jumps, place, 0).cummax(1).values  # the place of the last jump, or the beginning
        tokens = self._circle[(drawn.gather(1, last) + place - last) % vocabulary]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Bench:
    """A net in training under method ``budget``, and copies of it to measure on."""

    def __init__(self, options: argparse.Namespace, load: Workload, device: torch.device) -> None:
        self.options = options
        self.task = task = Task(load, options.precision, batch=options.batch, device=device, seed=options.seed,
                                channels_last=options.channels_last)  # fmt: skip
        if load.kind == "image":
            task.data = Pictures(task.inputs, options.seed)  # type: ignore[assignment]
        elif load.kind == "tokens":
            task.data = Texts(task.inputs, load.classes, options.seed)  # type: ignore[assignment]

    def train(self, steps: int) -> float:
        for _ in range(steps):
            self.task.inputs, self.task.target = self.task.draw()
            loss = self.task.step()
        return float(loss)

    def attach(self, model: nn.Module, **settings: Any) -> Session:
        return attach(model, "budget", period=PERIOD, checks=0, min_size=0, seed=self.options.seed,
                      coder=self.options.coder, remake=False, **settings)  # fmt: skip

    def copy(self) -> nn.Module:
        """The model as it is now; hooks do not follow it."""
        return copy.deepcopy(self.task.model)

    def gradients(self, model: nn.Module) -> dict[str, Tensor]:
        """Of the batch at hand; dropout draws the same masks each time."""
        torch.manual_seed(self.options.seed)
        self.task.call = model
        model.zero_grad()
        self.task.loss().backward()
        self.task.call = self.task.model
        return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}

    def draw(self, tide: Session, noise: float, exact: dict[str, Tensor], **settings: Any) -> Drawn:
        """Errors in a session that continues from the state of ``tide``, which is about to be measured."""
        state = tide.state_dict()
        state["controller"]["noise"] = {}  # what is predicted is to be for this batch
        model = self.copy()
        probe = self.attach(model, noise=noise, **settings)
        probe.load_state_dict(state)
        found = [squares(self.gradients(model), exact)]
        probe.step()  # statistics of the first draw are under way; the others need none
        found += [squares(self.gradients(model), exact) for _ in range(1, self.options.draws)]
        probe.step()
        probe.detach()
        return Drawn(found, probe)


class Drawn:
    """Squared errors by parameter, a list for each draw, and the session that made them."""

    def __init__(self, errors: list[dict[str, float]], session: Session) -> None:
        self.errors, self.session = errors, session

    def mean(self, name: str) -> float:
        return statistics.mean(error[name] for error in self.errors)

    def totals(self, energy: float) -> list[float]:
        return [sum(error.values()) / energy for error in self.errors]


def rule_sets(tide: Session) -> list[list[dict[str, Any]]]:
    """All stored values but the inputs of convolutions and linear layers are kept; then, all but outputs of others."""
    names = [entry.name.partition(":")[2].partition("#")[0] for entry in tide.report().sites if entry.need == "values"]
    pairs = sorted({(name.partition(".")[0], name.partition(".")[2]) for name in names})
    only_inputs = [{"op": op, "field": field, "keep": True} for op, field in pairs if op not in LINEAR]
    and_outputs = [rule for rule in only_inputs if rule["field"] != "output"]
    return [only_inputs] if and_outputs == only_inputs else [only_inputs, and_outputs]


def measure(bench: Bench, tide: Session, noise: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the rows have in common, and the rows."""
    bench.task.inputs, bench.task.target = bench.task.draw()
    plain = bench.copy()
    exact = {name: part.clone() for name, part in bench.gradients(plain).items()}
    energies = squares(exact)
    energy = sum(energies.values())
    everything = bench.draw(tide, noise, exact)
    totals, sites = everything.totals(energy), everything.session.report().sites
    shared = {
        "total": statistics.mean(totals),
        "total_min": min(totals),
        "total_max": max(totals),
        "held_x_less": sum(entry.raw_nbytes for entry in sites) / sum(entry.held_nbytes for entry in sites),
        "floor": sum(squares(bench.gradients(plain), exact).values()) / energy,
    }
    bounds = {entry.name: entry.bound for entry in sites}
    rows: dict[str, dict[str, Any]] = {}
    for rules in rule_sets(tide):
        drawn = bench.draw(tide, noise, exact, rules=rules)
        for site, figures in drawn.session.report().noise.items():
            name = f"{site.partition(':')[0]}.weight"
            if site in rows or figures.predicted is None or name not in exact:
                continue
            measured = drawn.mean(name) / energies[name]
            rows[site] = {
                "site": site, "bound": bounds.get(site, ""), "share": figures.share, "predicted": figures.predicted,
                "measured": measured, "ratio": measured / figures.predicted, "energy": energies[name] / energy,
            }  # fmt: skip
    return shared, list(rows.values())


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each weight and each noise."""
    arguments.require_positive(options, "batch", "warm", "updates", "draws")
    levels = [specs.parse_value(text) for text in specs.split(options.noise)]
    device = arguments.find_device(options)
    precision = specs.choose("precision", options.precision, workload.PRECISIONS)[0]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    names = ("batch", "precision", "coder", "seed", "warm", "updates", "draws")
    described = describe_environment(device, options.revision) | {name: getattr(options, name) for name in names}
    given = [*(["tiny"] if options.tiny else []), *options.set]
    described |= {"model": load.name, "options": " ".join(given)}
    begin, rows = time.perf_counter(), []
    with workload.applied(precision):
        bench = Bench(options, load, device)
        described["channels_last"] = bench.task.channels_last
        loss = bench.train(options.warm)
        arguments.say(f"{_since(begin)} {load.name}: loss {loss:.4f} after {options.warm} steps of plain training")
        tide = bench.attach(bench.task.model, noise=levels[0], optimizer=bench.task.optimizer)
        for noise in levels:
            tide.controller.noise = noise  # type: ignore[attr-defined]
            loss = bench.train(PERIOD * options.updates)
            arguments.say(f"{_since(begin)} noise {noise:g}: bounds are set, loss {loss:.4f}")
            shared, found = measure(bench, tide, noise)
            for row in found:
                rows.append({**described, "date": now(), "noise": noise, "loss": loss, **shared, **row})
                out.append(rows[-1])
            arguments.say(f"{_since(begin)} noise {noise:g}: {len(found)} weights, total {shared['total']:.4g}")
        tide.detach()
    return rows


def _since(begin: float) -> str:
    return f"[{time.perf_counter() - begin:6.1f} s]"


def show(rows: list[dict[str, Any]]) -> list[str]:
    """Measured over predicted: the range over all weights, and how many lie between 0.8 and 1.25."""
    shown = []
    for noise in dict.fromkeys(row["noise"] for row in rows):
        mine = [row for row in rows if row["noise"] == noise]
        ratios = sorted(row["ratio"] for row in mine)
        good = sum(0.8 <= ratio <= 1.25 for ratio in ratios)
        figures = (ratios[0], statistics.median(ratios), ratios[-1], *(mine[0][name] for name in ("total", "floor")))
        cells = [f"{figure:.3g}" for figure in figures]
        shown.append((f"{noise:g}", str(len(ratios)), *cells[:3], str(good), *cells[3:], _times(mine[0])))
    heads = ("noise", "weights", "least", "median", "most", "0.8 to 1.25", "total", "floor", "held")
    return ["measured over predicted noise of weights, and the noise in total", *table(heads, shown)]


def _times(row: dict[str, Any]) -> str:
    return f"{row['held_x_less']:.2f}x less"


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
