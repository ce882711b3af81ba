"""Tell what a model will hold for backward before it is trained.

The step is run on fake tensors, which have shapes but no values: nothing is allocated and no GPU is needed. What a
method makes of the values is measured by a probe, a few real steps with a small batch, on a GPU if there is one.

MODEL is one of the zoo (resnet50), torchvision:NAME, timm:NAME, hf:NAME, or PATH.py:FUNCTION of your own.
docs/choosing.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from lowtide.app.plan import probe
from lowtide.app.plan.dryrun import OPTIMIZERS, Conditions, DryRun
from lowtide.app.plan.estimate import HEADROOM, Estimate, estimate, layers, shares
from lowtide.app.plan.probe import Probe
from lowtide.app.plan.subject import find_subject, parse_shape
from lowtide.app.shared import arguments, specs, workload
from lowtide.app.shared.specs import UsageError
from lowtide.app.shared.variants import OTHERS, Variant
from lowtide.errors import UnknownNameError
from lowtide.reports.text import size, table
from lowtide.session import DEFAULT_METHOD

EXAMPLES = """examples:
  lowtide plan resnet50 --batch 256 --precision bf16 --memory 16GiB
  lowtide plan vit_b_16 --batch 64 --methods exact,bold --layers 20
  lowtide plan mynet.py:build --input 3x128x128 --classes 102 --batch 32
"""
_DEVICES = ("cuda", "cpu")
_READS = {"mask": "which branch", "window": "place in a window", "metadata": "the shape only", "exact": "everything"}
_NOTABLE = 0.01  # share of the bytes


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="what to train")
    add("--batch", type=int, default=32, help="samples in a batch (default: %(default)s)")
    add("--memory", metavar="SIZE", help="what there is, as 16GiB: tells what fits, and the largest batch")
    add("--methods", default=f"exact,{DEFAULT_METHOD}", help="beside plain (default: %(default)s); none: no probe")
    add("--precision", default="tf32", help=f"one of {', '.join(workload.PRECISIONS)} (default: %(default)s)")
    add("--channels-last", action="store_true", help="for conv nets (in bf16 they are in any case)")
    chosen = "adamw for models with layer norms or embeddings, else sgd"
    add("--optimizer", help=f"one of {', '.join(OPTIMIZERS)} (default: {chosen})")
    add("--device", default="cuda", help="where it will be trained, cuda or cpu (default: %(default)s)")
    add("--layers", type=int, default=10, metavar="N", help="show the N largest sites (default: %(default)s)")
    add("--json", action="store_true", help="print everything as JSON")
    group = parser.add_argument_group("the model")
    arguments.add_model(group)
    group.add_argument("--input", metavar="SHAPE", help="of a sample, as 3x224x224; 1024 is as many tokens")
    group.add_argument("--classes", type=int, help="how many, or the size of the vocabulary (default: 1000)")
    group = parser.add_argument_group("the probe")
    group.add_argument("--probe-device", metavar="DEVICE", help="cuda or cpu (default: cuda if there is one)")
    group.add_argument("--probe-steps", type=int, default=2, metavar="N", help="training steps (default: %(default)s)")
    add("--traceback", action="store_true", help="show where an error came from")


def run(options: argparse.Namespace) -> int:
    arguments.require_positive(options, "batch")
    conditions = _conditions(options)
    variants = _variants(options.methods)
    memory = specs.parse_bytes(options.memory) if options.memory else None
    shape = parse_shape(options.input) if options.input else None
    given = specs.parse_options(options.set)
    load = find_subject(options.model, given, tiny=options.tiny, shape=shape, classes=options.classes)
    where = arguments.find_device(argparse.Namespace(device=options.probe_device))
    dry = DryRun(load, conditions)
    found = [estimate(dry, "plain", options.batch, memory=memory)]
    probes: list[Probe] = []
    for variant in variants:
        arguments.say(f"probing {variant.text} on {where.type} ...")
        probes.append(probe.measure(load, variant, dry, conditions, device=where, steps=options.probe_steps))
        found.append(estimate(dry, variant.text, options.batch, rates=probes[-1].rates, memory=memory))
    show = _show_json if options.json else _show
    print(show(options, dry, conditions, found, probes))
    return 0


def _conditions(options: argparse.Namespace) -> Conditions:
    for kind, name, known in (
        ("device", options.device, _DEVICES),
        ("precision", options.precision, workload.PRECISIONS),
        ("optimizer", options.optimizer or "sgd", OPTIMIZERS),
    ):
        if name not in known:
            raise UnknownNameError(kind, name, known)
    return Conditions(options.device, options.precision, options.channels_last, options.optimizer)


def _variants(text: str) -> list[Variant]:
    variants = [Variant.parse(part) for part in specs.split(text) if part not in ("plain", "none")]
    for variant in variants:
        if not variant.method:
            ours = ", ".join(other for other in OTHERS if other != "plain")
            raise UsageError(
                f"plan knows Lowtide's methods; {variant.text!r} is measured by lowtide bench step ({ours})"
            )
    return variants


def _show(
    options: argparse.Namespace,
    dry: DryRun,
    conditions: Conditions,
    found: Sequence[Estimate],
    probes: Sequence[Probe],
) -> str:
    plain = found[0].trace
    layout = ", channels_last" if dry.channels_last else ""
    lines = [f"{options.model}, batch {options.batch}, {conditions.precision}{layout}, for {conditions.device}", ""]
    total = max(sum(save.nbytes for save in plain.counted), 1)
    rows = [
        (_READS.get(name, name), str(saves), size(nbytes), f"{100 * nbytes / total:.1f} %")
        for name, (saves, nbytes) in shares(plain).items()
    ]
    lines += table(("backward reads", "saves", "plain", "share"), rows)
    if options.layers > 0:
        largest = layers(plain)[: options.layers]
        rows = [(save.site, save.need, size(save.nbytes), f"{100 * save.nbytes / total:.1f} %") for save in largest]
        lines += ["", *table((f"largest {len(rows)} sites", "reads", "plain", "share"), rows)]
    lines += ["", *_table(found, options.memory)]
    lines += ["", *_notes(dry, plain.static, probes, options.memory)]
    return "\n".join(lines)


def _table(found: Sequence[Estimate], memory: str | None) -> list[str]:
    columns: list[tuple[str, Callable[[Estimate], str]]] = [
        ("method", lambda item: item.method),
        ("held", lambda item: size(item.trace.held)),
        ("ratio", lambda item: f"{item.ratio:.1f}x"),
        ("peak", lambda item: size(item.trace.peak)),
        ("in", lambda item: item.trace.peak_at.phase),
        ("all", lambda item: size(item.trace.needed)),
    ]
    if memory:
        columns += [
            ("fits", lambda item: "yes" if item.fits else "no"),
            ("largest batch", lambda item: str(item.largest)),
        ]
    return table([head for head, _ in columns], [[cell(item) for _, cell in columns] for item in found])


def _notes(dry: DryRun, static: int, probes: Sequence[Probe], memory: str | None) -> list[str]:
    notes = [
        "held is what waits for backward between forward and backward, peak the most in the step, and in which part of "
        f"it. Both are above the {size(static)} of parameters, buffers, optimizer ({dry.optimizer}) and batch, which "
        "are in all that is needed."
    ]
    if memory:
        notes.append(f"fits: into {memory}, {100 * HEADROOM:.0f} % of it held back for what ops need while they run.")
    if dry.why_real:
        notes.append(f"Run for real with batches of 2 and 4, and continued in a straight line: {dry.why_real}")
    if probes:
        one = max(probes, key=lambda item: item.steps)
        notes.append(
            f"Held of methods: from {one.steps} training steps with a batch of {one.batch} on the {one.device}, what "
            "the loss saves included, as in a block of tide.recording()."
        )
        if one.device == "cpu":
            notes.append("On NVIDIA GPUs values are coded by rans and take less than the coder of the CPU does.")
    for item in probes:
        if item.missing > _NOTABLE:
            share = f"{100 * item.missing:.0f} %"
            notes.append(
                f"{item.method}: the probe has not seen the sites of {share} of the bytes; they count as kept."
            )
    return [line for note in notes for line in textwrap.wrap(note, 79)]


def _show_json(
    options: argparse.Namespace,
    dry: DryRun,
    conditions: Conditions,
    found: Sequence[Estimate],
    probes: Sequence[Probe],
) -> str:
    def one(item: Estimate) -> dict[str, Any]:
        trace = item.trace
        return {
            "method": item.method,
            "held": trace.held,
            "peak": trace.peak,
            "peak_at": asdict(trace.peak_at),
            "static": trace.static,
            "needed": trace.needed,
            "ratio": item.ratio,
            "fits": item.fits,
            "largest_batch": item.largest,
        }

    plain = found[0].trace
    record = {
        "version": 1,
        "model": options.model,
        "batch": options.batch,
        "conditions": {**asdict(conditions), "optimizer": dry.optimizer, "channels_last": dry.channels_last},
        "is_fake": not dry.why_real,
        "methods": [one(item) for item in found],
        "probes": [{**asdict(item), "rates": dict(item.rates)} for item in probes],
        "saves": [asdict(save) for save in plain.counted],
        "torch": torch.__version__,
    }
    return json.dumps(record, indent=2)
