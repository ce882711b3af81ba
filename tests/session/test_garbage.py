"""The collector of cyclic garbage stays out of steps, finds what they leave behind, and gets its setting back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lowtide import attach
from lowtide.garbage import MOST_YOUNG, Tidiness


@pytest.fixture(autouse=True)
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process without sessions; those that other tests have left behind are gone, or do not count."""
    gc.collect()
    monkeypatch.setattr(Tidiness, "_users", 0)
    before, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(700, 10, 10)
    gc.enable()
    yield
    gc.set_threshold(*before)
    (gc.enable if enabled else gc.disable)()


def net() -> nn.Module:
    return nn.Sequential(*(part for _ in range(40) for part in (nn.Linear(16, 16), nn.ReLU())))


def collections(run: object) -> list[int]:
    """The generations that were looked through while ``run`` ran."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    gc.callbacks.append(note)
    try:
        run()  # type: ignore[operator]
    finally:
        gc.callbacks.remove(note)
    return seen


def test_steps_collect_at_their_end_and_nowhere_else() -> None:
    model, x = net(), torch.randn(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tide = attach(model, "exact", optimizer=optimizer, min_size=0)

    def pass_through() -> None:
        model(x).square().mean().backward()

    for _ in range(2):
        pass_through()
        optimizer.step()
    assert collections(pass_through) == []
    assert collections(optimizer.step) == [1]
    tide.detach()


def test_hundreds_of_steps_look_through_everything_at_most_once() -> None:
    model, x = net(), torch.randn(64, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tide = attach(model, "exact", optimizer=optimizer, min_size=0)

    def train() -> None:
        for _ in range(200):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert collections(train).count(2) <= 1
    tide.detach()


def test_cycles_of_a_step_are_gone_when_it_ends() -> None:
    class Node:
        pass

    model = nn.Linear(4, 4)
    tide = attach(model, "exact")
    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    del node
    assert gone() is not None
    tide.step()
    assert gone() is None
    tide.detach()


def test_the_setting_comes_back() -> None:
    first, second = Tidiness(), Tidiness()
    assert gc.get_threshold() == (MOST_YOUNG, 10, 10)
    first.close()
    first.close()
    assert gc.get_threshold() == (MOST_YOUNG, 10, 10)
    del second
    assert gc.get_threshold() == (700, 10, 10)


def test_detach_and_a_refused_attach_give_it_back() -> None:
    tide = attach(nn.Linear(4, 4), "exact")
    assert gc.get_threshold()[0] == MOST_YOUNG
    tide.detach()
    assert gc.get_threshold()[0] == 700
    model = nn.Linear(4, 4)
    tide = attach(model, "exact")
    with pytest.raises(Exception, match="attached"):
        attach(model, "exact")
    gc.collect()
    tide.detach()
    assert gc.get_threshold()[0] == 700


@pytest.mark.parametrize("first", [50_000, 0])
def test_a_setting_that_collects_less_is_kept(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    tidiness = Tidiness()
    assert gc.get_threshold()[0] == first
    tidiness.close()
    assert gc.get_threshold()[0] == first


def test_what_others_set_meanwhile_is_kept() -> None:
    tidiness = Tidiness()
    gc.set_threshold(1_000, 5, 5)
    tidiness.close()
    assert gc.get_threshold() == (1_000, 5, 5)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    tidiness = Tidiness()
    assert collections(tidiness.end_step) == []
    tidiness.close()
    assert not gc.isenabled()
