"""What a step holds: counted without changing it, and turned into advice."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide import attach
from lowtide.app import zoo
from lowtide.app.shared import allocator
from lowtide.app.train.advice import advise, suggest_batch
from lowtide.app.train.config import Config
from lowtide.app.train.memory import Meter
from lowtide.app.train.prepare import understand
from lowtide.app.train.trainer import Trainer

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["resnet18", "alexnet", "vit_ti_16"])
def test_what_plain_training_saves_is_what_the_ledger_says(name):
    entry = zoo.describe(name)
    inputs, target = entry.example(8, **entry.tiny)
    figures = []
    for method in (None, "exact"):
        torch.manual_seed(0)
        model = entry.build(**entry.tiny)
        session = attach(model, method) if method else None
        meter = Meter(model, session, CPU)
        with session.recording() if session else contextlib.nullcontext(), meter.forward(inputs):
            loss = F.cross_entropy(model(inputs), target)
        meter.after_forward()
        loss.backward()
        figures.append((meter.raw, float(loss.detach())))
        if session is not None:
            session.detach()
    assert figures[0] == figures[1] and figures[0][0]


def test_plain_training_is_counted_once():
    model = nn.Linear(64, 64)
    meter = Meter(model, None, CPU)
    for batch in (8, 16):
        inputs = torch.randn(batch, 64)
        with meter.forward(inputs):
            model(model(inputs)).sum().backward()
    assert meter.raw == meter.held == 8 * 64 * 4 and meter.ratio == 1.0
    assert meter.read() == {"raw_nbytes": 2048, "held_nbytes": 2048, "ratio": 1.0, "peak_nbytes": None}


class _Device:
    """Figures of a GPU with 10 GB."""

    type = "cuda"


def _measured(monkeypatch: pytest.MonkeyPatch, *, static: int, peak: int) -> Meter:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10_000_000_000))
    meter = Meter(nn.Linear(1, 1), None, CPU)
    meter.static, meter.peak = static, peak
    return meter


@pytest.mark.parametrize(
    ("static", "peak", "batch", "wanted"),
    [
        (1_000_000_000, 9_800_000_000, 100, 90),  # 88 MB a sample, of 9 GB that can be used 8 are free
        (9_500_000_000, 9_800_000_000, 100, 50),  # what is there without a step does not fit: half is a guess
        (1_000_000_000, 2_000_000_000, 100, 50),  # by this it should have fitted
    ],
)
def test_the_batch_that_would_fit(monkeypatch, static, peak, batch, wanted):
    meter = _measured(monkeypatch, static=static, peak=peak)
    assert suggest_batch(batch, meter, _Device()) == wanted


def test_without_figures_half_is_suggested():
    assert suggest_batch(64, Meter(nn.Linear(1, 1), None, CPU), CPU) == 32
    assert suggest_batch(1, Meter(nn.Linear(1, 1), None, CPU), CPU) == 1


@pytest.mark.parametrize("is_off", [True, False])
def test_gaps_are_named_where_the_user_has_chosen_them(monkeypatch, is_off):
    meter = _measured(monkeypatch, static=1_000_000_000, peak=9_800_000_000)
    monkeypatch.setattr(allocator, "is_off_by_choice", lambda: is_off)
    monkeypatch.setenv(allocator.VARIABLE, "max_split_size_mb:64")
    config = Config.read({"model": {"name": "resnet18"}, "data": {"name": "digits"}, "train": {"batch": 100}})
    named = "PYTORCH_ALLOC_CONF=max_split_size_mb:64 leaves out expandable_segments:True"
    for device, wanted in ((_Device(), is_off), (CPU, False)):
        said = advise(config, "in step 3", meter=meter, session=None, device=device)
        assert (named in said) == wanted and "; try --batch " in said


@pytest.mark.parametrize("method", ["plain", "fixed"])
def test_the_loss_of_a_run_counts(net, method):
    """What plain training is said to hold does not depend on who counts it; Lowtide compresses the loss, too."""
    read = Config.read(
        {
            "model": {"name": net},
            "data": {"name": "digits", "options": {"train": 64, "test": 80}},
            "train": {"batch": 32},
            "method": {"name": method, "options": {"min_size": 1} if method == "fixed" else {}},
        }
    )
    trainer = Trainer(*understand(read), CPU)
    trainer.step(0)
    assert trainer.meter.raw == _saved_plainly(trainer)
    if trainer.session is not None:
        codecs = {entry.name: entry.codec for entry in trainer.session.report().sites}
        assert codecs["(model):log_softmax.result"] == "sz" and codecs["(model):nll_loss.self"] == "shape"
    trainer.close()


def _saved_plainly(trainer: Trainer) -> int:
    """Bytes of forward and loss, counted by hooks of another kind."""
    trainer.close()
    inputs, targets = trainer.batches.training(0)
    assert trainer.pictures is not None
    inputs = trainer.pictures.training(inputs, 0)
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer.score(trainer.model(inputs), targets)
    for other in (inputs, *trainer.model.parameters(), *trainer.model.buffers()):
        found.pop(other.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
