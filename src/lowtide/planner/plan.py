"""For each block of a model: keep what it saves, compress it, send it to the host, or run the block again.

Costs are measured, not modelled. The step is timed plainly, with all blocks compressed, and with all of them run again,
from inputs that are compressed and from inputs that are kept. What compression costs in all is shared out among the
blocks by the bytes that they save, what running again costs by the time that they take in forward, and what it costs
to compress inputs by the bytes of those. What goes to the host takes its time on the link, whose speed is measured; as
long as that is no more than forward takes, it costs nothing.

What each block holds in each way is read from the ledger. A tensor between two blocks is held once, as it is if either
of them keeps it, so steps are run with mixtures, too, in which kept blocks alternate with others: what a block holds is
known by its own choice and that of the block before. Then the cheapest mixture within the budget is found exactly, and
steps with it are run to see what it holds and takes. Where that is not what was foreseen, bytes are corrected block by
block, and the next mixture is planned with those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from lowtide import sizes
from lowtide.errors import SizeError
from lowtide.planner.knapsack import Choice, Pair, Ways, cost_of, held_by, held_by_block, lightest, refusal, solve
from lowtide.planner.trial import (
    AGAIN,
    BOTH,
    COMPRESS,
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_EXACT,
    Measured,
    Trial,
    device_of,
    link_ms,
)
from lowtide.recompute import choose
from lowtide.reports.text import size, table
from lowtide.snapshot import Snapshot

_METHOD = "fixed"  # its bytes stay what they were when a plan was made; bounds that set themselves move on
_ROUNDS = 6  # of planning and measuring: what blocks hold together is not quite what pairs of them have shown
_CLOSE = 0.02  # of the budget: a mixture that leaves no more of it unused is not planned again
_MET = 0.05  # of the budget: as long as more than that is left unused, mixtures that were not run yet are looked for
_MARGIN = 0.005  # of the budget, left free after a mixture that has held too much; twice that after another, and so on
_MOST_OFF = 2.0  # times what was foreseen: payloads that were not seen are not expected to be off by more
# Times the fastest step: plans whose steps are this close to it are told apart by what they hold, for times are noisy.
# (The steps of one plan have taken 67 ms, then 83 ms, on an H200.)
_ALIKE = 1.25
_STAGING = 1 << 27
_SPARE = 0.1  # of a plain step: what a budget that is not used at all would cost, for what is kept is exact and free
_CODED = (COMPRESS, RECOMPUTE)  # choices whose bytes on the device are payloads, which vary
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


class _Round(NamedTuple):
    """A mixture that was planned and run."""

    choices: dict[str, str]
    measured: Measured


@dataclass(slots=True)
class Planner:
    """What has been measured of a model, for any number of budgets. Blocks are in the order in which they run."""

    trial: Trial
    ways: dict[str, dict[str, Choice]]  # behind a block of the same choice
    beside: dict[str, dict[Pair, int]]  # by block: bytes more, or less, behind one of another choice
    outside: int  # bytes held outside of all blocks
    overlap_ms: float
    plain_ms: float
    seen: list[tuple[dict[str, str], Measured]]  # every mixture that was run to find out the above

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
        trial = Trial(run_step, model, Snapshot(state), method, steps, _STAGING)
        plain_ms, overlap_ms, forward_ms = trial.time_plainly(choose(model, modules))
        mixtures = [dict.fromkeys(forward_ms, choice) for choice in (COMPRESS, RECOMPUTE, RECOMPUTE_EXACT)]
        if len(forward_ms) > 1:
            for other in (COMPRESS, RECOMPUTE):
                mixtures += [_alternate(forward_ms, KEEP, other), _alternate(forward_ms, other, KEEP)]
        seen = [(choices, trial.measure(choices)) for choices in mixtures]
        compressed, again, exact = (measured for _, measured in seen[:3])
        ways = _ways(compressed, again, exact, plain_ms, forward_ms, link_ms(device_of(model)))
        planner = cls(trial, ways, {block: {} for block in ways}, compressed.outside, overlap_ms, plain_ms, seen)
        planner._learn_held(seen)
        for block, pairs in planner.beside.items():
            # Behind what no longer lies on the device, as behind what is compressed.
            pairs |= {(away, KEEP): pairs.get((COMPRESS, KEEP), 0) for away in (OFFLOAD, BOTH)}
            # What of a block's input a kept neighbour holds is the same share of it, however the block holds the rest.
            coded, whole = (ways[block][name].held for name in AGAIN)
            pairs[KEEP, RECOMPUTE_EXACT] = pairs.get((KEEP, RECOMPUTE), 0) * whole // max(coded, 1)
        return planner

    def plan(self, budget: int | str) -> Plan:
        """The fastest mixture within a budget; what is learned on the way to it serves no other one.

        It ends with a mixture that uses the budget, or when nothing better is known than what was run.
        """
        limit = sizes.parse(budget, what="budget")
        known, rounds, made, margin = self, list[_Round](), list[Plan](), 0.0
        while len(rounds) < _ROUNDS:
            found = known._choose_anew(int((1 - margin) * limit), limit, made)
            if found is None:
                break
            choices, foreseen = found
            measured = self.trial.measure(choices)
            made.append(self._plan(choices, measured, limit, foreseen))
            if (1 - _CLOSE) * limit <= measured.held <= limit:
                break
            rounds.append(_Round(choices, measured))
            margin = min(max(2 * margin, _MARGIN), _MET) if measured.held > limit else margin / 2
            known = self._corrected(rounds, known.overlap_ms)
        surveyed = [self._plan(choices, measured, limit, measured.held) for choices, measured in self.seen]
        plan = _fastest(made) or _fastest(surveyed)
        if plan is None:
            raise refusal(limit, least=min(plan.held for plan in made + surveyed), outside=self.outside)
        return plan

    def _corrected(self, rounds: list[_Round], overlap_ms: float) -> Planner:
        """The same with what mixtures have really held: block by block where they have shown it, and elsewhere off by
        the same share, or else the next mixture would be one of all that is underrated."""
        share = self._share_held(rounds)
        ways = {
            block: {
                name: replace(way, held=int(share * way.held)) if name in _CODED else way for name, way in ways.items()
            }
            for block, ways in self.ways.items()
        }
        beside = {
            block: {pair: int(share * more) if pair[1] in _CODED else more for pair, more in pairs.items()}
            for block, pairs in self.beside.items()
        }
        known = replace(self, ways=ways, beside=beside, overlap_ms=overlap_ms)
        known._learn_held(rounds)
        known._learn_rest(rounds)
        return known

    def _share_held(self, rounds: list[_Round]) -> float:
        """Payloads beside what the survey has shown of them."""
        held = foreseen = 0
        for choices, measured in rounds:
            coded = [block for block, name in choices.items() if name in _CODED]
            held += sum(measured.by_block[block] for block in coded)
            by_block = held_by_block(self.ways, choices, self.beside)
            foreseen += sum(by_block[block] for block in coded)
        return min(max(held / foreseen, 1 / _MOST_OFF), _MOST_OFF) if held and foreseen else 1.0

    def _plan(self, choices: dict[str, str], measured: Measured, limit: int, foreseen: int) -> Plan:
        ways = {block: dict(ways) for block, ways in self.ways.items()}
        for block, name in choices.items():
            ways[block][name] = replace(ways[block][name], held=measured.by_block[block])
        options = self.trial.options(choices)
        return Plan(choices, ways, options, limit, foreseen, measured.held, measured.step_ms, self.plain_ms)

    def _choose_anew(self, target: int, limit: int, made: list[Plan]) -> tuple[dict[str, str], int] | None:
        """The cheapest mixture; None if it is one of those that were run, for then nothing better is known. As long as
        none of those has met the budget they are passed over for smaller ones, because payloads vary: what has held too
        much may seem to fit by what was seen since."""
        least = (1 - _MET) * limit
        is_met = any(least <= plan.held <= limit for plan in made)
        while True:
            choices, foreseen = self._choose(target)
            if all(plan.choices != choices for plan in made):
                return choices, foreseen
            if is_met or not least <= foreseen <= target:
                return None
            target = foreseen - 1

    def _choose(self, target: int) -> tuple[dict[str, str], int]:
        """The cheapest mixture, or the one that holds the least if none is small enough, and the bytes it should hold.
        Where the host is used, there is less room by what is on its way there."""
        room = target - self.outside
        here = {
            block: {name: way for name, way in ways.items() if name not in (OFFLOAD, BOTH)}
            for block, ways in self.ways.items()
        }
        spare_ms = _SPARE * self.plain_ms
        found, least = [], []
        for ways, staging in ((here, 0), (self.ways, self.trial.staging)):
            choices = solve(ways, room - staging, beside=self.beside, overlap_ms=self.overlap_ms, spare_ms=spare_ms)
            if choices is not None:
                held = held_by(ways, choices, self.beside) + staging
                cost = cost_of(ways, choices, overlap_ms=self.overlap_ms)
                found.append((cost - spare_ms * held / max(room, 1), choices, held))
            choices = lightest(ways, self.beside)
            held = held_by(ways, choices, self.beside) + staging
            least.append((held, choices, held))
        _, choices, held = min(found or least, key=lambda item: item[0])
        return choices, held + self.outside

    def _learn_rest(self, rounds: list[_Round]) -> None:
        """What no block holds lies outside of them; what the last step took beyond the costs was the link."""
        rest = [
            measured.held - sum(measured.by_block.values()) - self.trial.staging * _uses_host(choices)
            for choices, measured in rounds
        ]
        self.outside = sum(rest) // len(rest)
        choices, measured = rounds[-1]
        more = measured.step_ms - self.plain_ms - cost_of(self.ways, choices, overlap_ms=self.overlap_ms)
        if _uses_host(choices):
            self.overlap_ms = max(self.overlap_ms - max(more, 0.0), 0.0)

    def _learn_held(self, rounds: Sequence[tuple[Mapping[str, str], Measured]]) -> None:
        """What blocks have held in these mixtures, on average, is what they hold behind such neighbours. Payloads vary:
        who believes the last mixture alone plans too much and too little in turns."""
        seen = defaultdict[tuple[str, str, str], list[int]](list)
        for choices, measured in rounds:
            before = ""
            for block, name in choices.items():
                # What runs again leaves the same to the next block, whatever it runs from.
                for alike in AGAIN if before in AGAIN else (before,):
                    seen[block, alike, name].append(measured.by_block[block])
                before = name
        for (block, before, name), nbytes in seen.items():
            way, held = self.ways[block][name], sum(nbytes) // len(nbytes)
            if before:
                self.beside[block][before, name] = held - way.held
            else:
                self.ways[block][name] = replace(way, held=held)


def _uses_host(choices: Mapping[str, str]) -> bool:
    return bool({OFFLOAD, BOTH} & set(choices.values()))


def _fastest(plans: list[Plan]) -> Plan | None:
    """Of those within their budget the fastest, or the one that holds the most of those that are hardly slower."""
    fitting = [plan for plan in plans if plan.held <= plan.budget]
    fastest = min((plan.step_ms for plan in fitting), default=0.0)
    return max((plan for plan in fitting if plan.step_ms <= _ALIKE * fastest), key=lambda plan: plan.held, default=None)


def _alternate(blocks: Iterable[str], first: str, second: str) -> dict[str, str]:
    return {block: second if number % 2 else first for number, block in enumerate(blocks)}


def _ways(
    compressed: Measured,
    again: Measured,
    exact: Measured,  # run again as well, from inputs as they were
    plain_ms: float,
    forward_ms: Mapping[str, float],
    link_ms: float | None,  # for a byte
) -> dict[str, dict[str, Choice]]:
    """What each choice costs for each block. A tensor that two blocks save is counted where it was saved first if it is
    kept, or run again, and where its values are read if it is compressed: hence the bytes of ``again`` for KEEP."""
    coding, coding_inputs = (max(measured.step_ms - plain_ms, 0.0) for measured in (compressed, again))
    running = min(max(exact.step_ms - plain_ms, 0.0), coding_inputs)  # it is the same, less the coding
    coding_inputs -= running
    raw, whole = compressed.raw, exact.by_block
    all_raw, all_whole = (max(sum(nbytes[block] for block in forward_ms), 1) for nbytes in (raw, whole))
    all_forward = max(sum(forward_ms.values()), 1e-9)
    ways: dict[str, dict[str, Choice]] = {}
    for block in forward_ms:
        held, kept, coding_ms = compressed.by_block[block], compressed.kept[block], coding * raw[block] / all_raw
        running_ms = running * forward_ms[block] / all_forward
        ways[block] = {
            KEEP: Choice(again.raw[block], 0.0),
            COMPRESS: Choice(held, coding_ms),
            RECOMPUTE: Choice(again.by_block[block], running_ms + coding_inputs * whole[block] / all_whole),
            RECOMPUTE_EXACT: Choice(whole[block], running_ms),
        }
        if link_ms is not None:
            across, coded = link_ms * (raw[block] - kept), link_ms * (held - kept)
            ways[block][OFFLOAD] = Choice(kept, _WEAR * across, across)
            ways[block][BOTH] = Choice(kept, coding_ms + _WEAR * coded, coded)
    return ways
