"""``lowtide train --graph`` where there is no GPU: what goes through the graph, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.app.shared.specs import UsageError
from lowtide.app.train import trainer
from lowtide.app.train.config import Train
from lowtide.app.train.trainer import Trainer


@pytest.mark.parametrize("method", ["plain", "budget"])
def test_forward_and_backward_go_through_the_graph(
    train, tmp_path, monkeypatch, read_weights, assert_same, method: str
) -> None:
    """The optimizer does not, and training is what it is without."""
    calls: list[int] = []

    def stand_in(self: Trainer) -> Any:
        def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            before = [parameter.detach().clone() for parameter in self.model.parameters()]
            loss = self._pass(inputs, targets)
            assert all(map(torch.equal, before, self.model.parameters()))
            assert not loss.requires_grad
            calls.append(len(inputs))
            return loss

        return step

    monkeypatch.setattr(trainer, "_check_graph", lambda train, device: None)
    monkeypatch.setattr(Trainer, "_graph", stand_in)
    arguments = ("--epochs", "2", "--method", method)
    assert train(*arguments, "--out", "eager") == 0
    assert not calls
    assert train(*arguments, "--graph", "--out", "graph") == 0
    assert len(calls) >= 10
    assert_same(read_weights(tmp_path / "eager"), read_weights(tmp_path / "graph"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "train.graph is for fp32, tf32 and bf16"),
        ({"deterministic": True}, "train.graph and train.deterministic exclude each other"),
    ],
)
def test_what_does_not_go_with_a_graph_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer._check_graph(Train(graph=True, **settings), torch.device("cuda"))
    trainer._check_graph(Train(graph=True), torch.device("cuda"))
