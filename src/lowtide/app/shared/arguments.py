"""The arguments that all benchmarks share, and what they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from lowtide.app.shared.specs import UsageError


def add_shared(parser: argparse.ArgumentParser, *, out: str) -> None:
    group = parser.add_argument_group("where and how")
    group.add_argument("--device", help="cuda, cuda:1 or cpu (default: cuda if there is one)")
    group.add_argument("--seed", type=int, default=0, help="of weights, data and dither (default: 0)")
    add_output(group, out=out)


def add_output(group: argparse._ActionsContainer, *, out: str) -> None:
    """What also those benchmarks have that run on a CPU only."""
    group.add_argument(
        "--out", default=out, help="CSV file that rows are appended to, - for none (default: %(default)s)"
    )
    group.add_argument("--revision", help="what to note as the revision (default: the commit of the sources)")
    group.add_argument("--traceback", action="store_true", help="show where an error came from")


def add_model(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--tiny", action="store_true", help="build the zoo model at its test size")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the model or of its data, as image_size=160 (may be repeated)",
    )


def add_data(
    parser: argparse.ArgumentParser,
    *,
    model: str,
    batch: int,
    steps: int | None = None,
    epochs: int | None = None,
    example: str,
) -> None:
    """What trains on what, and for how long: so many steps, or epochs."""
    add = parser.add_argument
    add("model", nargs="?", default=model, help="a model of the zoo (default: %(default)s)")
    add("--data", default="digits", help="digits, cifar10:PATH, text:PATH, ... (default: %(default)s)")
    add(
        "--data-set", action="append", default=[], metavar="KEY=VALUE",
        help=f"an option of the data set, as {example} (may be repeated)",
    )  # fmt: skip
    add("--batch", type=int, default=batch, help="samples in a batch (default: %(default)s)")
    for unit, count in (("steps", steps), ("epochs", epochs)):
        if count is not None:
            add(f"--{unit}", type=int, default=count, help="to train (default: %(default)s)")


def find_device(options: argparse.Namespace) -> torch.device:
    """The device that was asked for, made the current one."""
    text = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError:
        raise UsageError(f"cannot read {text!r} as a device; write cuda, cuda:0 or cpu") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"benchmarks run on cuda or cpu, not on {text!r}")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageError("there is no CUDA device here; use --device cpu")
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device.index >= torch.cuda.device_count():
            raise UsageError(f"there is no {text}; this machine has {torch.cuda.device_count()} CUDA devices")
        torch.cuda.set_device(device)
    return device


def find_out(options: argparse.Namespace) -> Path | None:
    return None if options.out == "-" else Path(options.out)


def require_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} has to be at least 1, got {getattr(options, name)}")


def say(text: str, end: str = "\n") -> None:
    """Progress, for people: to stderr."""
    print(text, end=end, file=sys.stderr, flush=True)
