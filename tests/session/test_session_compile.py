"""torch.compile hides the ops, so it and Lowtide refuse each other; whichever comes second says so.

Surprises 21 to 23, 25 and 26 are about hooks inside compiled code: not reached while this holds.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import AttachError


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    yield
    torch._dynamo.reset()


def test_a_compiled_model_is_refused(mlp):
    with pytest.raises(AttachError, match=r"made by torch.compile, .* Attach to the original module"):
        lowtide.attach(torch.compile(mlp(), backend="eager"))


def test_a_compiled_part_is_refused(mlp):
    model = nn.Sequential(nn.Linear(64, 64), torch.compile(mlp(), backend="eager"))
    with pytest.raises(AttachError, match=r"torch\.compile"):
        lowtide.attach(model)


@pytest.mark.parametrize("depth", [0, 1], ids=["root", "part"])
def test_a_model_compiled_in_place_is_refused(mlp, depth):
    inner = mlp()
    model = nn.Sequential(inner) if depth else inner
    inner.compile(backend="eager")
    with pytest.raises(AttachError, match=rf"module {'0' if depth else '.model.'} was compiled in place by .compile"):
        lowtide.attach(model)


def test_the_original_of_a_compiled_model_can_be_attached(mlp, x):
    model = mlp()
    torch.compile(model, backend="eager")
    session = lowtide.attach(model)
    model(x).sum().backward()
    assert session.ledger.raw_peak > 0


def _compiled(model: nn.Module, backend: str):
    return torch.compile(model, backend=backend)


def _compiled_in_place(model: nn.Module, backend: str):
    model.compile(backend=backend)
    return model


def _compiled_around(model: nn.Module, backend: str):
    return torch.compile(lambda x: model(x) * 2, backend=backend)


@pytest.mark.parametrize("compiled", [_compiled, _compiled_in_place, _compiled_around])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiling_an_attached_model_is_loud(mlp, x, compiled, backend):
    """It raises, or it warns and names torch.compile; never is a model left uncompressed without the cause."""
    model = mlp()
    session = lowtide.attach(model)
    run = compiled(model, backend)
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run(x).sum().backward()
        except Exception as error:
            said.append(f"{error} {error.__cause__}")
    said += [str(warning.message) for warning in caught]
    compressed = session.ledger.raw_peak > 0 and session.ledger.held_peak < session.ledger.raw_peak
    assert compressed or any("torch.compile" in text for text in said), f"held {session.ledger.held_peak}, said {said}"


def test_compiling_as_one_graph_raises(mlp, x):
    model = mlp()
    lowtide.attach(model)
    with pytest.raises(Exception, match=r"Lowtide is attached|AttachError"):
        torch.compile(model, backend="eager", fullgraph=True)(x)


def test_after_detach_a_model_compiles(mlp, x, gradients, assert_same):
    model = mlp()
    expected = gradients(model, x)
    lowtide.attach(model).detach()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(expected, gradients(compiled, x))
