"""Every method on one model: memory held, peak, step time, and the noise it adds to gradients beside SGD's own.

    PYTHONPATH=src python benchmarks/methods.py resnet50 --batch 256 --precision tf32,bf16 --plot methods.svg
    PYTHONPATH=src python benchmarks/methods.py resnet18 --tiny --device cpu --batch 8 --methods division,gact
    PYTHONPATH=src python benchmarks/methods.py resnet50 --precision tf32 --rows benchmarks/results/methods.csv

Time and memory are measured as by ``lowtide bench step`` (docs/bench.md), plain training first, and after one step in
which promises are checked. Noise is measured at the weights that a method has trained to by then, over ``--batches``
new batches: for each, the gradient with the method attached, and the one without it.
- ``noise`` is the mean of |g' - g|^2 over the batches, g' and g the gradients of all parameters with and without;
- ``sgd_noise`` is the variance of g from batch to batch, sum of |g - mean|^2 / (batches - 1);
- ``noise_share`` is their ratio: 0.1 adds as much as a batch that is a tenth smaller;
- ``floor_share`` is that of plain training against itself, which comes first: what the device does not repeat.
With graph=true, as in "division(graph=true)", time and peak are those of a step that is replayed as a CUDA graph, and
noise is that of eager steps.
A method whose first step takes longer than ``--patience`` is left out, with a message and a row. Dropout draws the same
masks each time. Methods that set themselves get ``--warm`` steps to do so; the default methods are all of them, with
periods short enough for that. Rows are appended to a CSV file; with ``--rows`` nothing is measured, and the newest row
of each method in such a file is shown, and drawn with ``--plot``.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.app.bench import meters, timing
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import attempt, run_script
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.errors import LowtideError
from lowtide.registry import METHODS
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "input", "precision", "channels_last", "method", "optimizer", "seed", "warm"),
    *("repeats", "batches", "ok", "error", "loss", "step_ms", "step_ms_min", "step_ms_max", "static", "held", "peak"),
    *("held_requested", "peak_requested", "ledger_raw", "ledger_held", "saves", "step_x_plain", "held_x_less"),
    *("peak_x_less", "ledger_x_less", "gradient", "sgd_noise", "noise", "noise_share", "floor_share"),
)
# Methods that learn from statistics do so every few steps here, not every hundred or thousand.
SHORT_PERIODS = {"acgc": 8, "actnn": 8, "budget": 8, "comet": 8, "gact": 8}


class Impatience(LowtideError):
    """A method is too slow to be measured in the time that there is."""


def default_methods() -> list[str]:
    return [f"{name}(period={SHORT_PERIODS[name]})" if name in SHORT_PERIODS else name for name in METHODS.names()]


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", default="resnet50", help="a model of the zoo, or torchvision:NAME (default: %(default)s)")
    add("--batch", type=int, default=256, help="samples in a batch (default: %(default)s)")
    add("--precision", default="tf32", help=f"of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--methods", default=",".join(default_methods()), help="as for lowtide bench step (default: all)")
    add("--batches", type=int, default=6, help="to measure noise on, 2 or more (default: %(default)s)")
    add("--patience", type=float, default=30, metavar="SECONDS", help="for a first step (default: %(default)s)")
    add("--repeats", type=int, default=10, help="timed steps, of which the median counts (default: %(default)s)")
    add("--warm", type=int, default=18, help="untimed steps before them (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    add("--plot", type=Path, metavar="PATH", help="draw memory against noise into an SVG file")
    add("--rows", type=Path, metavar="PATH", help="show the newest rows of a file instead of measuring")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/methods.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each method in each precision."""
    rows = measure_all(options) if options.rows is None else newest(options)
    print("\n".join(show(rows)))
    if options.plot:
        options.plot.write_text(draw(rows), encoding="utf-8")
    return rows


def newest(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The last row of each method that went well, for the model, the batch and the precisions that are asked for."""
    precisions = specs.choose("precision", options.precision, workload.PRECISIONS)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    try:
        with options.rows.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise specs.UsageError(f"no rows can be read from {options.rows}: {error.strerror}") from None
    for row in rows:
        is_asked_for = row["model"] == options.model and row["batch"] == str(options.batch) and row["ok"] == "True"
        if is_asked_for and row["precision"] in precisions:
            found.pop((row["precision"], row["method"]), None)
            found[row["precision"], row["method"]] = {name: as_number(cell) for name, cell in row.items() if cell}
    if not found:
        raise specs.UsageError(f"{options.rows} has no row of {options.model}, batch {options.batch}")
    return sorted(found.values(), key=lambda row: (precisions.index(row["precision"]), row.get("noise_share", 0.0)))


def as_number(cell: str) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "batch", "repeats")
    if options.batches < 2:
        raise specs.UsageError(f"noise from batch to batch needs 2 or more --batches, got {options.batches}")
    device = arguments.find_device(options)
    precisions = specs.choose("precision", options.precision, workload.PRECISIONS)
    texts = [text for text in specs.split(options.methods) if text != "plain"]
    variants = [Variant.parse(text) for text in ["plain", *texts]]
    load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    environment = describe_environment(device, options.revision)
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        plain: dict[str, Any] = {}
        for variant in variants:
            arguments.say(f"{load.name}, batch {options.batch}, {precision}, {variant.text}: ", end="")
            with workload.applied(precision):
                row = {**environment, "date": now(), **describe(load, variant, precision, options)}
                row |= attempt(try_method(load, variant, precision, device, options), options)
            plain = plain or row
            relate(row, plain)
            out.append(row)
            rows.append(row)
            arguments.say(progress(row))
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return rows


def describe(load: Workload, variant: Variant, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    given = [*(["tiny"] if options.tiny else []), *options.set]
    row = {"model": load.name, "options": " ".join(given), "precision": precision, "method": variant.text}
    return row | {name: getattr(options, name) for name in ("batch", "seed", "warm", "repeats", "batches")}


def try_method(
    load: Workload, variant: Variant, precision: str, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Being left out is a result, too."""
    try:
        yield from measure(load, variant, precision, device, options)
    except Impatience as error:
        yield {"ok": False, "error": f"skipped: {error}"}


def measure(
    load: Workload, variant: Variant, precision: str, device: torch.device, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    task = Task(load, precision, batch=options.batch, device=device, seed=options.seed,
                channels_last=options.channels_last)  # fmt: skip
    variant.prepare(task)
    yield {"input": "x".join(map(str, task.inputs.shape)), "channels_last": task.channels_last}
    yield {"optimizer": type(task.optimizer).__name__}
    with variant.attached(task, seed=options.seed, check=True):  # the gate: promises are kept
        first_step(task, options.patience)
    with variant.attached(task, seed=options.seed, warm=options.warm) as session:
        for _ in range(options.warm):
            task.step()
        yield timing.interleave({"step": task.step}, device, repeats=options.repeats)["step"].cells("step_ms")
        yield meters.measure(task, session)
        loss = float(task.step())
        yield {"loss": loss}
        if not math.isfinite(loss):
            raise LowtideError(f"the loss is {loss} after {options.warm + options.repeats + 2} steps")
        batches = [task.draw() for _ in range(options.batches)]
        lossy = [gradient(task, batch, number) for number, batch in enumerate(batches)]
    yield compare(task, batches, lossy)


def first_step(task: Task, patience: float) -> None:
    """A step, kernels compiled and all, or Impatience after its forward or its backward."""
    began = time.perf_counter()
    task.optimizer.zero_grad(set_to_none=True)
    loss = task.loss()
    _require_patience(task, began, patience, "forward")
    loss.backward()
    _require_patience(task, began, patience, "step")
    task.optimizer.step()


def _require_patience(task: Task, began: float, patience: float, part: str) -> None:
    timing.synchronize(task.device)
    elapsed = time.perf_counter() - began
    if elapsed > patience:
        raise Impatience(f"its first {part} took {elapsed:.0f} s, --patience is {patience:g}")


def gradient(task: Task, batch: tuple[Tensor, Tensor], number: int) -> list[Tensor]:
    """Of all parameters, at the weights as they are; the same random numbers for the same batch."""
    torch.manual_seed(number)
    task.inputs, task.target = batch
    task.optimizer.zero_grad(set_to_none=True)
    task.loss().backward()
    return [parameter.grad.detach() for parameter in task.model.parameters() if parameter.grad is not None]


def compare(task: Task, batches: list[tuple[Tensor, Tensor]], lossy: list[list[Tensor]]) -> dict[str, Any]:
    """Noise, of which gradients without the method are the measure."""
    plain = [gradient(task, batch, number) for number, batch in enumerate(batches)]
    mean = [torch.stack(parts).mean(0) for parts in zip(*plain, strict=True)]
    between = sum(distance(each, mean) for each in plain) / (len(plain) - 1)
    noise = sum(map(distance, lossy, plain)) / len(plain)
    return {
        "gradient": sum(float(part.double().square().sum()) for part in mean),
        "sgd_noise": between,
        "noise": noise,
        "noise_share": noise / between,
    }


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return sum(float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True))


def relate(row: dict[str, Any], plain: dict[str, Any]) -> None:
    if "noise_share" in plain:
        row["floor_share"] = plain["noise_share"]
    for name, ours, theirs in (
        ("step_x_plain", row.get("step_ms"), plain.get("step_ms")),
        ("held_x_less", plain.get("held"), row.get("held")),
        ("peak_x_less", plain.get("peak"), row.get("peak")),
        ("ledger_x_less", row.get("ledger_raw"), row.get("ledger_held")),
    ):
        if ours and theirs:
            row[name] = ours / theirs


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("method", "precision", "step ms", "x plain", "held", "x less", "peak", "x less", "ledger x less",
             "noise / SGD's", "floor", "result")  # fmt: skip
    cells = []
    for row in rows:
        cells.append((
            row["method"], row["precision"], number(row.get("step_ms")), number(row.get("step_x_plain")),
            amount(row.get("held")), number(row.get("held_x_less")), amount(row.get("peak")),
            number(row.get("peak_x_less")), number(row.get("ledger_x_less")), number(row.get("noise_share")),
            number(row.get("floor_share")), "ok" if row["ok"] else row["error"],
        ))  # fmt: skip
    return table(heads, cells)


def progress(row: dict[str, Any]) -> str:
    return f"{row['step_ms']:.2f} ms, noise {row['noise_share']:.3g} of SGD's" if row["ok"] else row["error"]


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def amount(value: int | None) -> str:
    return "" if value is None else size(value)


Box = tuple[float, float, float, float]  # left, top, right, bottom
LINE = 15.0  # of text


def find_place(x: float, y: float, length: float, width: float, taken: list[Box]) -> Box:
    """For the name of the point (x, y): beside it, or as far above or below as others leave room."""
    for rows in range(40):
        for up in (rows, -rows):
            for left in (x + 7, x - 7 - length):
                bottom = y + 5 - up * LINE
                box = (left, bottom - LINE, left + length, bottom)
                if 0 <= left <= width - length and not any(overlaps(box, other) for other in taken):
                    return box
    return (x + 7, y + 5 - LINE, x + 7 + length, y + 5)


def overlaps(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def draw(rows: list[dict[str, Any]]) -> str:
    """Ratio of the ledger against added noise, both on logarithmic axes, a point for each method."""
    several = len({row["precision"] for row in rows}) > 1
    points = [
        (row["noise_share"], row["ledger_x_less"], row["method"] + (f" {row['precision']}" if several else ""))
        for row in rows
        if row.get("noise_share") and row.get("ledger_x_less")
    ]
    width, height, margin = 860, 520, 60
    xs = [math.log10(max(x, 1e-9)) for x, _, _ in points] or [-3.0, 0.0]
    ys = [math.log10(y) for _, y, _ in points] or [0.0, 1.0]
    left, right = math.floor(min(xs)), math.ceil(max(xs) + 0.1)
    bottom, top = 0, math.ceil(max(ys) + 0.01)

    def across(x: float) -> float:
        return margin + (x - left) / (right - left) * (width - 2 * margin)

    def up(y: float) -> float:
        return height - margin - (y - bottom) / (top - bottom) * (height - 2 * margin)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
             'font-size="12"><rect width="100%" height="100%" fill="white"/>']  # fmt: skip
    for power in range(left, right + 1):
        x = across(power)
        parts.append(f'<path d="M{x:.1f} {margin}V{height - margin}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - margin + 18}" text-anchor="middle">1e{power}</text>')
    for ratio in (1, 2, 5, 10, 20, 50, 100):
        if math.log10(ratio) <= top:
            y = up(math.log10(ratio))
            parts.append(f'<path d="M{margin} {y:.1f}H{width - margin}" stroke="#ddd"/>')
            parts.append(f'<text x="{margin - 8}" y="{y + 4:.1f}" text-anchor="end">{ratio}x</text>')
    places = [(across(x), up(y)) for x, y in zip(xs, ys, strict=True)]
    placed: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    for (_, _, name), at in zip(points, places, strict=False):
        box = find_place(*at, 6.6 * len(name), width, placed)
        placed.append(box)
        parts.append(f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="4" fill="#06c"/>')
        middle = (box[0] + box[2]) / 2 if box[0] < at[0] < box[2] else box[0] if box[0] > at[0] else box[2]
        if abs(box[3] - at[1]) > LINE:
            parts.append(f'<path d="M{at[0]:.1f} {at[1]:.1f}L{middle:.1f} {box[3] - 4:.1f}" stroke="#999"/>')
        parts.append(f'<text x="{box[0]:.1f}" y="{box[3] - 3:.1f}">{escape(name)}</text>')
    parts.append(
        f'<text x="{width / 2}" y="{height - 14}" text-anchor="middle">added gradient noise / SGD\'s own</text>'
    )
    parts.append(f'<text x="14" y="{margin - 20}">times less held for backward</text></svg>')
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, is_fine=lambda row: row["ok"] or row["error"].startswith("skipped")))
