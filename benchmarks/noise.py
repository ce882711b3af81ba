"""Is the noise of a weight's gradient the one that was predicted? Layer by layer, on a net in training.

    python benchmarks/noise.py --model resnet50 [--batch 256] [--noise 0.001 0.01 0.1] [--out FILE.csv]
    python benchmarks/noise.py --model gpt --batch 64

The net is trained plainly for some steps on a task that it can learn, then for some more under method ``budget``, which
sets its bounds. Then, with the weights held still, the gradients of one batch are computed exactly and, for several
seeds of the dither, from what the bounds leave of the activations:
- by weight: the squared error over the gradient's energy, and over its prediction, with only the layers' own inputs
  lossy (the output of attention is the next layer's input, so for that layer it is lossy, too);
- in total: the same for all parameters together with everything lossy, so with what propagates from layer to layer;
- what each weight contributes to the energy, and what was held.
A plain second run of the same batch tells what the device's own lack of determinism amounts to.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lowtide
from lowtide.app import zoo
from lowtide.reports.text import table

LINEAR = ("convolution", "addmm", "mm", "linear")
Batch = Callable[[int], tuple[Tensor, Tensor]]


class Bench:
    """A net in training, the task, and the precision."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        entry = zoo.describe(options.model)
        self.device, self.amp, self.loss = torch.device(options.device), options.precision == "bf16", entry.loss
        built = dict(entry.tiny) if options.tiny else {}
        self.model = entry.build(**built).to(self.device)
        if entry.kind == "image":
            self.model = self.model.to(memory_format=torch.channels_last)
            self.batch = pictures(options.batch, options.size, self.device)
            self.optimizer: Any = torch.optim.SGD(self.model.parameters(), options.lr or 0.05, momentum=0.9)
        else:
            settings = {**entry.options, **built}
            self.batch = texts(options.batch, settings["context"], settings["vocab_size"], self.device)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), options.lr or 1e-3)

    def run(self, number: int) -> Tensor:
        inputs, target = self.batch(number)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            output = self.model(inputs)
        loss: Tensor = self.loss(output.float(), target)
        return loss

    def train(self, steps: range) -> float:
        for number in steps:
            self.optimizer.zero_grad()
            loss = self.run(number)
            loss.backward()
            self.optimizer.step()
        return float(loss.detach())

    def gradients(self, number: int) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.run(number).backward()
        return {name: item.grad.double() for name, item in self.model.named_parameters() if item.grad is not None}


def pictures(batch: int, size: int, device: torch.device) -> Batch:
    """Ten smooth patterns under noise, shifted at random."""
    coarse = torch.randn(10, 3, max(size // 16, 2), max(size // 16, 2), device=device)
    patterns = F.interpolate(coarse, size=(size, size), mode="bicubic")

    def make(number: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator(device).manual_seed(number)
        target = torch.randint(0, 10, (batch,), generator=source, device=device)
        shift = int(torch.randint(0, size, (), generator=source, device=device))
        noise = torch.randn(batch, 3, size, size, generator=source, device=device)
        images = patterns[target].roll(shift, -1) + noise
        return images.contiguous(memory_format=torch.channels_last), target

    return make


def texts(batch: int, length: int, vocabulary: int, device: torch.device) -> Batch:
    """Each token determines the next one, in seven of ten cases."""
    follows = torch.randperm(vocabulary, device=device)

    def make(number: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator(device).manual_seed(number)
        tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=source, device=device)
        regular = torch.rand(batch, length, generator=source, device=device) < 0.7
        for place in range(length):
            after = follows[tokens[:, place]]
            tokens[:, place + 1] = torch.where(regular[:, place], after, tokens[:, place + 1])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return make


def others(bench: Bench) -> list[tuple[str, str]]:
    """Ops and fields, other than the inputs of convolutions and linear layers, whose values are stored."""
    with torch.no_grad():
        state = {name: item.clone() for name, item in bench.model.state_dict().items()}
    tide = lowtide.attach(bench.model, "fixed", min_size=0)
    bench.gradients(0)
    tide.detach()
    bench.model.load_state_dict(state)
    names = [entry.name.partition(":")[2].partition("#")[0] for entry in tide.report().sites if entry.need == "values"]
    pairs = {(name.partition(".")[0], name.partition(".")[2]) for name in names}
    return sorted(pair for pair in pairs if pair[0] not in LINEAR)


def square(parts: dict[str, Tensor]) -> float:
    return sum(float(part.square().sum()) for part in parts.values())


def lossy(
    bench: Bench, bounds: dict[str, Any], number: int, seeds: int, **options: Any
) -> tuple[dict[str, list[float]], list[float], lowtide.Session]:
    """Squared errors by parameter and in total, for each seed, under the given bounds."""
    exact = bench.gradients(number)
    by_name: dict[str, list[float]] = {name: [] for name in exact}
    total = []
    for seed in range(seeds):
        tide = lowtide.attach(bench.model, "budget", seed=seed, checks=0, min_size=0, **options)
        tide.controller._rules = dict(bounds)
        found = bench.gradients(number)
        for _ in range(2):
            tide.step()  # so that the statistics of this batch arrive
        tide.detach()
        for name, part in exact.items():
            by_name[name].append(float((found[name] - part).square().sum()))
        total.append(square({name: found[name] - part for name, part in exact.items()}) / square(exact))
    return by_name, total, tide


def measure(bench: Bench, noise: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    kept = others(bench)
    only_inputs = [{"op": op, "field": field, "keep": True} for op, field in kept]
    rule_sets = [only_inputs]
    if any(field == "output" for _, field in kept):
        rule_sets.append([rule for rule in only_inputs if rule["field"] != "output"])
    tide = lowtide.attach(bench.model, "budget", noise=noise, optimizer=bench.optimizer, period=2, checks=0, min_size=0)
    loss = bench.train(range(options.warm, options.warm + options.set))
    tide.detach()
    bounds, held = tide.controller._rules, tide.report().totals["ratio"]
    batch = options.warm + options.set + 1000
    exact = bench.gradients(batch)
    again = square({name: part - exact[name] for name, part in bench.gradients(batch).items()}) / square(exact)
    found: dict[str, tuple[Any, list[float]]] = {}
    for rules in rule_sets:
        errors, _, own = lossy(bench, bounds, batch, options.seeds, noise=noise, rules=rules)
        for site, figures in own.report().noise.items():
            name = f"{site.partition(':')[0]}.weight"
            if site not in found and figures.predicted is not None and name in exact:
                found[site] = figures, errors[name]
    _, total, _ = lossy(bench, bounds, batch, options.seeds, noise=noise)
    rows = []
    for site, (figures, squares) in found.items():
        name = f"{site.partition(':')[0]}.weight"
        energy = float(exact[name].square().sum())
        measured = statistics.mean(squares) / energy
        rows.append({
            "model": options.model,
            "precision": options.precision,
            "batch": options.batch,
            "loss": loss,
            "noise": noise,
            "site": site,
            "bound": str(bounds.get(site, "")),
            "share": figures.share,
            "predicted": figures.predicted,
            "measured": measured,
            "ratio": measured / figures.predicted,
            "energy": energy / square(exact),
            "total": statistics.mean(total),
            "total_min": min(total),
            "total_max": max(total),
            "held_less": held,
            "plain_rerun": again,
            "seeds": options.seeds,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if bench.device.type == "cuda" else "cpu",
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="resnet50", help="of the zoo: resnet18, resnet50, gpt, gpt2_small, ...")
    add("--batch", type=int, default=256)
    add("--size", type=int, default=224, help="of pictures, in pixels")
    add("--noise", type=float, nargs="+", default=[1e-3, 1e-2, 1e-1])
    add("--warm", type=int, default=60, help="steps of plain training")
    add("--set", type=int, default=20, help="steps in which bounds are set, an update every two of them")
    add("--seeds", type=int, default=4)
    add("--lr", type=float)
    add("--precision", choices=["tf32", "fp32", "bf16"], default="tf32")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--tiny", action="store_true", help="the smallest form of the model, to try this file")
    add("--out", type=Path, help="add the rows to this CSV file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    bench = Bench(options)
    print(f"{options.model}: loss {bench.train(range(options.warm)):.4f} after {options.warm} steps of plain training")
    rows = [row for noise in options.noise for row in measure(bench, noise, options)]
    shown = []
    for noise in options.noise:
        ratios = sorted(row["ratio"] for row in rows if row["noise"] == noise)
        one = next(row for row in rows if row["noise"] == noise)
        figures = (ratios[0], statistics.median(ratios), ratios[-1], one["total"], one["held_less"])
        shown.append((f"{noise:g}", str(len(ratios)), *(f"{figure:.3g}" for figure in figures)))
    heads = ("noise", "weights", "least", "median", "most", "total share", "held less")
    print("measured over predicted:")
    print("\n".join(table(heads, shown)))
    if options.out:
        is_new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            if is_new:
                writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
