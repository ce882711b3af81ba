"""A dry run agrees with a real one to the byte: what is saved, what is held, where the peak is."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.app import zoo
from lowtide.app.plan.dryrun import LARGE, SMALL, Conditions, DryRun, _continue
from lowtide.app.plan.trace import LEFT, NAMED, OWNED
from lowtide.app.shared.workload import Workload, find_workload
from lowtide.app.timeline import Timeline
from lowtide.app.zoo.tasks import classification_loss

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "step.csv"
CPU = Conditions(device="cpu", precision="fp32")


def tiny(name: str) -> Workload:
    return find_workload(name, {}, tiny=True)


def workload_of(build, shape=(8,)) -> Workload:
    def sample(batch, generator):
        return torch.randn(batch, *shape, generator=generator), torch.zeros(batch, dtype=torch.int64)

    return Workload("own", "image", 10, build, sample, classification_loss)


@pytest.mark.parametrize("name", [*zoo.names()])
def test_what_is_saved_is_what_the_ledger_counts(name):
    """Raw bytes of a dry run are those that a session counts in a real forward of the same model, with its loss."""
    load = tiny(name)
    dry = DryRun(load, CPU)
    assert bool(dry.why_real) == (name == "lstm")
    torch.manual_seed(0)
    model = load.build().train()
    inputs, target = load.sample(4, torch.Generator().manual_seed(0))
    tide = lowtide.attach(model, "exact", min_size=4096)
    with tide.recording():
        loss = load.score(model(inputs).float(), target)
    expected = tide.ledger.raw - target.untyped_storage().nbytes()  # which is part of the batch in a dry run
    tide.detach()
    del loss
    saves = dry.trace(4).saves
    assert sum(save.nbytes for save in saves if save.fate in (NAMED, LEFT)) == expected > 0


@pytest.mark.parametrize("name", ["resnet18", "gpt", "unet"])
def test_held_and_peak_are_those_of_a_real_step(name):
    load = tiny(name)
    dry = DryRun(load, CPU).trace(3)
    model = load.build().train()
    inputs, target = load.sample(3, torch.Generator().manual_seed(0))
    timeline = Timeline(model)
    with timeline.following():
        loss = load.score(model(inputs).float(), target)
        assert timeline.allocated == dry.held
        with timeline.backward():
            loss.backward()
    assert timeline.peak.allocated == dry.peak
    assert (timeline.peak.phase, timeline.peak.place) == (dry.peak_at.phase, dry.peak_at.place)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_resnet50_at_batch_256_needs_what_was_measured_on_a_gpu(precision):
    """Beside the allocator's own figures, without what it adds: held to 0.1 %, the peak to 0.1 %."""
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["method"] == "plain" and row["precision"] == precision]
    measured = next(row for row in rows if row["model"] == "resnet50" and row["batch"] == "256")
    found = DryRun(find_workload("resnet50", {}), Conditions(precision=precision)).trace(256)
    assert found.held == pytest.approx(int(measured["held_requested"]), rel=1e-3)
    assert found.peak == pytest.approx(int(measured["peak_requested"]), rel=1e-3)
    assert found.held == pytest.approx(int(measured["held"]), rel=0.03)


def test_larger_batches_follow_from_two_small_ones(monkeypatch):
    monkeypatch.setattr("lowtide.app.plan.trace.MIN_SIZE", 4096)  # so that none is small in one batch alone
    dry = DryRun(tiny("resnet18"), CPU)
    told, true = _continue(dry.trace(SMALL), dry.trace(LARGE), 12), dry.trace(12)
    assert (told.held, told.static) == (true.held, true.static)
    assert told.peak == pytest.approx(true.peak, rel=0.05)  # another layer may hold it
    assert [(save.site, save.nbytes, save.numel) for save in told.saves] == [
        (save.site, save.nbytes, save.numel) for save in true.saves
    ]


class Looks(nn.Module):
    """Asks a tensor for its value, which a fake one does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 10)

    def forward(self, x):
        hidden = self.linear(x)
        return hidden.relu() * 2 if float(hidden.detach().sum()) > -1e9 else hidden


def test_a_model_that_looks_at_values_is_run_for_real():
    dry = DryRun(workload_of(Looks), CPU)
    assert "DataDependent" in dry.why_real
    found = dry.trace(1000)
    model, inputs, target = Looks(), torch.randn(1000, 8), torch.zeros(1000, dtype=torch.int64)
    timeline = Timeline(model)
    with timeline.following():
        loss = F.cross_entropy(model(inputs), target)
    assert found.held == pytest.approx(timeline.allocated, rel=0.01)
    assert loss.requires_grad and {save.need for save in found.counted} >= {"mask", "values"}


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        query, key, value = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        return self.head(F.dropout(mixed.transpose(1, 2).flatten(2), 0.1).mean(1))


def test_dropout_and_attention_are_those_of_the_device():
    load = workload_of(Attends, shape=(64, 16))
    on_cpu = DryRun(load, CPU).trace(4)
    on_cuda = DryRun(load, Conditions(device="cuda", precision="fp32")).trace(4)
    matrices = [[save for save in found.saves if ":safe_softmax." in save.site] for found in (on_cpu, on_cuda)]
    assert [len(found) for found in matrices] == [1, 0]  # with dropout, a CPU writes the matrix down
    (mask,) = (save for save in on_cuda.saves if "native_dropout" in save.site)
    assert (mask.need, mask.itemsize, mask.nbytes) == ("mask", 1, 4 * 64 * 16)
    assert any(save.need == "values" and save.numel == 4 * 64 * 16 for save in on_cpu.saves if ":mul." in save.site)


def test_fates(monkeypatch):
    monkeypatch.setattr("lowtide.app.plan.trace.MIN_SIZE", 4096)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.norm = nn.BatchNorm2d(8)
            self.last = nn.Linear(8 * 64, 10)

        def forward(self, x):
            return self.last(self.norm(self.first(x)).relu().flatten(1))

    found = DryRun(workload_of(Net, shape=(3, 8, 8)), Conditions(device="cpu", precision="bf16")).trace(16)
    fates = {(save.site, save.fate) for save in found.saves}
    assert ("norm:native_batch_norm.input", NAMED) in fates and ("(model):relu.result", NAMED) in fates
    assert {save.fate for save in found.saves if save.path == "first"} <= {OWNED, "recast", NAMED}
    assert any(save.fate == "recast" and save.reason == "cast of a parameter" for save in found.saves)
    assert any(save.fate == LEFT and save.reason == "smaller than min_size" for save in found.saves)
    assert any(save.site.startswith("(model):") for save in found.saves), "what the loss saves"


def test_a_tensor_that_two_ops_read_counts_once_and_where_it_is_needed_most():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return self.conv((x * 2).relu()).mean((2, 3))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.net = nn.Conv2d(3, 4, 3), Net()

        def forward(self, x):
            return self.net(self.enter(x))

    saves = DryRun(workload_of(Outer, shape=(3, 32, 32)), CPU).trace(2).saves
    relu = next(save for save in saves if save.site == "net:relu.result")
    conv = next(save for save in saves if save.site == "net.conv:convolution.input")
    assert relu.entry == conv.entry and relu.nbytes == 0 and conv.nbytes == 2 * 4 * 30 * 30 * 4


def test_payloads_take_the_place_of_tensors():
    dry = DryRun(tiny("resnet18"), CPU)
    plain = dry.trace(4)
    values = {save.site: 0.5 for save in plain.saves if save.fate == NAMED and save.need == "values"}
    nothing = {save.site: 0.0 for save in plain.saves if save.fate == NAMED}
    free, half = dry.trace(4, nothing), dry.trace(4, {**nothing, **values})
    stored = sum(round(0.5 * save.numel) for save in plain.saves if save.site in values)
    assert half.held - free.held == stored
    assert free.held < plain.held / 50 and free.peak < half.peak < plain.peak
    assert dry.trace(4, {}).held == plain.held


def test_a_payload_is_never_larger_than_its_tensor():
    dry = DryRun(tiny("resnet18"), CPU)
    plain = dry.trace(4)
    sites = [save.site for save in plain.saves if save.fate == NAMED and save.need == "values"]
    assert dry.trace(4, dict.fromkeys(sites, 100.0)).held == dry.trace(4, dict.fromkeys(sites, 4.0)).held


def test_no_hooks_are_left_on_the_model():
    dry = DryRun(tiny("resnet18"), CPU)
    dry.trace(2, {})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in dry.model.modules())
