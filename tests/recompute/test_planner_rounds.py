"""What a plan is measured with: steps that follow one another, and bytes that are corrected block by block."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planner_chain import SURVEY, Chain, planner_of
from torch import Tensor, nn

import lowtide
from lowtide.ledger import Ledger
from lowtide.planner import COMPRESS, KEEP, RECOMPUTE, Plan, Planner
from lowtide.planner.plan import _fastest
from lowtide.planner.trial import Trial
from lowtide.snapshot import Snapshot


class Fading(nn.Module):
    """Activations of the first four steps are dense, those of all later ones have eight zeros in nine places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(36, 36), nn.ReLU()) for _ in range(6)])
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        fades = (torch.arange(36) >= 4) & (self.steps >= 4)
        self.steps += 1
        for block in self.layers:
            x = block(x.masked_fill(fades, 0.0))
        return x


def held_in_training(model: Fading, x: Tensor, options: Mapping[str, Any]) -> int:
    session = lowtide.attach(model, min_size=64, **options)
    for _ in range(8):
        session.ledger.held_peak = 0
        model(x).square().mean().backward()
        session.step()
    session.detach()
    return session.ledger.held_peak


@pytest.mark.usefixtures("_timed")
def test_what_is_planned_is_what_training_holds_after_its_first_steps() -> None:
    """Had the model been put back before bytes were counted, it would be the dense ones."""
    torch.manual_seed(0)
    model, x = Fading(), torch.randn(512, 36, requires_grad=True)
    planner = Planner.measure(
        lambda: model(x).square().mean().backward(), model, state=[model], modules="layers.*", steps=2
    )
    assert model.steps == 0
    nbytes = 512 * 36 * 4
    plan = planner.plan(3 * nbytes)
    assert RECOMPUTE in plan.choices.values() or COMPRESS in plan.choices.values()
    assert held_in_training(model, x, plan.options) == pytest.approx(plan.held, rel=0.05)


def test_steps_go_on_until_they_hold_the_same_and_the_most_of_them_counts() -> None:
    """Sizes fall for ten steps and then sway by half a percent: a budget must have room for the larger ones."""
    model, x, ledger = nn.Linear(4, 4), torch.randn(2, 4), Ledger()
    taken: list[int] = []

    def step() -> None:
        ledger.held = max(2000 - 100 * len(taken), 1000) + 5 * (len(taken) % 2)
        taken.append(ledger.held)
        model(x)

    session: Any = SimpleNamespace(ledger=ledger, report=lambda: None, step=lambda: None)
    held = Trial(step, model, Snapshot([model]), "fixed", steps=2, staging=0)._settle(session, {})
    assert 12 <= len(taken) < 16 and held.total == 1005


@pytest.mark.parametrize(("times", "gib"), [(1.5, 1.4), (1.5, 1.5), (2.5, 1.4), (2.5, 1.5), (2.5, 1.75)])
def test_what_depends_on_neighbours_is_corrected_block_by_block(
    times: float, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A boundary between a compressed block and one that is run again takes more than between equals, which no mixture
    of the survey has shown. Every third block is slow to run again, so that it takes both to be fast."""

    def surcharge(choices: Mapping[str, str], block: str) -> float:
        before = dict(zip(list(choices)[1:], choices.values(), strict=False)).get(block)
        return times if {before, choices[block]} == {COMPRESS, RECOMPUTE} else 1.0

    chain, budget = Chain(surcharge=surcharge), int(gib * (1 << 30))
    plan = planner_of(chain, monkeypatch, lambda block: 1.0 if int(block.split(".")[1]) % 3 else 3.0).plan(budget)
    assert 0.95 * budget <= plan.held <= budget
    assert len(chain.ran) <= SURVEY + 6


def test_no_mixture_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where blocks are too coarse for the budget, the first mixture that is found again is the last one run."""
    chain = Chain()
    planner = planner_of(chain, monkeypatch)
    plan = planner.plan("1350MiB")
    planned = chain.ran[SURVEY:]
    assert len(planned) == len({tuple(choices.values()) for choices in planned}) < 6
    assert plan.choices in chain.ran and plan.held <= 1350 << 20


def test_the_more_mixtures_hold_too_much_the_more_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads grow from one mixture to the next, so that each holds more than what was seen before foretells."""
    chain, budget = Chain(), 2 << 30
    chain.surcharge = lambda choices, block: 1 + 0.04 * max(len(chain.ran) - SURVEY, 0)
    plan = planner_of(chain, monkeypatch).plan(budget)
    assert 0.95 * budget <= plan.held <= budget
    assert plan.choices in chain.ran[SURVEY:]


def test_a_mixture_that_was_run_is_passed_over_until_the_budget_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has held too much, and seems to fit by what was learnt since: a smaller one is looked for."""
    planner = planner_of(Chain(), monkeypatch)
    large, small = ({**dict.fromkeys(planner.ways, KEEP), "layers.0": name} for name in (COMPRESS, RECOMPUTE))
    monkeypatch.setattr(Planner, "_choose", lambda _, target: (large, 98) if target >= 98 else (small, 96))

    def ran(choices: dict[str, str], held: int) -> Plan:
        return Plan(choices, {}, {}, 100, 100, held, 60.0, 55.0)

    assert planner._choose_anew(100, 100, []) == (large, 98)
    assert planner._choose_anew(100, 100, [ran(large, 101)]) == (small, 96)
    assert planner._choose_anew(100, 100, [ran(large, 94)]) == (small, 96)
    assert planner._choose_anew(100, 100, [ran(large, 97)]) is None, "it is met"
    assert planner._choose_anew(100, 100, [ran(large, 101), ran(small, 94)]) is None, "nothing else fits"


def test_of_plans_that_are_about_as_fast_the_one_that_uses_the_budget_counts() -> None:
    def ran(held: int, step_ms: float) -> Plan:
        return Plan({}, {}, {}, 100, 100, held, step_ms, 55.0)

    assert _fastest([ran(93, 100.0), ran(97, 120.0), ran(101, 80.0)]) == ran(97, 120.0)
    assert _fastest([ran(93, 100.0), ran(97, 130.0)]) == ran(93, 100.0)
    assert _fastest([ran(101, 80.0)]) is None
