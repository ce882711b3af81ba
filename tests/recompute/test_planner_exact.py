"""Blocks that are run again from inputs as they were: exact, and what a plan needs between small and large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from planner_chain import SURVEY, Chain, planner_of
from torch import Tensor, nn

import lowtide
from lowtide.planner import COMPRESS, KEEP, RECOMPUTE, RECOMPUTE_EXACT, Plan, Planner
from lowtide.planner.plan import _Round
from lowtide.planner.trial import Measured


class Blocks(nn.Sequential):
    """All that is saved is saved in a block. The input of the first one is the model's, which its caller holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(4)])


class Residual(Blocks):
    """What a block gets is a sum, which the block before does not hold even if it is kept."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


NBYTES = 512 * 32 * 4  # of each tensor between two blocks
SWAYS = (-0.09, -0.05, 0.03, 0.05, 0.08, 0.12)


def surveyed(model: nn.Module) -> tuple[Planner, Tensor]:
    x = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    planner = Planner.measure(lambda: model(x).square().mean().backward(), model, state=[model], steps=2)
    return planner, x


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("_timed")
@pytest.mark.filterwarnings("ignore:.*compressed none of them")
@pytest.mark.parametrize("choice", [RECOMPUTE_EXACT, RECOMPUTE])
def test_from_inputs_as_they_were_gradients_are_bit_equal(choice: str) -> None:
    """Nor is there a warning, an error here, of a rule that matched nothing: the first input is not for rules."""
    model = Blocks()
    planner, x = surveyed(model)
    expected = gradients(model, x)
    session = lowtide.attach(model, **planner.trial.options(dict.fromkeys(planner.ways, choice)))
    same = [torch.equal(*pair) for pair in zip(gradients(model, x), expected, strict=True)]
    assert len(same) == 16 and all(same) == (choice == RECOMPUTE_EXACT)
    assert session.ledger.held_peak == 3 * NBYTES or choice == RECOMPUTE
    session.detach()


@pytest.mark.usefixtures("_timed")
def test_a_mixture_of_both_says_which_inputs_are_kept() -> None:
    planner, x = surveyed(Blocks())
    choices = dict(zip(planner.ways, (KEEP, RECOMPUTE, RECOMPUTE_EXACT, RECOMPUTE), strict=True))
    options = planner.trial.options(choices)
    assert options["recompute"] == ["1", "2", "3"]
    model = Blocks()
    session = lowtide.attach(model, **options)
    model(x).sum().backward()
    boundaries = {name: entry for name, entry in session.ledger.sites.items() if name.endswith(":recompute.input")}
    assert {name[0]: entry.codec for name, entry in boundaries.items()} == {"1": "sz", "2": "kept", "3": "sz"}
    assert boundaries["2:recompute.input"].held_nbytes == NBYTES
    session.detach()


@pytest.mark.usefixtures("_timed")
def test_what_no_kept_neighbour_holds_is_charged_in_full() -> None:
    planner, _ = surveyed(Residual())
    for block, ways in list(planner.ways.items())[1:]:
        assert ways[RECOMPUTE_EXACT].held == NBYTES
        assert abs(planner.beside[block][KEEP, RECOMPUTE_EXACT]) < 0.1 * NBYTES


def test_costs_are_those_of_running_again_without_coding_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain()
    planner = planner_of(chain, monkeypatch)
    again, exact = (chain.measure(dict.fromkeys(chain.output, name)).step_ms for name in (RECOMPUTE, RECOMPUTE_EXACT))
    ways = planner.ways
    assert sum(ways[block][RECOMPUTE].cost_ms for block in ways) == pytest.approx(again - 55)
    assert sum(ways[block][RECOMPUTE_EXACT].cost_ms for block in ways) == pytest.approx(exact - 55)
    for block in ways:
        coding_ms = ways[block][RECOMPUTE].cost_ms - ways[block][RECOMPUTE_EXACT].cost_ms
        assert coding_ms == pytest.approx((again - exact) * chain.input[block] / sum(chain.input.values()))


class Late(Chain):
    """Something else was going on while blocks ran again from inputs that were kept."""

    def measure(self, choices: Mapping[str, str]) -> Measured:
        measured = super().measure(choices)
        return replace(measured, step_ms=300.0) if set(choices.values()) == {RECOMPUTE_EXACT} else measured


def test_what_is_not_coded_is_never_dearer_however_noisy_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for ways in planner_of(Late(), monkeypatch).ways.values():
        assert ways[RECOMPUTE_EXACT].cost_ms == ways[RECOMPUTE].cost_ms > 0


def test_payloads_that_were_underrated_say_nothing_about_inputs_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain()
    planner = planner_of(chain, monkeypatch)
    chain.surcharge = lambda choices, block: 1.3
    choices = dict.fromkeys(chain.output, RECOMPUTE)
    known = planner._corrected([_Round(choices, chain.measure(choices))], planner.overlap_ms)
    for block, ways in planner.ways.items():
        assert known.ways[block][COMPRESS].held == pytest.approx(1.3 * ways[COMPRESS].held, rel=1e-6)
        assert known.ways[block][RECOMPUTE_EXACT] == ways[RECOMPUTE_EXACT]


def plan_with_sway(gib: int, sway: float, monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> Plan:
    """Payloads of the mixtures that are planned are larger than foreseen and smaller in turns, by a share ``sway``, and
    larger where a compressed block stands beside one that is run again."""

    def surcharge(choices: Mapping[str, str], block: str) -> float:
        planned = len(chain.ran) - SURVEY
        before = dict(zip(list(choices)[1:], choices.values(), strict=False)).get(block)
        apart = 1.2 if {before, choices[block]} == {COMPRESS, RECOMPUTE} else 1.0
        return apart * (1 + sway * (planned % 2 * 2 - 1) * (planned > 0))

    chain = Chain(surcharge=surcharge)
    planner = planner_of(chain, monkeypatch)
    for ways in planner.ways.values():
        ways.pop(without, None)
    planner.seen = [(choices, measured) for choices, measured in planner.seen if without not in choices.values()]
    plan = planner.plan(gib << 30)
    assert len(chain.ran) <= SURVEY + 6
    return plan


@pytest.mark.parametrize("sway", SWAYS)
@pytest.mark.parametrize("gib", [2, 4, 8])
def test_budgets_are_met_although_payloads_sway(gib: int, sway: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_with_sway(gib, sway, monkeypatch)
    assert 0.95 * plan.budget <= plan.held <= plan.budget
    assert RECOMPUTE_EXACT in plan.choices.values()


def test_without_that_choice_the_smallest_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all of it is payloads then, and between those of a block and all that it saves there is nothing."""
    plans = [plan_with_sway(2, sway, monkeypatch, without=RECOMPUTE_EXACT) for sway in SWAYS]
    assert min(plan.held / plan.budget for plan in plans) < 0.94
