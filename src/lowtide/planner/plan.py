"""For each block of a model: keep what it saves, compress it, send it to the host, or run the block again.

Costs are measured, not modelled. The step is timed plainly, with all blocks compressed and with all of them run again.
What compression costs in all is shared out among the blocks by the bytes that they save, what recomputation costs by
the time that they take in forward. What goes to the host takes its time on the link, whose speed is measured; as long
as that is no more than forward takes, it costs nothing. What each block holds in each way is read from the ledger. Then
the cheapest mixture within the budget is found exactly, and steps with it are run to see what it holds and takes; what
they teach goes into the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lowtide import sizes
from lowtide.errors import SizeError
from lowtide.planner.knapsack import Choice, Ways, cost_of, least_held, refusal, solve
from lowtide.planner.trial import BOTH, COMPRESS, KEEP, OFFLOAD, RECOMPUTE, Measured, Trial, device_of, link_ms
from lowtide.recompute import choose
from lowtide.reports.text import size, table
from lowtide.snapshot import Snapshot

_METHOD = "fixed"  # its bytes stay what they were when a plan was made; bounds that set themselves move on
_ROUNDS = 3  # of planning and measuring: what blocks hold together is not quite the sum of what each holds alone
_CLOSE = 0.02  # of the budget: a mixture that holds what was foreseen to within this is not planned again
_STAGING = 1 << 27
_SPARE = 0.1  # of a plain step: what a budget that is not used at all would cost, for what is kept is exact and free
_WEAR = 0.01  # of the link's time, as a cost: what is free on the device is not on the host, so it is not done for fun


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice for each block. ``held`` and ``step_ms`` were measured with it, ``plain_ms`` without Lowtide; ``ways``
    are the choices that each block had."""

    choices: Mapping[str, str]
    ways: Ways
    options: Mapping[str, Any]  # ``lowtide.attach(model, optimizer=optimizer, **plan.options)``
    budget: int
    foreseen: int
    held: int
    step_ms: float
    plain_ms: float

    def __str__(self) -> str:
        rows = []
        for block, choice in self.choices.items():
            way, plain = self.ways[block][choice], self.ways[block][KEEP]
            link = f"{way.link_ms:.3g}" if way.link_ms else ""
            rows.append((block, choice, size(plain.held), size(way.held), f"{way.cost_ms:.3g}", link))
        found = f"{size(self.held)} held of {size(self.budget)}"
        times = f"step {self.step_ms:.4g} ms, plain {self.plain_ms:.4g} ms"
        heads = ("block", "choice", "plain", "held", "ms more", "ms on the link")
        return "\n".join([f"{found}; {times}", "", *table(heads, rows)])


def plan_blocks(
    run_step: Callable[[], object],
    model: nn.Module,
    *,
    budget: int | str,
    state: Iterable[Any],
    method: str = _METHOD,
    modules: bool | str | Iterable[str] = True,
    steps: int = 5,
) -> Plan:
    """The fastest mixture that holds no more than ``budget`` between forward and backward.

    The steps that are run for it leave no trace in ``state`` (the model, the optimizer, ...; see ``find_batch_size``).
    Lowtide must not be attached. A budget that no mixture meets is refused, and the smallest one that can be is named.

    Args:
        run_step: takes one whole training step.
        budget: bytes, or a text as "4GiB": of what is saved for backward. The peak of a step is higher.
        method: how compressed blocks, and what lies outside of all blocks, are held: by default ``fixed``, since a plan
            counts on bytes, and those of a method that sets its own bounds change after it was made.
        modules: what counts as a block: patterns of module paths, or True (see ``attach``'s ``recompute``).
        steps: to run in each way; the first is not timed.
    """
    limit = sizes.parse(budget, what="budget")
    return Planner.measure(run_step, model, state=state, method=method, modules=modules, steps=steps).plan(limit)


@dataclass(slots=True)
class Planner:
    """What has been measured of a model, for any number of budgets."""

    trial: Trial
    ways: dict[str, dict[str, Choice]]
    outside: int  # bytes held outside of all blocks
    overlap_ms: float
    plain_ms: float

    @classmethod
    def measure(
        cls,
        run_step: Callable[[], object],
        model: nn.Module,
        *,
        state: Iterable[Any],
        method: str = _METHOD,
        modules: bool | str | Iterable[str] = True,
        steps: int = 5,
    ) -> Planner:
        """Run steps in each of the ways; the arguments are those of ``plan_blocks``."""
        if steps < 2:
            raise SizeError(
                f"at least two steps are run in each way, of which the first is not timed; got steps={steps!r}"
            )
        blocks = choose(model, modules)
        trial = Trial(run_step, model, Snapshot(state), method, steps, _STAGING)
        plain_ms, overlap_ms, forward_ms = trial.time_plainly(blocks)
        compressed, again = (trial.measure(dict.fromkeys(blocks, choice)) for choice in (COMPRESS, RECOMPUTE))
        ways = _ways(compressed, again, plain_ms, forward_ms, link_ms(device_of(model)))
        return cls(trial, ways, compressed.outside, overlap_ms, plain_ms)

    def plan(self, budget: int | str) -> Plan:
        """The fastest mixture within a budget; what is learned on the way to it serves no other one."""
        limit = sizes.parse(budget, what="budget")
        made: list[Plan] = []
        known = replace(self, ways={block: dict(ways) for block, ways in self.ways.items()})
        for _ in range(_ROUNDS):
            choices, foreseen = known._choose(limit)
            if any(choices == plan.choices for plan in made):
                break
            measured = self.trial.measure(choices)
            known._learn(choices, measured)
            made.append(
                Plan(choices, {block: dict(ways) for block, ways in known.ways.items()}, self.trial.options(choices),
                     limit, foreseen, measured.held, measured.step_ms, self.plain_ms)
            )  # fmt: skip
            if measured.held <= limit and abs(measured.held - foreseen) <= _CLOSE * limit:
                break
        fitting = [plan for plan in made if plan.held <= limit]
        return min(fitting, key=lambda plan: plan.step_ms) if fitting else min(made, key=lambda plan: plan.held)

    def _choose(self, limit: int) -> tuple[dict[str, str], int]:
        """The cheapest mixture, and the bytes it should hold. Where the host is used, there is less room by what is on
        its way there."""
        room = limit - self.outside
        here = {
            block: {name: way for name, way in ways.items() if name not in (OFFLOAD, BOTH)}
            for block, ways in self.ways.items()
        }
        kinds = ((here, 0), (self.ways, self.trial.staging))
        found = []
        for ways, staging in kinds:
            choices = solve(ways, room - staging, overlap_ms=self.overlap_ms, spare_ms=_SPARE * self.plain_ms)
            if choices is not None:
                held = sum(self.ways[block][name].held for block, name in choices.items()) + staging
                cost = cost_of(self.ways, choices, overlap_ms=self.overlap_ms)
                found.append((cost - _SPARE * self.plain_ms * held / max(room, 1), choices, held))
        if not found:
            least = min(least_held(ways) + staging for ways, staging in kinds)
            raise refusal(limit, blocks=least, outside=self.outside)
        _, choices, held = min(found, key=lambda item: item[0])
        return choices, held + self.outside

    def _learn(self, choices: Mapping[str, str], measured: Measured) -> None:
        """What blocks hold in this mixture is what they hold; what the step took beyond the costs was the link."""
        more = measured.step_ms - self.plain_ms - cost_of(self.ways, choices, overlap_ms=self.overlap_ms)
        if {OFFLOAD, BOTH} & set(choices.values()):
            self.overlap_ms = max(self.overlap_ms - max(more, 0.0), 0.0)
        for block, name in choices.items():
            self.ways[block][name] = replace(self.ways[block][name], held=measured.by_block[block])
        self.outside = measured.outside


def _ways(
    compressed: Measured,
    again: Measured,
    plain_ms: float,
    forward_ms: Mapping[str, float],
    link_ms: float | None,  # for a byte
) -> dict[str, dict[str, Choice]]:
    """What each choice costs for each block."""
    raw, all_raw = compressed.raw, max(sum(compressed.raw[block] for block in forward_ms), 1)
    all_forward = max(sum(forward_ms.values()), 1e-9)
    coding, running = (max(measured.step_ms - plain_ms, 0.0) for measured in (compressed, again))
    ways: dict[str, dict[str, Choice]] = {}
    for block in forward_ms:
        held, kept, coding_ms = compressed.by_block[block], compressed.kept[block], coding * raw[block] / all_raw
        ways[block] = {
            KEEP: Choice(raw[block], 0.0),
            COMPRESS: Choice(held, coding_ms),
            RECOMPUTE: Choice(again.by_block[block], running * forward_ms[block] / all_forward),
        }
        if link_ms is not None:
            whole, coded = link_ms * (raw[block] - kept), link_ms * (held - kept)
            ways[block][OFFLOAD] = Choice(kept, _WEAR * whole, whole)
            ways[block][BOTH] = Choice(kept, coding_ms + _WEAR * coded, coded)
    return ways
