"""What a method makes of values: bytes a value at each site, measured in a few real steps with a small batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from lowtide.app.plan.dryrun import Conditions, DryRun
from lowtide.app.plan.fakes import AsOnCuda
from lowtide.app.plan.trace import NAMED
from lowtide.app.shared import workload
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, Workload
from lowtide.session import attach

BATCHES = {"cpu": 2, "cuda": 16}


@dataclass(frozen=True, slots=True)
class Probe:
    """``rates`` are bytes a value, by site; a site that the method keeps as it is has none."""

    method: str
    rates: Mapping[str, float]
    batch: int
    steps: int
    device: str
    missing: float  # share of the bytes whose sites the probe has not seen: they are taken as kept


def measure(
    load: Workload, variant: Variant, dry: DryRun, conditions: Conditions, *, device: torch.device, steps: int
) -> Probe:
    """Train for ``steps`` steps, then read the ledger after one more forward."""
    batch = BATCHES[device.type]
    steps = 0 if variant.is_exact else steps  # what is exact does not depend on values
    precision = conditions.precision if device.type == "cuda" else "fp32"  # bits a value do not depend on it
    substitutes = AsOnCuda() if conditions.device == "cuda" and device.type != "cuda" else nullcontext()
    with workload.applied(precision), substitutes:
        task = Task(load, precision, batch=batch, device=device, channels_last=conditions.channels_last)
        options = {**variant.options, "min_size": 1}  # with a small batch, tensors are smaller than they will be
        session = task.session = attach(task.model, variant.method, optimizer=task.optimizer, **options)
        try:
            for _ in range(steps):
                task.step()
            task.loss()
            rows = {entry.name: entry for entry in session.report().sites}
        finally:
            session.detach()
    saves = dry.trace(batch).saves
    coded = [save for save in saves if save.site in rows and rows[save.site].codec != "kept"]
    named = [save for save in saves if save.fate == NAMED]
    total = sum(save.nbytes for save in named)
    return Probe(
        method=variant.text,
        rates={save.site: rows[save.site].held_nbytes / max(save.numel, 1) for save in coded},
        batch=batch,
        steps=steps,
        device=device.type,
        missing=sum(save.nbytes for save in named if save.site not in rows) / total if total else 0.0,
    )
