"""What a saved tensor costs the host: Python and torch's own calls, with kernels that do nothing.

    PYTHONPATH=src python benchmarks/host.py [resnet50,vit_b_16,gpt] [--repeats 40] [--out benchmarks/results/host.csv]

A GPU's step is as long as the host takes to launch it, if the host takes longer than the device. This measures the
host's part anywhere, without a GPU: nets of real depth and tiny width run on the CPU, tensors go through the path that
they take on an NVIDIA GPU up to the launch, and what would be launched is nothing; an encoder says at once that its
payload fits. Five ways of training take turns, step by step: plain, with Lowtide, with Lowtide where every step has
another batch size, so that no geometry is that of the step before, and plain and with Lowtide once more where
torch.compile runs the model as a graph (backend aot_eager: the ops are the same ones). A save's cost is the difference
of medians over the tensors that are coded. It leaves out what only a device adds (the driver's launch, the allocator
of its memory). Gradients mean nothing here. Rows are appended to a CSV file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import statistics
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import lowtide
from lowtide import kernels
from lowtide.app import zoo
from lowtide.app.shared import arguments
from lowtide.app.shared.rows import ENVIRONMENT, ResultFile, describe_environment, now
from lowtide.app.shared.script import run_script
from lowtide.app.shared.specs import UsageError
from lowtide.kernels import _rows, _sz_cuda
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.reports.text import table

COLUMNS = (
    *ENVIRONMENT,
    *("model", "repeats", "saves", "plain_forward_ms", "plain_backward_ms", "forward_ms", "backward_ms"),
    *("us_a_save_forward", "us_a_save_backward", "us_a_save_other_sizes"),
    *("us_a_save_compiled_forward", "us_a_save_compiled_backward"),
)
# Real depth and tiny width; the second number is the samples of a batch.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "resnet50": ({"width": 8, "num_classes": 10}, 4),
    "vit_b_16": ({"image_size": 64, "width": 48, "num_classes": 10}, 8),
    "gpt": ({"vocab_size": 64, "context": 64, "depth": 12, "width": 48, "heads": 4}, 4),
}
_MIN_SIZE = 4096  # bytes, so that at these widths the same tensors are coded as at real ones
_BACKEND = "aot_eager"
_PARTS = ("forward", "backward", "other_sizes", "compiled_forward", "compiled_backward")
_TICKET = 80  # where the address of the report lies in what an encoder is given (Args in sz_args.cuh)


class _Decoder:
    def launch(self, grid: int, block: int, shared: int, given: bytes, stream: int) -> None:
        """Nothing is launched."""


class _Encoder:
    def launch(self, grid: int, block: int, shared: int, given: bytes, stream: int) -> None:
        (at,) = struct.unpack_from("<Q", given, _TICKET)
        ctypes.c_int64.from_address(at).value = 64  # words that the payload took


@contextlib.contextmanager
def launched_into_nothing() -> Iterator[None]:
    """Inside, tensors of a CPU are taken for a GPU's by ``sz``, and its kernels do nothing."""
    encoder, decoder, twin = _Encoder(), _Decoder(), kernels.twin

    def function(kernel: str, *given: Any, **options: Any) -> _Encoder | _Decoder:
        return encoder if "encode" in kernel else decoder

    def find_twin(codec: Any, *like: Any) -> Any:
        return SzCuda.of(codec) if codec.name == "sz" else twin(codec, *like)

    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in (
            (kernels, "twin", find_twin),
            (_sz_cuda, "_function", function),
            (_sz_cuda, "current_stream", lambda device: 0),
            (_sz_cuda, "_processors", lambda device: 132),
            (_sz_cuda, "_SMALL", 0),  # small tensors stand for large ones
            (_sz_cuda, "missing", lambda *given, **options: []),
            (_rows, "_function", lambda *given: decoder),
            (_rows, "current_stream", lambda device: 0),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        yield


class Trainee:
    """A model, with Lowtide or without, whose steps are timed."""

    def __init__(self, name: str, *, attached: bool, compiled: bool = False) -> None:
        options, self._batch = MODELS[name]
        torch.manual_seed(0)
        self.model: nn.Module = zoo.build(name, **options)
        self._is_text = "vocab_size" in options
        self._size = options.get("context") or options.get("image_size", 64)
        self.times: list[tuple[float, float]] = []
        self.tide = lowtide.attach(
            self.model, "fixed", linear="1.0 std", norm="1.0 std", coder="rans", min_size=_MIN_SIZE, refresh=1 << 30
        ) if attached else None  # fmt: skip
        if compiled:
            (self.tide or self.model).compile(backend=_BACKEND, fullgraph=True)

    def _input(self, batch: int) -> Tensor:
        if self._is_text:
            return torch.randint(0, 64, (batch, self._size))
        return torch.randn(batch, 3, self._size, self._size)

    def step(self, more: int = 0) -> None:
        """One step, with ``more`` samples than usual."""
        x = self._input(self._batch + more)
        begin = time.perf_counter()
        loss = self.model(x).square().mean()
        middle = time.perf_counter()
        loss.backward()
        self.times.append((middle - begin, time.perf_counter() - middle))
        self.model.zero_grad()
        if self.tide is not None:
            self.tide.step()

    def medians(self) -> tuple[float, float]:
        """Seconds of forward and of backward."""
        forward, backward = zip(*self.times, strict=True)
        return statistics.median(forward), statistics.median(backward)


def measure(name: str, repeats: int, warm: int = 12) -> dict[str, Any]:
    with launched_into_nothing():
        plain, steady, changing = (Trainee(name, attached=attached) for attached in (False, True, True))
        graph, held_in_graph = (Trainee(name, attached=attached, compiled=True) for attached in (False, True))
        for number in range(warm + repeats):
            if number == warm:
                for trainee in (plain, steady, changing, graph, held_in_graph):
                    trainee.times.clear()
            for trainee in (plain, steady, graph, held_in_graph):
                trainee.step()
            changing.step(number % 3)
        assert steady.tide is not None
        sites = steady.tide.ledger.sites.values()
        saves = sum(site.saves for site in sites if site.codec == "sz")
        if not saves:
            raise UsageError(f"{name}: no tensor was coded")
        for trainee in (steady, changing, held_in_graph):
            assert trainee.tide is not None
            trainee.tide.detach()
    (before, after), (forward, backward), others = plain.medians(), steady.medians(), changing.medians()
    compiled = [ours - theirs for ours, theirs in zip(held_in_graph.medians(), graph.medians(), strict=True)]
    return {
        "model": name,
        "repeats": repeats,
        "saves": saves,
        "plain_forward_ms": 1e3 * before,
        "plain_backward_ms": 1e3 * after,
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * backward,
        "us_a_save_forward": 1e6 * (forward - before) / saves,
        "us_a_save_backward": 1e6 * (backward - after) / saves,
        "us_a_save_other_sizes": 1e6 * (sum(others) - before - after) / saves,
        "us_a_save_compiled_forward": 1e6 * compiled[0] / saves,
        "us_a_save_compiled_backward": 1e6 * compiled[1] / saves,
    }


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="?", default=",".join(MODELS), help="of %(default)s")
    add("--repeats", type=int, default=40, help="steps that count, of each way (default: %(default)s)")
    arguments.add_output(parser, out="benchmarks/results/host.csv")


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    arguments.require_positive(options, "repeats")
    names = options.models.split(",")
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise UsageError(f"{', '.join(unknown)}: not a model that is measured here; known: {', '.join(MODELS)}")
    out = ResultFile(arguments.find_out(options), COLUMNS).begin()
    torch.set_num_threads(1)
    shared = describe_environment(torch.device("cpu"), options.revision)
    rows = []
    for name in names:
        row = {**shared, "date": now(), **measure(name, options.repeats)}
        out.append(row)
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> list[str]:
    heads = ("model", "saves", "plain, ms", "with Lowtide, ms", "forward, us a save", "backward", "both, other sizes")
    heads = (*heads, "compiled: forward", "backward")
    cells = []
    for row in rows:
        plain, ours = (f"{row[f'{way}forward_ms']:.1f} + {row[f'{way}backward_ms']:.1f}" for way in ("plain_", ""))
        costs = [f"{row[f'us_a_save_{part}']:.0f}" for part in _PARTS]
        cells.append((row["model"], str(row["saves"]), plain, ours, *costs))
    return list(table(heads, cells))


if __name__ == "__main__":
    sys.exit(run_script(__doc__, configure, run, show))
