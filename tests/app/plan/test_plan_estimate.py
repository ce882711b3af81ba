"""What a probe measures carries over to another batch size, and the largest batch is the largest."""

from __future__ import annotations

import pytest
import torch

from lowtide.app.plan import probe
from lowtide.app.plan.dryrun import Conditions, DryRun
from lowtide.app.plan.estimate import HEADROOM, estimate, find_largest, layers, shares
from lowtide.app.plan.trace import NAMED
from lowtide.app.shared.variants import Variant
from lowtide.app.shared.workload import Task, find_workload
from lowtide.session import attach

CPU = Conditions(device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def dry() -> DryRun:
    return DryRun(find_workload("resnet18", {}, tiny=True), CPU)


@pytest.mark.parametrize("method", ["exact", "bold"])
def test_a_probe_foretells_what_a_session_holds(method, monkeypatch):
    """From a batch of 2 to one of 24. A payload's heads and tables do not grow with it: within 10 %, and not below."""
    monkeypatch.setattr("lowtide.app.plan.trace.MIN_SIZE", 4096)
    load, variant = find_workload("resnet18", {}, tiny=True), Variant.parse(method)
    dry = DryRun(load, CPU)
    found = probe.measure(load, variant, dry, CPU, device=torch.device("cpu"), steps=1)
    assert found.missing == 0 and found.batch == 2
    told = dry.trace(24, found.rates)
    task = Task(load, "fp32", batch=24, device=torch.device("cpu"))
    tide = task.session = attach(
        task.model, variant.method, optimizer=task.optimizer, min_size=4096, **dict(variant.options)
    )
    task.step()
    task.loss()
    rows = tide.report().sites
    tide.detach()
    held = sum(row.held_nbytes for row in rows)
    assert held * 0.99 <= told.held <= held * 1.10


def test_bytes_by_kind_and_by_layer_add_up(dry):
    plain = dry.trace(4)
    groups = shares(plain)
    assert sum(nbytes for _, nbytes in groups.values()) == sum(save.nbytes for save in plain.counted)
    assert next(iter(groups)) == "values"
    largest = layers(plain)
    assert [save.nbytes for save in largest] == sorted((save.nbytes for save in largest), reverse=True)
    assert all(save.fate == NAMED and save.nbytes for save in largest)


@pytest.mark.parametrize("rates", [None, {}, "half"])
@pytest.mark.parametrize("batch", [1, 32])
def test_the_largest_batch_fits_and_one_more_does_not(dry, rates, batch):
    if rates == "half":
        rates = {save.site: 0.5 for save in dry.trace(2).saves if save.need == "values"}
    usable = 10 << 20
    largest = find_largest(dry, rates, batch, usable)
    assert dry.trace(largest, rates).needed <= usable < dry.trace(largest + 1, rates).needed


def test_no_batch_fits_too_little(dry):
    assert find_largest(dry, None, 32, 1000) == 0


def test_an_estimate_holds_some_memory_back(dry):
    needed = dry.trace(8).needed
    tight, roomy = int(needed / (1 - HEADROOM)) - 1000, int(needed / (1 - HEADROOM)) + 1000
    assert estimate(dry, "plain", 8, memory=tight).fits is False
    fitting = estimate(dry, "plain", 8, memory=roomy)
    assert fitting.fits is True and fitting.largest == 8 and fitting.ratio == 1.0
    assert estimate(dry, "plain", 8).fits is None
