"""``lowtide train --compile``: the model runs as graphs, and training is what it is without."""

from __future__ import annotations

import json

import pytest
import torch

from lowtide.session import Session


@pytest.fixture(autouse=True)
def _without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and divided, but not compiled: that takes long, and rounds otherwise."""
    compile_session, compile_module = Session.compile, torch.compile
    monkeypatch.setattr(Session, "compile", lambda session: compile_session(session, backend="aot_eager"))
    monkeypatch.setattr(torch, "compile", lambda run, backend="aot_eager": compile_module(run, backend=backend))
    torch._dynamo.reset()


@pytest.mark.parametrize("method", ["plain", "budget"])
def test_weights_are_those_of_an_eager_run(train, tmp_path, read_weights, assert_same, method: str) -> None:
    arguments = ("--epochs", "2", "--method", method, "--model-option", "dropout=0")
    assert train(*arguments, "--out", "eager") == 0
    assert train(*arguments, "--compile", "--out", "compiled") == 0
    assert_same(read_weights(tmp_path / "eager"), read_weights(tmp_path / "compiled"))
    if method == "budget":
        results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("eager", "compiled")]
        assert 0 < results[1]["held"] <= 1.02 * results[0]["held"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--method", "recompute"), "train.compile and recompute exclude each other"),
        (("--method", "fixed", "--graph"), "train.graph needs an NVIDIA GPU"),
    ],
)
def test_what_does_not_go_together_is_refused(train, capsys, more: tuple[str, ...], message: str) -> None:
    assert train("--compile", *more) == 2
    assert message in capsys.readouterr().err
