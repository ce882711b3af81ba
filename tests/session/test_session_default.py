"""The default method: bounds that set themselves, in every way that a loop may call the model."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import LowtideWarning


def conv_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.GELU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 100, 10))


def images(step: int = 0) -> Tensor:
    return torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(step))


def bounds(session: lowtide.Session) -> dict[str, str]:
    return {site.name: site.bound for site in session.report().sites if site.codec == "sz"}


def learn(model: nn.Module, step: int, *, forwards: int = 1) -> None:
    model.zero_grad()
    for _ in range(forwards):
        model(images(step)).square().mean().backward()


def test_it_is_budget_with_noise_of_three_percent():
    session = lowtide.attach(conv_net(), min_size=0)
    assert session.method == "budget" and session.controller.noise == 0.03 and session.controller.memory is None


def test_the_first_step_is_compressed():
    """Nothing is held exactly while there are no statistics: a batch that fits later fits from the start."""
    model = conv_net()
    session = lowtide.attach(model)
    output = model(images())
    first = session.ledger.held / session.ledger.raw
    output.sum().backward()
    assert first < 0.35 and session.ledger.held == 0
    assert set(bounds(session).values()) == {"0.1 std"}


@pytest.mark.parametrize("forwards", [1, 3], ids=["one forward", "accumulated"])
def test_bounds_move_with_or_without_an_optimizer(forwards: int):
    """Statistics of gradients need none; ``step`` only has to be called."""
    found = []
    for told in (True, False):
        model = conv_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        session = lowtide.attach(model, optimizer=optimizer if told else None, min_size=1024)
        for step in range(5):
            learn(model, step, forwards=forwards)
            optimizer.step()
            if not told:
                session.step()
        learn(model, 5)
        found.append(bounds(session))
        assert session.report().to_dict()["events"] == []
    assert found[0] == found[1] and len(set(found[0].values())) > 1


def test_steps_without_training_are_waited_out():
    model = conv_net()
    session = lowtide.attach(model, min_size=1024)
    for _ in range(3):
        with torch.no_grad():
            model.eval()(images())
        session.step()
    for step in range(4):
        learn(model.train(), step)
        session.step()
    learn(model, 4)
    assert set(bounds(session).values()) != {"0.1 std"}


def test_steps_that_nobody_counts_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """What is measured does not pile up, one warning says what is missing, and a step that is counted mends it."""
    monkeypatch.setattr("lowtide.session._MOST_RESTARTS", 4)
    model = conv_net()
    session = lowtide.attach(model, min_size=1024)
    with pytest.warns(
        LowtideWarning, match=r"none has ended in 6 forwards; .*session.step\(\) after each step"
    ) as caught:
        for step in range(12):
            learn(model, step)
    assert len(caught) == 1
    assert not session._collector._records and not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert set(bounds(session).values()) == {"0.1 std"}
    for step in range(4):
        learn(model, step)
        session.step()
    learn(model, 4)
    assert set(bounds(session).values()) != {"0.1 std"}


def test_accumulation_is_not_taken_for_steps_that_nobody_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lowtide.session._MOST_RESTARTS", 2)
    model = conv_net()
    session = lowtide.attach(model, min_size=1024)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            learn(model, step, forwards=6)
            session.step()


def test_forwards_without_backward_do_not_pile_up(monkeypatch: pytest.MonkeyPatch):
    """Evaluation with gradients on: nothing ends a step, nothing throws gradients away."""
    monkeypatch.setattr("lowtide.session._MOST_FORWARDS", 3)
    model = conv_net()
    session = lowtide.attach(model)
    with pytest.warns(LowtideWarning, match="none has ended in 3 forwards") as caught:
        for step in range(6):
            model(images(step))
    assert len(caught) == 1 and not session._collector._records
