"""Measure whole training steps: time, memory and cost on the host, methods side by side.

A method is plain, checkpoint, compile, a preset (bold: bounds of 1.0 std for conv, linear and norm inputs, 0.1 for
log-probabilities; careful: 0.4 std for all values, 0.05 for those) or a method of Lowtide, with options as in
bold:blocks or "fixed(linear=0.4 std, coder=rans)".
With graph=true, as in "plain(graph=true),bold(graph=true)", forward and backward are replayed as a CUDA graph; with
compile=true, as in "compile,bold(compile=true)", torch.compile has compiled the model. Plain is measured before and
after the others, whether it is named or not. Columns and conditions: docs/bench.md.
"""

from __future__ import annotations

import argparse
import gc
import traceback
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from lowtide.app.bench import meters, timing
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, explain, now
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.errors import LowtideError
from lowtide.reports.text import size, table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "options", "batch", "input", "precision", "channels_last", "method", "place", "optimizer", "seed"),
    *("warm", "repeats", "ok", "error", "loss", "step_ms", "step_ms_min", "step_ms_max", "unit", "units_per_s"),
    *("host_ms", "host_ms_min", "host_ms_max", "saves", "host_us_per_save", "static", "held", "peak"),
    *("held_requested", "peak_requested", "ledger_raw", "ledger_held", "waits"),
    *("step_x_first_plain", "held_x_less", "peak_x_less", "replays", "overflows"),
)
EXAMPLES = """examples:
  lowtide bench step resnet50 --batch 256 --precision tf32,bf16 \\
      --methods checkpoint,compile,bold,careful
  lowtide bench step gpt2_small --batch 8 --precision bf16 \\
      --methods "exact,fixed(linear=0.4 std,norm=0.2 std)"
  lowtide bench step resnet18 --tiny --device cpu --batch 8 \\
      --methods bold:blocks --out -
"""
_PLAIN = Variant("plain")
_GATE_STEPS = 2


class GateError(LowtideError):
    """A method gave a wrong result, so its speed is of no interest."""


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="a model of the zoo, as resnet50, or torchvision:NAME")
    add("--batch", type=int, default=32, help="samples in a batch (default: %(default)s)")
    add("--precision", default="tf32", help=f"of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--methods", default="checkpoint,bold,careful", help="what to compare with plain (default: %(default)s)")
    add("--repeats", type=int, default=10, help="timed steps, of which the median counts (default: %(default)s)")
    add("--warm", type=int, default=8, help="untimed steps before them (default: %(default)s)")
    add("--channels-last", action="store_true", help="channels_last for conv nets (in bf16 they are in any case)")
    add("--sync-check", action="store_true", help="one more step in which waiting for the device is an error")
    add("--profile", type=Path, metavar="PATH", help="write a profile of one more step of each method to PATH")
    arguments.add_model(parser)
    arguments.add_shared(parser, out="benchmarks/results/step.csv")


def run(options: argparse.Namespace) -> int:
    """All methods in all precisions; 0 if every gate was passed. Running out of memory is a result, not a failure."""
    arguments.require_positive(options, "batch", "repeats")
    bench = Bench.of(options)
    rows: list[dict[str, Any]] = []
    for precision in bench.precisions:
        with workload.applied(precision):
            rows += bench.compare(precision)
    print("\n".join(show(rows)))
    return 0 if all(row["ok"] or row["error"].startswith("out of memory") for row in rows) else 1


@dataclass(slots=True)
class Bench:
    """One command: what is compared, and where the rows go."""

    options: argparse.Namespace
    load: Workload
    variants: list[Variant]
    precisions: list[str]
    device: torch.device
    out: ResultFile
    environment: dict[str, str]
    plain_losses: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, options: argparse.Namespace) -> Bench:
        """Reads everything there is to read before any work is done."""
        device = arguments.find_device(options)
        precisions = specs.choose("precision", options.precision, workload.PRECISIONS)
        variants = [Variant.parse(text) for text in specs.split(options.methods)]
        load = workload.find_workload(options.model, specs.parse_options(options.set), tiny=options.tiny)
        out = ResultFile(arguments.find_out(options), COLUMNS).begin()
        if options.profile:
            options.profile.parent.mkdir(parents=True, exist_ok=True)
            options.profile.write_text("", encoding="utf-8")
        environment = describe_environment(device, options.revision)
        return cls(options, load, variants, precisions, device, out, environment)

    def compare(self, precision: str) -> list[dict[str, Any]]:
        """Plain, the others, plain again."""
        self.plain_losses = []
        others = [(variant, "") for variant in self.variants if variant.text != "plain"]
        order = [(_PLAIN, "first"), *others, (_PLAIN, "last")]
        rows: list[dict[str, Any]] = []
        for number, (variant, place) in enumerate(order, 1):
            title = f"{self.load.name}, batch {self.options.batch}, {precision}, {variant.text}"
            arguments.say(f"[{number}/{len(order)}] {title}: ", end="")
            row = {**self.environment, "date": now(), **self._describe(precision)}
            row |= {"method": variant.text, "place": place}
            row |= self._attempt(variant, precision, title)
            _relate(row, rows[0] if rows else row)
            self.out.append(row)
            rows.append(row)
            arguments.say(_progress(row))
            self._tidy_up(variant)
        return rows

    def _describe(self, precision: str) -> dict[str, Any]:
        given = [*(["tiny"] if self.options.tiny else []), *self.options.set]
        row = {"model": self.load.name, "options": " ".join(given), "precision": precision, "unit": self.load.unit}
        return row | {name: getattr(self.options, name) for name in ("batch", "seed", "warm", "repeats")}

    def _attempt(self, variant: Variant, precision: str, title: str) -> dict[str, Any]:
        """Results of a method, or its failure: one method does not end the run."""
        try:
            return {"ok": True, "error": "", **self._measure(variant, precision, title)}
        except torch.OutOfMemoryError as error:
            return {"ok": False, "error": f"out of memory: {explain(error)}"}
        except Exception as error:
            if self.options.traceback:
                traceback.print_exc()
            return {"ok": False, "error": explain(error)}

    def _measure(self, variant: Variant, precision: str, title: str) -> dict[str, Any]:
        task, options = self._start(precision), self.options
        row: dict[str, Any] = {"input": "x".join(map(str, task.inputs.shape)), "channels_last": task.channels_last}
        row["optimizer"] = type(task.optimizer).__name__
        variant.prepare(task)
        self._pass_gate(variant, task, precision)
        with variant.attached(task, seed=options.seed, warm=options.warm) as session:
            for _ in range(options.warm):
                task.step()
            with meters.replays(task) as counts:
                times = timing.interleave({"step": task.step}, self.device, repeats=options.repeats)["step"]
            row |= times.cells("step_ms") | counts
            row["units_per_s"] = 1e3 * task.items / times.median
            row |= meters.measure(task, session)
            row |= timing.time_host(task.step, self.device, repeats=options.repeats).cells("host_ms")
            row["loss"] = float(task.step())
            if options.profile:
                meters.write_profile(task, options.profile, title)
            if options.sync_check:
                row["waits"] = meters.check_waits(task)
        return row

    def _start(self, precision: str) -> Task:
        options = self.options
        return Task(self.load, precision, batch=options.batch, device=self.device, seed=options.seed,
                    channels_last=options.channels_last)  # fmt: skip

    def _pass_gate(self, variant: Variant, task: Task, precision: str) -> None:
        """The first steps: gradients are finite, promises are kept (``check``), ``exact`` has the losses of plain."""
        with variant.attached(task, seed=self.options.seed, check=True):
            losses = _take_steps(task)
        if variant.text == "plain" and not self.plain_losses:
            self.plain_losses = losses
            if any(other.is_exact for other in self.variants):
                again = _take_steps(self._start(precision))
                pairs = zip(losses, again, strict=True)
                self.plain_losses = [loss for loss, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        if variant.is_exact and losses[: len(self.plain_losses)] != self.plain_losses:
            raise GateError(f"gate: 'exact' has the losses {losses}, plain training {self.plain_losses}")

    def _tidy_up(self, variant: Variant) -> None:
        """Leave nothing of a method to the next one."""
        if variant.is_torchs_own:
            torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _take_steps(task: Task) -> list[float]:
    losses = []
    for _ in range(_GATE_STEPS):
        losses.append(float(task.step()))
        gradients = [parameter.grad for parameter in task.model.parameters() if parameter.grad is not None]
        if not gradients or not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise GateError(f"gate: gradients are {'not finite' if gradients else 'missing'} in step {len(losses)}")
    return losses


def _relate(row: dict[str, Any], plain: dict[str, Any]) -> None:
    """What a row is beside the first one, where both have the figures."""
    for name, ours, theirs in (
        ("step_x_first_plain", row.get("step_ms"), plain.get("step_ms")),
        ("held_x_less", plain.get("held"), row.get("held")),
        ("peak_x_less", plain.get("peak"), row.get("peak")),
    ):
        if ours and theirs:
            row[name] = ours / theirs
    if row.get("saves") and "host_ms" in plain:
        row["host_us_per_save"] = 1e3 * (row["host_ms"] - plain["host_ms"]) / row["saves"]


def show(rows: list[dict[str, Any]]) -> list[str]:
    """The table at the end: times are relative to the mean of the two plain medians of the same precision."""
    heads = ("method", "precision", "step ms", "x plain", "held", "x less", "peak", "x less", "ledger", "x less",
             "host ms", "us/save", "per s", "waits", "gate")  # fmt: skip
    plains: dict[str, list[float]] = {}
    for row in rows:
        if row["method"] == "plain" and row["ok"]:
            plains.setdefault(row["precision"], []).append(row["step_ms"])
    cells = []
    for row in rows:
        plain = plains.get(row["precision"])
        beside = row["step_ms"] * len(plain) / sum(plain) if row["ok"] and plain else None
        ledger = row["ledger_raw"] / row["ledger_held"] if row.get("ledger_held") else None
        cells.append((
            f"{row['method']} {row['place']}".rstrip(), row["precision"], _number(row.get("step_ms")), _times(beside),
            _size(row.get("held")), _times(row.get("held_x_less")), _size(row.get("peak")),
            _times(row.get("peak_x_less")), _size(row.get("ledger_held")), _times(ledger), _number(row.get("host_ms")),
            _number(row.get("host_us_per_save")), _number(row.get("units_per_s")), row.get("waits", "").split(":")[0],
            "ok" if row["ok"] else row["error"].split(":")[0],
        ))  # fmt: skip
    return table(heads, cells)


def _progress(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"FAILED, {row['error']}"
    beside = f", {row['step_x_first_plain']:.2f} x plain" if "step_x_first_plain" in row else ""
    return f"{row['step_ms']:.2f} ms ({row['step_ms_min']:.2f} to {row['step_ms_max']:.2f}){beside}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _size(value: int | None) -> str:
    return "" if value is None else size(value)
