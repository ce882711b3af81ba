"""For each block of a model: hold what it saves as it is, compress it, or run the block again, within a byte budget.

Costs are measured, not modelled. The step is timed plainly, with all blocks compressed and with all of them run again.
What compression costs in all is shared out among the blocks by the bytes that they save, what recomputation costs by
the time that they take in forward. What each block holds in each way is read from the ledger. Then the cheapest mixture
within the budget is found exactly (a knapsack with three choices a block), and a step with it is run to see what it
holds.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide import sizes
from lowtide.errors import SizeError
from lowtide.policies.rules import Rule
from lowtide.recompute import choose
from lowtide.reports.text import size, table
from lowtide.session import DEFAULT_METHOD, Session, attach
from lowtide.snapshot import Snapshot

KEEP, COMPRESS, RECOMPUTE = "keep", "compress", "recompute"
_BINS = 2000  # of the budget; a block's bytes are rounded up to whole ones
_ROUNDS = 4  # of planning and measuring: what blocks hold together is not quite the sum of what each holds alone


@dataclass(frozen=True, slots=True)
class Choice:
    """What one way to hold a block's saves costs: bytes between forward and backward, milliseconds a step."""

    held: int
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A choice for each block. ``held`` and ``step_ms`` were measured with it, ``plain_ms`` without Lowtide; ``ways``
    are the choices that each block had."""

    choices: Mapping[str, str]
    ways: Mapping[str, Mapping[str, Choice]]
    options: Mapping[str, Any]  # ``lowtide.attach(model, optimizer=optimizer, **plan.options)``
    budget: int
    held: int
    step_ms: float
    plain_ms: float

    def __str__(self) -> str:
        rows = []
        for block, choice in self.choices.items():
            way, plain = self.ways[block][choice], self.ways[block][KEEP]
            rows.append((block, choice, size(plain.held), size(way.held), f"{way.cost_ms:.3g}"))
        found = f"{size(self.held)} held of {size(self.budget)}"
        times = f"step {self.step_ms:.4g} ms, plain {self.plain_ms:.4g} ms"
        return "\n".join([f"{found}; {times}", "", *table(("block", "choice", "plain", "held", "ms more"), rows)])


def plan_blocks(
    run_step: Callable[[], object],
    model: nn.Module,
    *,
    budget: int | str,
    state: Iterable[Any],
    method: str = DEFAULT_METHOD,
    modules: bool | str | Iterable[str] = True,
    steps: int = 5,
) -> Plan:
    """The fastest mixture that holds no more than ``budget`` between forward and backward.

    The steps that are run for it leave no trace in ``state`` (the model, the optimizer, ...; see ``find_batch_size``).
    Lowtide must not be attached. A budget that no mixture meets is refused, and the smallest one that can be is named.

    Args:
        run_step: takes one whole training step.
        budget: bytes, or a text as "4GiB": of what is saved for backward, by the ledger. The peak of a step is higher.
        method: how compressed blocks, and what lies outside of all blocks, are held.
        modules: what counts as a block: patterns of module paths, or True (see ``attach``'s ``recompute``).
        steps: to run in each way; the first is not timed.
    """
    limit = sizes.parse(budget, what="budget")
    if steps < 2:
        raise SizeError(f"at least two steps are run in each way, of which the first is not timed; got steps={steps!r}")
    blocks = choose(model, modules)
    trial = _Trial(run_step, model, Snapshot(state), method, steps)
    plain_ms, forward_ms = trial.time_plainly(blocks)
    whole = {choice: trial.measure(dict.fromkeys(blocks, choice)) for choice in (COMPRESS, RECOMPUTE)}
    ways = _ways(blocks, whole, plain_ms, forward_ms)
    room = limit - whole[COMPRESS].outside
    for _ in range(_ROUNDS):
        choices = _solve(ways, room, taken=limit - room)
        measured = trial.measure(choices)
        if measured.held <= limit:
            break
        room -= measured.held - limit
    return Plan(choices, ways, trial.options(choices), limit, measured.held, measured.step_ms, plain_ms)


@dataclass(frozen=True, slots=True)
class _Measured:
    step_ms: float
    held: int  # at its highest
    raw: Mapping[str, int]  # by block
    by_block: Mapping[str, int]
    outside: int
    paths: frozenset[str]  # where something was saved


@dataclass(slots=True)
class _Trial:
    """Runs steps in one way after the other, each from the same state."""

    run_step: Callable[[], object]
    model: nn.Module
    before: Snapshot
    method: str
    steps: int
    paths: frozenset[str] = frozenset()  # where something is saved, from the first way that is measured: compressed

    def options(self, choices: Mapping[str, str]) -> dict[str, Any]:
        kept = [block for block, choice in choices.items() if choice == KEEP]
        if len(kept) == len(choices):
            return {"method": "exact"}
        # A rule that matches nothing would be taken for a mistake: some blocks save only in their parts.
        patterns = [
            pattern for block in kept for pattern in (block, f"{block}.*") if fnmatch.filter(self.paths, pattern)
        ]
        again = [block for block, choice in choices.items() if choice == RECOMPUTE]
        rules = [Rule(path=pattern, keep=True) for pattern in patterns]
        return {"method": self.method, "rules": rules, **({"recompute": again} if again else {})}

    def time_plainly(self, blocks: Mapping[str, nn.Module]) -> tuple[float, dict[str, float]]:
        """Milliseconds of a step, and of each block's forward."""
        step_ms = self._time()
        clocks = {path: _Clock(_device_of(self.model)) for path in blocks}
        with ExitStack() as hooks:
            for path, block in blocks.items():
                hooks.callback(block.register_forward_pre_hook(clocks[path].begin).remove)
                hooks.callback(block.register_forward_hook(clocks[path].end).remove)
            self._time()
        return step_ms, {path: clock.total_ms() for path, clock in clocks.items()}

    def measure(self, choices: Mapping[str, str]) -> _Measured:
        session = attach(self.model, **self.options(choices))
        try:
            measured = _read(session, choices, self._time(session))
        finally:
            session.detach()
        self.paths = self.paths or measured.paths
        return measured

    def _time(self, session: Session | None = None) -> float:
        clock = _Clock(_device_of(self.model))
        try:
            for number in range(self.steps):
                if number:
                    clock.begin()
                self.run_step()
                if number:
                    clock.end()
                if session is not None:
                    session.step()
            return clock.median_ms()
        finally:
            self.before.restore()


def _read(session: Session, choices: Mapping[str, str], step_ms: float) -> _Measured:
    """Bytes by block from the ledger's last step."""
    raw, held = dict.fromkeys(choices, 0), dict.fromkeys(choices, 0)
    outside = 0
    paths = set()
    for entry in session.ledger.sites.values():
        path = entry.name.partition(":")[0].partition(" ")[0]  # "layer1.0:add.self", "layer1.0 (smaller than ...)"
        paths.add(path)
        block = next((block for block in choices if path == block or path.startswith(f"{block}.")), None)
        if block is None:
            outside += entry.held_nbytes
        else:
            raw[block] += entry.raw_nbytes
            held[block] += entry.held_nbytes
    return _Measured(step_ms, session.ledger.held_peak, raw, held, outside, frozenset(paths))


def _ways(
    blocks: Iterable[str], whole: Mapping[str, _Measured], plain_ms: float, forward_ms: Mapping[str, float]
) -> dict[str, dict[str, Choice]]:
    """What each choice costs for each block."""
    compressed, again = whole[COMPRESS], whole[RECOMPUTE]
    raw, all_raw = compressed.raw, max(sum(compressed.raw.values()), 1)
    all_forward = max(sum(forward_ms.values()), 1e-9)
    more = {choice: max(measured.step_ms - plain_ms, 0.0) for choice, measured in whole.items()}
    return {
        block: {
            KEEP: Choice(raw[block], 0.0),
            COMPRESS: Choice(compressed.by_block[block], more[COMPRESS] * raw[block] / all_raw),
            RECOMPUTE: Choice(again.by_block[block], more[RECOMPUTE] * forward_ms[block] / all_forward),
        }
        for block in blocks
    }


def _solve(ways: Mapping[str, Mapping[str, Choice]], room: int, *, taken: int) -> dict[str, str]:
    """The cheapest choice for each block within ``room`` bytes of a budget of which the rest is ``taken``.

    Exact, but for the rounding to bins: best[b] is the least cost at which the blocks so far fill b of them.
    """
    least = sum(min(choice.held for choice in choices.values()) for choices in ways.values())
    if least > room:
        raise SizeError(
            f"no mixture holds {size(room + taken)} or less: the blocks need {size(least)} at least, and what lies "
            f"outside of them {size(taken)}. The smallest budget is {size(least + taken)}"
        )
    scale = max(room, 1) / _BINS
    best: dict[int, tuple[float, tuple[str, ...]]] = {0: (0.0, ())}
    for choices in ways.values():
        reached: dict[int, tuple[float, tuple[str, ...]]] = {}
        for full, (cost, names) in best.items():
            for name, choice in choices.items():
                bins = full + math.ceil(choice.held / scale)
                found = (cost + choice.cost_ms, (*names, name))
                if bins <= _BINS and (bins not in reached or found[0] < reached[bins][0]):
                    reached[bins] = found
        best = reached
    if not best:  # rounding up took the room that there was
        return {block: min(choices, key=lambda name: choices[name].held) for block, choices in ways.items()}
    _, names = min(best.values())
    return dict(zip(ways, names, strict=True))


class _Clock:
    """Milliseconds between ``begin`` and ``end``, each time; by events on a GPU, by the host's clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None

    def begin(self, *_: Any) -> None:
        self._began = self._now()

    def end(self, *_: Any) -> None:
        self._spans.append((self._began, self._now()))

    def median_ms(self) -> float:
        return statistics.median(self._read())

    def total_ms(self) -> float:
        return sum(self._read())

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> list[float]:
        if self._on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in self._spans]
        return [1e3 * (end - begin) for begin, end in self._spans]


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")
