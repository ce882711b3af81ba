"""The planner and neighbours: a tensor between two blocks is held once, as it is where either of them keeps it."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_chain import MIB, SURVEY, Chain, planner_of
from torch import Tensor, nn

import lowtide
from lowtide.errors import SizeError
from lowtide.planner import BOTH, COMPRESS, KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_EXACT, Choice, Planner
from lowtide.planner.knapsack import cost_of, held_by, lightest, solve

NAMES = (KEEP, COMPRESS, RECOMPUTE)
ALL_NAMES = (KEEP, COMPRESS, OFFLOAD, BOTH, RECOMPUTE, RECOMPUTE_EXACT)
choice = st.builds(Choice, st.integers(0, 10**6), st.floats(0, 100), st.sampled_from([0.0, 3.0, 50.0]))
pairs = st.dictionaries(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)), st.integers(-(10**6), 10**6))
chains = st.lists(st.tuples(st.fixed_dictionaries(dict.fromkeys(NAMES, choice)), pairs), min_size=4, max_size=5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chains, st.floats(0, 1), st.floats(0, 200))
def test_no_mixture_of_a_chain_is_cheaper(
    chain: list[tuple[dict[str, Choice], dict[tuple[str, str], int]]], share: float, overlap_ms: float
) -> None:
    """Against all mixtures. Bytes are rounded to 1000ths, times on the link to 40ths: ones so close may be missed."""
    ways = {str(number): choices for number, (choices, _) in enumerate(chain)}
    beside = {str(number): pairs for number, (_, pairs) in enumerate(chain)}
    mixtures = [dict(zip(ways, names, strict=True)) for names in itertools.product(NAMES, repeat=len(chain))]
    by_hand = [
        sum(
            max(ways[block][name].held + (beside[block].get((before, name), 0) if before else 0), 0)
            for block, name, before in zip(ways, mixture.values(), ("", *mixture.values()), strict=False)
        )
        for mixture in mixtures
    ]
    least = min(by_hand)
    assert held_by(ways, lightest(ways, beside), beside) == least
    if least:
        assert solve(ways, least - 1, beside=beside) is None
    room = int(least + share * (max(by_hand) - least))
    chosen = solve(ways, room, beside=beside, overlap_ms=overlap_ms)
    assert chosen is not None and by_hand[mixtures.index(chosen)] <= room
    cost = cost_of(ways, chosen, overlap_ms=overlap_ms)
    rounding = len(chain) * sum(max(way.link_ms for way in choices.values()) for choices, _ in chain) / 40
    for mixture, held in zip(mixtures, by_hand, strict=True):
        if held <= 0.994 * room:
            assert cost <= cost_of(ways, mixture, overlap_ms=overlap_ms) + rounding + 1e-9


def test_fifty_blocks_are_solved_in_no_time() -> None:
    """Six choices each, a link, and bytes that differ behind each choice; the room is used to within 2 %."""
    draw = random.Random(0)
    ways = {
        str(number): {
            name: Choice(draw.randrange(10**6), 10 * draw.random(), 5 * draw.random() * (name in (OFFLOAD, BOTH)))
            for name in ALL_NAMES
        }
        for number in range(50)
    }
    beside = {
        block: {pair: draw.randrange(-(10**5), 10**5) for pair in itertools.product(ALL_NAMES, repeat=2)}
        for block in ways
    }
    began = time.process_time()
    chosen = solve(ways, 10**7, beside=beside, overlap_ms=20.0, spare_ms=1.0)
    assert time.process_time() - began < 5, "a plain loop over states would take minutes"
    assert chosen is not None and 0.98 * 10**7 <= held_by(ways, chosen, beside) <= 10**7


def test_a_kept_neighbour_pays_for_what_lies_between() -> None:
    """Two blocks share 60 bytes: kept side by side they fit where one that is kept for itself would not."""
    block = {KEEP: Choice(100, 0.0), RECOMPUTE: Choice(10, 5.0)}
    ways = {"a": block, "b": block, "c": block}
    beside = {name: {(RECOMPUTE, KEEP): 60, (KEEP, RECOMPUTE): -10} for name in "bc"}
    assert solve(ways, 210, beside=beside) == {"a": KEEP, "b": KEEP, "c": RECOMPUTE}
    assert solve(ways, 150, beside=beside) == {"a": KEEP, "b": RECOMPUTE, "c": RECOMPUTE}
    assert lightest(ways, beside) == {"a": RECOMPUTE, "b": RECOMPUTE, "c": RECOMPUTE}


@pytest.mark.parametrize("scale", [1.0, 1 / 64])
@pytest.mark.parametrize("gib", [2, 4, 8])
def test_neighbours_are_foreseen(gib: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first mixture holds is what was planned, whoever is charged for what lies between two blocks."""
    chain, budget = Chain(scale), int(scale * (gib << 30))
    planner = planner_of(chain, monkeypatch)
    assert len(chain.ran) == SURVEY
    plan = planner.plan(budget)
    assert len(chain.ran) == SURVEY + 1
    assert plan.held == pytest.approx(plan.foreseen, rel=0.002)
    assert 0.95 * budget <= plan.held <= budget
    assert sum(plan.ways[block][name].held for block, name in plan.choices.items()) + chain.outside == plan.held


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gib", [2, 4, 8])
def test_what_was_not_foreseen_is_made_up_for(gib: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is coded takes more than it did in the survey, and in each mixture and block another amount."""

    def surcharge(choices: Mapping[str, str], block: str) -> float:
        return (
            random.Random(f"{seed} {sorted(choices.items())} {block}").uniform(1.1, 1.4)
            if len(chain.ran) > SURVEY
            else 1
        )

    chain, budget = Chain(surcharge=surcharge), gib << 30
    plan = planner_of(chain, monkeypatch).plan(budget)
    assert 0.95 * budget <= plan.held <= budget
    assert len(chain.ran) <= SURVEY + 6


def test_more_is_planned_where_less_is_held_than_foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, budget = Chain(), 2 << 30
    chain.surcharge = lambda choices, block: 0.6 if len(chain.ran) > SURVEY else 1.0
    plan = planner_of(chain, monkeypatch).plan(budget)
    assert 0.95 * budget <= plan.held <= budget


def test_a_budget_that_none_meets_is_refused_with_the_smallest_that_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain()
    planner = planner_of(chain, monkeypatch)
    with pytest.raises(SizeError, match=r"no mixture holds 300\.00 MiB or less: of those that were run") as refused:
        planner.plan("300MiB")
    assert "130.00 MiB lie outside of the blocks" in str(refused.value)
    least = int(str(refused.value).partition("(")[2].split()[0])
    assert least == min(chain.measure(choices).held for choices in list(chain.ran))
    assert planner.plan(least).held == least
    with pytest.raises(SizeError, match=f"{least} bytes"):
        planner.plan(least - 1)


def test_nothing_beyond_the_budget_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtures that were planned hold far more than any that was run before: one of those is taken, or none."""
    chain = Chain()
    planner = planner_of(chain, monkeypatch)
    small = min(measured.held for _, measured in planner.seen)
    chain.surcharge = lambda choices, block: 100.0
    plan = planner.plan(small + 100 * MIB)
    assert plan.held == small and plan.choices in chain.ran[:SURVEY]
    with pytest.raises(SizeError, match=f"The smallest budget is .* \\({small} bytes\\)"):
        planner.plan(small - MIB)


class Backwards(nn.Module):
    """Runs its blocks from the last to the first; each ends in a ReLU, so that its output is saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in reversed(self.layers):
            x = block(x)
        return x


def test_blocks_are_a_chain_in_the_order_in_which_they_run() -> None:
    """Kept between blocks that are not, a block holds its input, too; kept behind one that is kept, its output only."""
    torch.manual_seed(0)
    model, x = Backwards(), torch.randn(512, 32, requires_grad=True)
    planner = Planner.measure(lambda: model(x).square().mean().backward(), model, state=[model], modules="layers.*")
    assert list(planner.ways) == [f"layers.{number}" for number in (5, 4, 3, 2, 1, 0)]
    nbytes = 512 * 32 * 4
    for number in range(5):
        block = f"layers.{number}"
        assert planner.ways[block][KEEP].held == nbytes
        assert planner.beside[block][COMPRESS, KEEP] == nbytes
        for again in (RECOMPUTE, RECOMPUTE_EXACT):
            assert planner.ways[block][again].held + planner.beside[block][KEEP, again] == 0
            assert planner.beside[block][again, KEEP] == nbytes
        assert planner.ways[block][RECOMPUTE].held < planner.ways[block][RECOMPUTE_EXACT].held == nbytes
    plan = planner.plan(4 * nbytes)
    session = lowtide.attach(model, **plan.options)
    model(x)
    assert plan.held == pytest.approx(plan.foreseen, rel=0.02) and session.ledger.held_peak <= 4 * nbytes
    session.detach()
