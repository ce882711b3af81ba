"""The planner: the cheapest mixture within a budget, checked against all mixtures; what it promises is what is held."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import lowtide
from lowtide.errors import AttachError, PolicyError, SizeError
from lowtide.planner import BOTH, COMPRESS, KEEP, OFFLOAD, RECOMPUTE, Choice, Plan, Planner, plan_blocks
from lowtide.planner.knapsack import cost_of, refusal, solve
from lowtide.planner.trial import Trial
from lowtide.stores import host

sys.path.insert(0, str(Path(__file__).parents[1] / "stores"))
from slow_link import SlowLink

NAMES = (KEEP, COMPRESS, OFFLOAD)
choice = st.builds(Choice, st.integers(0, 10**6), st.floats(0, 100), st.floats(0, 100))
blocks_of_choices = st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, choice)), max_size=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(blocks_of_choices, st.data(), st.floats(0, 400))
def test_no_mixture_within_the_room_is_cheaper(
    blocks: list[dict[str, Choice]], data: st.DataObject, overlap_ms: float
) -> None:
    """Bytes are rounded up to 1000ths and times on the link to 40ths: mixtures that close to the edge may be missed."""
    ways = {str(number): choices for number, choices in enumerate(blocks)}
    least = sum(min(way.held for way in choices.values()) for choices in blocks)
    room = data.draw(st.integers(least, 6 * 10**6))
    chosen = solve(ways, room, overlap_ms=overlap_ms)
    assert chosen is not None and list(chosen) == list(ways)
    assert sum(ways[block][name].held for block, name in chosen.items()) <= room
    cost = cost_of(ways, chosen, overlap_ms=overlap_ms)
    rounding = len(blocks) * sum(max(way.link_ms for way in choices.values()) for choices in blocks) / 40
    for mixture in itertools.product(NAMES, repeat=len(blocks)):
        picked = [choices[name] for choices, name in zip(blocks, mixture, strict=True)]
        if sum(way.held for way in picked) <= 0.995 * room:
            other = cost_of(ways, dict(zip(ways, mixture, strict=True)), overlap_ms=overlap_ms)
            assert cost <= other + rounding + 1e-9


def test_the_link_is_free_for_as_long_as_the_device_is_busy() -> None:
    """Three equal blocks, of which two must go, and time on the link for one: the other is compressed."""
    block = {KEEP: Choice(100, 0.0), COMPRESS: Choice(10, 3.0), OFFLOAD: Choice(0, 0.01, 5.0)}
    ways = {"a": block, "b": block, "c": block}
    chosen = solve(ways, 120, overlap_ms=5.5)
    assert chosen is not None and sorted(chosen.values()) == [COMPRESS, KEEP, OFFLOAD]
    assert cost_of(ways, chosen, overlap_ms=5.5) == pytest.approx(3.01)
    chosen = solve(ways, 120, overlap_ms=20.0)
    assert chosen is not None and sorted(chosen.values()) == [KEEP, OFFLOAD, OFFLOAD]


def test_room_is_used_where_that_costs_little() -> None:
    """Both choices fit: the cheaper one, unless what is left over is worth more than the difference."""
    ways = {"a": {COMPRESS: Choice(10, 1.0), RECOMPUTE: Choice(90, 1.2)}}
    assert solve(ways, 100) == {"a": COMPRESS}
    assert solve(ways, 100, spare_ms=1.0) == {"a": RECOMPUTE}


def test_a_room_that_is_too_small_is_refused_and_the_smallest_is_named() -> None:
    ways = {"a": {KEEP: Choice(4096, 0.0), COMPRESS: Choice(1024, 1.0)}, "b": {KEEP: Choice(1024, 0.0)}}
    assert solve(ways, 2048) == {"a": COMPRESS, "b": KEEP}
    assert solve(ways, 2040) is None
    refused = str(refusal(2560, least=2568, outside=520))
    assert "no mixture holds 2.50 KiB or less: of those that were run the smallest holds 2.51 KiB" in refused
    assert refused.endswith("The smallest budget is 2.51 KiB (2568 bytes)")


class Net(nn.Module):
    """Six equal blocks: how many of them are kept tells how much room there was."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.x = torch.randn(512, 32)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def plan(self, budget: int | str, **options: Any) -> Plan:
        return plan_blocks(
            self.step, self.model, budget=budget, state=[self.model, self.optimizer], modules="blocks.*", **options
        )


def plain_nbytes() -> int:
    training = Training()
    session = lowtide.attach(training.model, "exact", min_size=64)
    training.step()
    return session.ledger.raw_peak


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SlowLink:
    """The CPU as a device with a host, a millisecond of link for each block's bytes."""
    link = SlowLink()
    monkeypatch.setattr(host, "link_to", lambda device: link)
    monkeypatch.setattr("lowtide.planner.plan.link_ms", lambda device: 1.0 / (128 << 10))
    monkeypatch.setattr("lowtide.planner.plan._STAGING", 64 << 10)
    return link


@pytest.mark.usefixtures("_timed")
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
def test_a_plan_meets_its_budget_and_uses_it(share: float) -> None:
    training, budget = Training(), int(share * plain_nbytes())
    weights = [parameter.detach().clone() for parameter in training.model.parameters()]
    plan = training.plan(budget, steps=2)
    assert plan.held <= budget
    kept = [block for block, name in plan.choices.items() if name == KEEP]
    room = budget - plan.held
    assert len(kept) == {0.75: 4, 0.5: 2, 0.25: 0}[share]
    assert all(room < plan.ways[block][KEEP].held for block in plan.choices if block not in kept), "one more would fit"
    assert all(plan.ways[block][COMPRESS].cost_ms == pytest.approx(0.5) for block in plan.choices), "3 ms for six"
    assert sum(plan.ways[block][RECOMPUTE].cost_ms for block in plan.choices) == pytest.approx(4.0)
    assert (plan.plain_ms, plan.step_ms > 10) == (10.0, True)
    for parameter, weight in zip(training.model.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight) and parameter.grad is None
    assert not training.optimizer.state
    session = lowtide.attach(training.model, optimizer=training.optimizer, **plan.options)
    for _ in range(2):
        training.step()
    assert session.ledger.held_peak == pytest.approx(plan.held, rel=0.02)


@pytest.mark.usefixtures("_timed")
def test_what_the_link_has_time_for_goes_to_the_host(link: SlowLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the budget is plenty if what is left of the blocks can cross for nothing: nothing is compressed."""
    monkeypatch.setattr(Trial, "time_plainly", lambda trial, blocks: (10.0, 100.0, dict.fromkeys(blocks, 1.0)))
    training, budget = Training(), int(0.5 * plain_nbytes())
    planner = Planner.measure(
        training.step, training.model, state=[training.model, training.optimizer], modules="blocks.*", steps=2
    )
    plan = planner.plan(budget)
    assert set(plan.choices.values()) == {KEEP, OFFLOAD} and plan.held <= budget
    away = [block for block, name in plan.choices.items() if name == OFFLOAD]
    sent = link.sent
    session = lowtide.attach(training.model, **plan.options)
    training.step()
    session.detach()
    assert link.sent - sent >= 0.8 * sum(plan.ways[block][KEEP].held for block in away)
    assert not link.races
    # With time for half a block on the link, and room for nothing else, what crosses is compressed before.
    planner.overlap_ms = 0.5
    choices, _ = planner._choose(planner.outside + planner.trial.staging)
    assert set(choices.values()) == {BOTH}


@pytest.mark.usefixtures("_timed")
def test_where_all_fits_all_is_kept_and_the_text_says_so() -> None:
    plan = Training().plan("1GiB", steps=2)
    assert set(plan.choices.values()) == {KEEP} and plan.options == {"method": "exact"}
    lines = str(plan).splitlines()
    assert "held of 1.00 GiB; step " in lines[0]
    assert lines[2].split() == ["block", "choice", "plain", "held", "ms", "more", "ms", "on", "the", "link"]
    assert lines[4].split()[:2] == ["blocks.0", "keep"] and len(lines) == 4 + 6


def test_mistakes_are_refused() -> None:
    training = Training()
    with pytest.raises(SizeError, match=r"no mixture holds 1\.00 KiB or less"):
        training.plan(1024, steps=2)
    with pytest.raises(SizeError, match="budget is a number of bytes"):
        training.plan("some", steps=2)
    with pytest.raises(SizeError, match="at least two steps are run in each way"):
        training.plan("1GiB", steps=1)
    with pytest.raises(PolicyError, match="matches no module"):
        plan_blocks(training.step, training.model, budget="1GiB", state=[], modules="layer*")
    session = lowtide.attach(training.model)
    with pytest.raises(AttachError, match="is attached already"):
        training.plan("1GiB", steps=2)
    session.detach()
