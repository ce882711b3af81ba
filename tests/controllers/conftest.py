"""Small nets in training, and a session whose statistics a test can read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.controllers.fixed import Fixed
from lowtide.statistics import Statistics, Wish


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Spy:
    """A controller with constant bounds that asks for statistics in every step and keeps what it was given."""

    def __init__(self, wish: Wish, **table: Any) -> None:
        self.wish, self.given = wish, []
        self._fixed = Fixed(table)
        self.bound, self.noise_by_site, self.events = self._fixed.bound, self._fixed.noise_by_site, self._fixed.events
        self.state_dict, self.load_state_dict = self._fixed.state_dict, self._fixed.load_state_dict

    def wants(self, step: int) -> Wish:
        return self.wish

    def step(self, number: int, statistics: Statistics | None, ledger: Any) -> bool:
        self.given.append(statistics)
        return False


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[lowtide.Session, Spy]]]:
    """``spy(model, wish, optimizer=..., linear="0.1 std")``: a session under a spy."""
    sessions = []

    def make(model: nn.Module, wish: Wish | None = None, *, optimizer: Any = None, min_size: int = 0, **table: Any):
        spying = Spy(wish or Wish(noise=True, spread=True), **table)
        monkeypatch.setattr("lowtide.methods.fixed.Fixed.controller", lambda method: spying)
        sessions.append(lowtide.attach(model, "fixed", optimizer=optimizer, min_size=min_size))
        return sessions[-1], spying

    yield make
    for session in sessions:
        session.detach()
