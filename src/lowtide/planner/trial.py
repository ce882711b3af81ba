"""Runs steps with one mixture after the other, each from the same state: how long they take, what they hold where."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.errors import LowtideWarning
from lowtide.planner.clock import Clock
from lowtide.policies.rules import Rule
from lowtide.recompute import OP
from lowtide.session import Session, attach
from lowtide.snapshot import Snapshot
from lowtide.stores.host import Host, link_to

KEEP, COMPRESS, OFFLOAD, BOTH = "keep", "compress", "offload", "compress, offload"
RECOMPUTE, RECOMPUTE_EXACT = "recompute", "recompute, exact"  # from inputs as the method holds them, or as they are
AGAIN = (RECOMPUTE, RECOMPUTE_EXACT)
_LINK_NBYTES = 1 << 28
# Steps before anything is counted: coders learn their tables at a site's first saves, and the first steps of training
# change activations fast. Then as many more as it takes until a few in a row hold the same, or else the most.
_LEAST_STEPS, _ALIKE_STEPS, _MOST_STEPS = 6, 3, 16
_ALIKE = 0.01


@dataclass(frozen=True, slots=True)
class Measured:
    """One mixture. ``held`` is counted when forward has ended and the device is done, the most of several steps, since
    payloads vary; what of them is on its way to the host and still on the device is in it. ``kept`` is what of
    ``by_block`` no codec has touched."""

    step_ms: float
    held: int
    raw: Mapping[str, int]  # by block
    by_block: Mapping[str, int]
    kept: Mapping[str, int]
    outside: int
    paths: frozenset[str]  # where something was saved
    boundaries: frozenset[str] = frozenset()  # blocks that run again, from an input that rules can be made for


class Held(NamedTuple):
    """Bytes at the end of forward: what the ledger counts, and what is on its way to the host."""

    payloads: int
    staged: int

    @property
    def total(self) -> int:
        return self.payloads + self.staged


@dataclass(slots=True)
class Trial:
    """``staging`` is the room for payloads on their way to the host and back."""

    run_step: Callable[[], object]
    model: nn.Module
    before: Snapshot
    method: str
    steps: int
    staging: int
    paths: frozenset[str] = frozenset()  # where something is saved, from the first way that is measured: compressed
    boundaries: frozenset[str] = frozenset()  # from the first in which blocks run again: all of them

    def options(self, choices: Mapping[str, str]) -> dict[str, Any]:
        """How ``attach`` is called for a mixture."""
        if all(choice == KEEP for choice in choices.values()):
            return {"method": "exact"}
        host = Host(self.staging)
        how: dict[str, dict[str, Any]] = {
            KEEP: {"keep": True},
            OFFLOAD: {"codec": "identity", "store": host},
            BOTH: {"store": host},
        }
        # A rule that matches nothing would be taken for a mistake: some blocks save only in their parts.
        rules = [
            Rule(path=pattern, **how[choice])
            for block, choice in choices.items()
            if choice in how
            for pattern in (block, f"{block}.*")
            if fnmatch.filter(self.paths, pattern)
        ]
        rules += [
            Rule(path=block, op=OP, keep=True)
            for block, choice in choices.items()
            if choice == RECOMPUTE_EXACT and block in self.boundaries
        ]
        again = [block for block, choice in choices.items() if choice in AGAIN]
        return {"method": self.method, "rules": rules, **({"recompute": again} if again else {})}

    def time_plainly(self, blocks: Mapping[str, nn.Module]) -> tuple[float, float, dict[str, float]]:
        """Milliseconds of a step, of all of forward, and of each block's forward, in the order in which they run."""
        timed = {"": self.model, **blocks}
        clocks = {path: Clock(device_of(self.model)) for path in timed}
        ran: dict[str, None] = {}
        try:
            step_ms = self._time()
            with ExitStack() as hooks:
                for path, block in timed.items():
                    hooks.callback(block.register_forward_pre_hook(lambda *_, path=path: ran.setdefault(path)).remove)
                    hooks.callback(block.register_forward_pre_hook(clocks[path].begin).remove)
                    hooks.callback(block.register_forward_hook(clocks[path].end).remove)
                self._time()
        finally:
            self.before.restore()
        forward_ms = {path: clocks[path].total_ms() / self.steps for path in ran | dict.fromkeys(timed)}
        return step_ms, forward_ms.pop(""), forward_ms

    def measure(self, choices: Mapping[str, str]) -> Measured:
        """All steps follow one another: were the model put back between them, payloads would be made with tables that
        were learnt from other activations, and be larger than in training."""
        options = self.options(choices)
        session = attach(self.model, **options)
        try:
            with warnings.catch_warnings():  # in some mixtures all is kept or run again: that is no mistake here
                warnings.filterwarnings("ignore", ".*compressed none of them", LowtideWarning)
                held = self._settle(session, {id(rule.store): rule.store for rule in options.get("rules", ())})
                measured = _read(session, choices, held)
                measured = replace(measured, step_ms=self._time(session))
        finally:
            session.detach()
            self.before.restore()
        self.paths = self.paths or measured.paths
        self.boundaries = self.boundaries or measured.boundaries
        return measured

    def _time(self, session: Session | None = None) -> float:
        clock = Clock(device_of(self.model))
        for number in range(self.steps):
            if number:
                clock.begin()
            self.run_step()
            if number:
                clock.end()
            if session is not None:
                session.step()
        return clock.median_ms()

    def _settle(self, session: Session, stores: Mapping[int, Any]) -> Held:
        """Bytes at the end of forward, once they stay what they are: the most of the last few steps."""
        seen: list[Held] = []

        def look(*_: Any) -> None:
            if device_of(self.model).type == "cuda":
                torch.cuda.synchronize()
            session.report()  # lets go of tensors whose encoders have reported
            staged = sum(store.staged for store in stores.values() if isinstance(store, Host))
            seen.append(Held(session.ledger.held, staged))

        by_step: list[Held] = []
        hook = self.model.register_forward_hook(look)
        try:
            while len(by_step) < _LEAST_STEPS or (len(by_step) < _MOST_STEPS and not _are_alike(by_step)):
                session.ledger.held_peak = session.ledger.held
                self.run_step()
                # No look at all: a model that is called through its parts.
                by_step.append(max(seen, default=Held(session.ledger.held_peak, 0), key=lambda held: held.total))
                session.step()
                seen.clear()
        finally:
            hook.remove()
        return max(by_step[-_ALIKE_STEPS:], key=lambda held: held.total)


def _are_alike(by_step: list[Held]) -> bool:
    last = [held.total for held in by_step[-_ALIKE_STEPS:]]
    return max(last) - min(last) <= _ALIKE * max(last)


def _read(session: Session, choices: Mapping[str, str], held: Held) -> Measured:
    """Bytes by block, from the ledger's last step. Its sites know payloads as they were made, with room to spare or too
    little of it, so what was coded is scaled to what is really held in all."""
    raw, coded, kept = (dict.fromkeys([*choices, ""], 0) for _ in range(3))
    paths, boundaries = set(), set()
    for entry in session.ledger.sites.values():
        path, _, save = entry.name.partition(":")
        path = path.partition(" ")[0]  # "layer1.0:add.self", "layer1.0 (smaller than ...)"
        paths.add(path)
        if save.startswith(f"{OP}.input"):
            boundaries.add(path)
        block = next((block for block in choices if path == block or path.startswith(f"{block}.")), "")
        raw[block] += entry.raw_nbytes
        (kept if entry.codec == "kept" else coded)[block] += entry.held_nbytes
    scale = max(held.payloads - sum(kept.values()), 0) / max(sum(coded.values()), 1)
    by_block = {block: kept[block] + int(scale * coded[block]) for block in coded}
    outside = by_block.pop("")
    return Measured(0.0, held.total, raw, by_block, kept, outside, frozenset(paths), frozenset(boundaries))


def link_ms(device: torch.device) -> float | None:
    """Milliseconds for a byte to cross to the host, measured; None where there is nothing to cross."""
    link = link_to(device)
    if link is None:
        return None
    buffer = torch.empty(_LINK_NBYTES, dtype=torch.uint8, device=device)
    clock = Clock(device)
    for number in range(4):  # the first one waits for memory to be pinned
        if number:
            clock.begin()
        flight = link.stay([buffer])
        link.send(flight)
        flight.end()
        if number:
            clock.end()
    return clock.median_ms() / _LINK_NBYTES


def device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")
