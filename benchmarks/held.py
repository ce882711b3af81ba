"""ResNet-50 on a GPU with fixed bounds: does the ledger agree with the allocator, and the gradient with theory?

    PYTHONPATH=src python benchmarks/held.py [--batch 256] [--out benchmarks/results/held.csv]

Bounds: conv and linear inputs 1.0 times the standard deviation of the tensor's non-zeros, norm inputs 1.0 times the
channel's; masks exact; coder ``blocks``. For TF32 and for bf16 autocast with channels_last:
- held: bytes allocated between forward and backward above what was allocated before, plain and with Lowtide, against
  the ledger's own count;
- conv noise: with norm inputs kept, the squared error of every conv weight's gradient over its prediction
  step^2 / 12 * S, S the sum over windows of |gY|^2 times the number of non-zero inputs (docs/dataflow.md, rule 8);
- all noise: with everything lossy, the squared gradient error as a share of the gradient's energy, and the same for the
  mean of several dither seeds, which unbiased noise divides by their number.
Data: smooth random images; the net has taken some SGD steps, so it is not at its initial weights.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.app.shared.script import run_script
from lowtide.bounds import BoundRule
from lowtide.codecs import create
from lowtide.records import Kind, Need, TensorSpec
from lowtide.reports.text import table

BOUNDS = {"linear": "1.0 std", "norm": "1.0 std"}
KEEP_NORMS = [lowtide.Rule(op="*batch_norm*", keep=True)]


class Bench:
    """A ResNet-50 in training, and a fixed batch to measure on."""

    def __init__(self, batch: int, size: int, amp: bool, warm_steps: int) -> None:
        torch.manual_seed(0)
        self.amp = amp
        memory_format = torch.channels_last if amp else torch.contiguous_format
        self.model = zoo.build("resnet50").cuda().to(memory_format=memory_format)
        coarse = torch.randn(batch, 3, size // 8, size // 8, device="cuda")
        self.images = F.interpolate(coarse, size=(size, size), mode="bicubic").contiguous(memory_format=memory_format)
        self.labels = torch.randint(0, 1000, (batch,), device="cuda")
        optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        for _ in range(warm_steps):
            self.loss(self.forward()).backward()
            optimizer.step()
            optimizer.zero_grad()

    def forward(self) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.amp):
            logits: Tensor = self.model(self.images)
        return logits

    def loss(self, logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), self.labels)

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.loss(self.forward()).backward()
        return {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}

    def held(self) -> tuple[int, int]:
        """Bytes above the static state between forward and backward, and the peak above it."""
        self.model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        logits = self.forward()
        between = torch.cuda.memory_allocated() - before
        self.loss(logits).backward()
        return between, torch.cuda.max_memory_allocated() - before

    def step_ms(self) -> list[float]:
        """Milliseconds of forward and backward, sorted: ten of them after three to warm up."""
        times = []
        for _ in range(13):
            self.model.zero_grad()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            self.loss(self.forward()).backward()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return sorted(times[3:])


def predicted_conv_noise(bench: Bench) -> dict[str, float]:
    """step^2 / 12 * S for every conv but the first (whose input is the model's own and is kept)."""
    need = Need(Kind.VALUES, "", family="linear")
    rule, codec = BoundRule.parse(BOUNDS["linear"]), create("sz")
    predicted: dict[str, float] = {}
    handles = []

    def watch(name: str, conv: nn.Conv2d) -> Callable[..., None]:
        def on_forward(module: nn.Module, args: Any, output: Tensor) -> None:
            x = args[0].detach().to(output.dtype)
            step = float(codec.step(rule.resolve(x, need), TensorSpec.of(x)))  # type: ignore[attr-defined]
            nonzero = (x != 0).sum(1, keepdim=True).float()
            ones = torch.ones(1, 1, *conv.kernel_size, device="cuda")
            taps = F.conv2d(nonzero, ones, None, conv.stride, conv.padding, conv.dilation)

            def on_gradient(grad: Tensor) -> None:
                energy = grad.double().square().sum(1, keepdim=True)
                predicted[f"{name}.weight"] = step**2 / 12 * float((energy * taps).sum())

            output.register_hook(on_gradient)

        return on_forward

    for name, module in bench.model.named_modules():
        if isinstance(module, nn.Conv2d) and name != "conv1":
            handles.append(module.register_forward_hook(watch(name, module)))
    bench.gradients()
    for handle in handles:
        handle.remove()
    return predicted


def squared(error: dict[str, Tensor]) -> float:
    return sum(float(part.square().sum()) for part in error.values())


def measure(batch: int, size: int, amp: bool, seeds: int) -> dict[str, Any]:
    bench = Bench(batch, size, amp, warm_steps=20)
    plain_held, plain_peak = bench.held()
    plain_ms = bench.step_ms()
    exact = bench.gradients()
    noise_floor = squared({name: part - exact[name] for name, part in bench.gradients().items()}) / squared(exact)

    predicted = predicted_conv_noise(bench)
    with_convs = lowtide.attach(bench.model, "fixed", **BOUNDS, rules=KEEP_NORMS)
    lossy = bench.gradients()
    with_convs.detach()
    ratios = torch.tensor(
        [float((lossy[name] - exact[name]).square().sum()) / noise for name, noise in predicted.items()]
    )

    shares, mean = [], {name: torch.zeros_like(part) for name, part in exact.items()}
    for seed in range(seeds):
        tide = lowtide.attach(bench.model, "fixed", **BOUNDS, seed=seed)
        lossy = bench.gradients()
        assert all(bool(part.isfinite().all()) for part in lossy.values()), "gradients are not finite"
        error = {name: lossy[name] - exact[name] for name in exact}
        shares.append(squared(error) / squared(exact))
        for name in mean:
            mean[name] += error[name] / seeds
        tide.detach()
    share = sum(shares) / len(shares)

    tide = lowtide.attach(bench.model, "fixed", **BOUNDS)
    bench.gradients()
    bench.model.zero_grad()
    logits = bench.forward()
    ledger_held, ledger_raw = tide.ledger.held, tide.ledger.raw
    del logits
    held, peak = bench.held()
    coded_ms = bench.step_ms()
    tide.detach()
    return {
        "model": "resnet50",
        "batch": batch,
        "precision": "bf16 channels_last" if amp else "tf32",
        "plain_held": plain_held,
        "ledger_raw": ledger_raw,
        "held": held,
        "ledger_held": ledger_held,
        "ratio": plain_held / held,
        "plain_peak": plain_peak,
        "peak": peak,
        "plain_ms": statistics.median(plain_ms),
        "plain_ms_min": plain_ms[0],
        "plain_ms_max": plain_ms[-1],
        "step_ms": statistics.median(coded_ms),
        "step_ms_min": coded_ms[0],
        "step_ms_max": coded_ms[-1],
        "conv_noise_over_prediction_min": float(ratios.min()),
        "conv_noise_over_prediction_median": float(ratios.median()),
        "conv_noise_over_prediction_max": float(ratios.max()),
        "gradient_noise_share": share,
        "mean_of_seeds_times_seeds_over_share": squared(mean) / squared(exact) * seeds / share,
        "seeds": seeds,
        "plain_rerun_share": noise_floor,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="write the rows as CSV")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each precision."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    rows = [measure(options.batch, options.size, amp, options.seeds) for amp in (False, True)]
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return rows


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("", *(row["precision"] for row in rows))
    names = [name for name in rows[0] if name not in ("precision", "model", "torch", "device")]
    return table(heads, [(name, *(_cell(name, row[name]) for row in rows)) for name in names])


def _cell(name: str, value: Any) -> str:
    if name in ("plain_held", "ledger_raw", "held", "ledger_held", "plain_peak", "peak"):
        return f"{value / 2**30:.3f} GiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
