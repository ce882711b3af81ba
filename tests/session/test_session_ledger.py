"""The ledger against an independent count: plain hooks for what autograd would hold, payload bytes for what is held."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import lowtide
from lowtide.capture.handles import Alias, Passed
from lowtide.ledger import Ledger, SiteEntry
from lowtide.payloads import Payload


def _convnet() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    rest = nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(), nn.Linear(1024, 64), nn.LogSoftmax(-1)
    return nn.Sequential(*layers, *rest), torch.randn(8, 3, 16, 16)


def _transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 32, 64)


def _recurrent() -> tuple[nn.Module, Tensor]:
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 8)

        def forward(self, x):
            return self.head(F.gelu(self.rnn(x)[0]))

    return Last(), torch.randn(8, 16, 32)


MODELS = pytest.mark.parametrize("make", [_convnet, _transformer, _recurrent])


def _plain_bytes(model: nn.Module, x: Tensor) -> int:
    """Unique storages that a forward saves, less those of parameters, buffers and the batch."""
    owned = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers(), x]}
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes(), tensor.detach()  # held, so that no address is used again
        return tensor.detach()

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda held: held):
        model(x)
    return sum(nbytes for cdata, (nbytes, _) in saved.items() if cdata not in owned)


def _held_bytes(session: lowtide.Session) -> int:
    """The payloads and kept storages of a session that are alive, as the garbage collector finds them."""
    gc.collect()
    things = [
        thing for thing in gc.get_objects() if type(thing) in (Payload, Alias, Passed) and thing._lease is not None
    ]
    ours = [thing for thing in things if thing._lease._ledger is session.ledger]
    encoded = [thing._held.fetch() for thing in ours if type(thing) is Payload]
    kept = [thing._tensor.untyped_storage() for thing in ours if type(thing) is not Payload]
    parts = [part for item in encoded for part in item.tensors.values()]
    return sum(part.nbytes for part in parts) + sum({storage._cdata: storage.nbytes() for storage in kept}.values())


@MODELS
@pytest.mark.parametrize("method", ["exact", "fixed"])
@pytest.mark.parametrize("min_size", [0, 4096])
def test_raw_and_held_are_what_they_say(make, method, min_size):
    model, x = make()
    expected = _plain_bytes(model, x)
    session = lowtide.attach(model, method, min_size=min_size)
    torch.manual_seed(1)
    output = model(x)
    assert session.ledger.raw == expected
    assert session.ledger.held == _held_bytes(session)
    assert 0 < session.ledger.held <= session.ledger.raw
    output.sum().backward()
    assert session.ledger.raw == session.ledger.held == 0
    assert session.ledger.raw_peak == expected


def test_a_small_net_by_hand():
    """Linear(64, 64), Tanh, Linear(64, 8) on 32 rows: 8 KiB are saved, by tanh and again by the second linear."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)), torch.randn(32, 64)
    for method, coded in (("exact", False), ("fixed", True)):
        session = lowtide.attach(model, method, min_size=4096)
        output = model(x)
        assert session.ledger.raw == 8192
        assert (session.ledger.held < 8192) is coded
        assert [entry.raw_nbytes for entry in session.report().sites] in ([8192, 0], [0, 8192])
        output.sum().backward()
        session.detach()


@MODELS
def test_a_fixed_step_leaves_the_generator_as_a_plain_one_does(make):
    model, x = make()
    states = []
    for attached in (False, True):
        session = lowtide.attach(model, check="full", min_size=0) if attached else None
        torch.manual_seed(5)
        model(x).sum().backward()
        states.append(torch.get_rng_state())
        if session is not None:
            session.step()
    assert torch.equal(*states)


def test_the_input_of_the_model_counts_for_the_caller():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()), torch.randn(64, 64)
    session = lowtide.attach(model, "exact")
    nested = nn.Module()
    nested.forward = lambda batch: model(batch["x"][0])
    for run in (model, lambda value: nested.forward({"x": [value]})):
        output = run(x)
        assert session.ledger.raw == 16 * 1024
        del output


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("rows", [4, 64], ids=["small", "large"])
def test_inputs_of_any_size_and_dtype_count_for_the_caller(dtype, rows):
    model, tokens = nn.Embedding(50, 16), torch.zeros(rows, 64, dtype=dtype)
    session = lowtide.attach(model, "exact")
    output = model(tokens)
    assert session.ledger.raw == session.ledger.held == 0
    del output


def test_buffers_of_any_size_count_for_the_module():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8).eval()), torch.randn(4, 3, 16, 16)
    session = lowtide.attach(model, "exact")
    output = model(x)
    assert session.ledger.raw == 4 * 8 * 16 * 16 * 4  # the input of the norm, and no running statistics
    del output


def test_a_peak_is_a_peak(mlp, x):
    model = mlp()
    session = lowtide.attach(model, "exact")
    first = model(x)
    second = model(x)
    peak = session.ledger.raw
    del first
    model(x[:32]).sum().backward()
    assert session.ledger.raw == peak / 2
    assert session.ledger.raw_peak == peak
    del second
    assert session.ledger.raw == 0


def test_the_usual_size_of_a_step_follows_the_steps():
    """What is kept for a moment is bounded by a share of it: a trial of a large batch must not raise it for good."""
    ledger = Ledger()
    for size, usual in ((100, 100), (1000, 1000), (10, 1000), (10, 10)):
        ledger.add_raw(size)
        assert ledger.raw_usual == usual, size
        ledger.raw -= size
        ledger.end_step()
    assert ledger.raw_peak == 1000


def test_two_threads_may_be_the_first_to_save_at_a_site(monkeypatch):
    """A second save comes, as from another thread, at the moment at which the first one makes the site's entry."""
    ledger, late = Ledger(), [True]
    save = ("0:tanh.result", "0", "values", "sz", "", "", 8, 1)

    def make(*arguments: Any) -> SiteEntry:
        if late and late.pop():
            ledger.record(*save)
        return SiteEntry(*arguments)

    monkeypatch.setattr("lowtide.ledger.SiteEntry", make)
    ledger.record(*save)
    ledger.record(*save)
    assert ledger.sites["0:tanh.result"].raw_nbytes >= 16
