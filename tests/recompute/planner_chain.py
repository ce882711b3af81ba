"""A planner whose trials are made up: what sixteen blocks in a row hold and share, without a step being run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from torch import nn

from lowtide.planner import COMPRESS, KEEP, RECOMPUTE, Planner
from lowtide.planner.trial import Measured, Trial

MIB = 1 << 20


@dataclass
class Chain:
    """Stands in for trials with ResNet-50 at batch 256: what blocks hold and share, counted as the ledger counts it.

    The output of a block is saved by its own ReLU and by the block behind. It is held once: as it is, by the first of
    the two that keeps it, or else compressed by the one behind, finely if that one is run again.
    """

    scale: float = 1.0
    surcharge: Callable[[Mapping[str, str], str], float] = lambda choices, block: 1.0  # on coded bytes
    insides: dict[str, int] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)
    ran: list[dict[str, str]] = field(default_factory=list)
    outside: int = 130 * MIB

    def __post_init__(self) -> None:
        self.outside = int(self.scale * self.outside)
        for stage, (depth, out) in enumerate(zip((3, 4, 6, 3), (392, 196, 98, 49), strict=True)):
            for number in range(depth):
                of_output = 2.0 if number else 3.25 if not stage else 4.5
                block = f"layers.{len(self.output)}"
                self.output[block] = int(self.scale * out * MIB)
                self.insides[block] = int(self.scale * out * MIB * of_output)

    def measure(self, choices: Mapping[str, str]) -> Measured:
        self.ran.append(dict(choices))
        names = list(choices)
        raw, coded, kept = (dict.fromkeys(names, 0) for _ in range(3))
        for number, (block, name) in enumerate(choices.items()):
            behind = names[number + 1] if number + 1 < len(names) else None
            raw[block] += self.insides[block]
            raw[behind if behind and name == COMPRESS else block] += self.output[block]
            kept[block] += self.insides[block] * (name == KEEP)
            coded[block] += self.insides[block] // 11 * (name == COMPRESS)
            if name == KEEP:
                kept[block] += self.output[block]
            elif behind is None:
                coded[block] += self.output[block] // 16 * (name == COMPRESS)
            elif choices[behind] == KEEP:
                kept[behind] += self.output[block]
            else:
                coded[behind] += int(self.output[block] / (11 if choices[behind] == COMPRESS else 2 + number % 3 / 2))
        by_block = {block: kept[block] + int(self.surcharge(choices, block) * coded[block]) for block in names}
        held = sum(by_block.values()) + self.outside
        cost = {KEEP: 0.0, COMPRESS: 100.0, RECOMPUTE: 70.0}
        step_ms = 55 + sum(cost[name] * raw[block] for block, name in choices.items()) / sum(raw.values())
        return Measured(step_ms, held, raw, by_block, kept, self.outside, frozenset())


def planner_of(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, slowness: Callable[[str], float] = lambda block: 1.0
) -> Planner:
    """``slowness``: what a block takes in forward, beside others with the same bytes."""
    monkeypatch.setattr(Trial, "measure", lambda trial, choices: chain.measure(choices))
    monkeypatch.setattr(
        Trial,
        "time_plainly",
        lambda trial, blocks: (55.0, 20.0, {block: slowness(block) * chain.insides[block] for block in blocks}),
    )
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(nn.Linear(1, 1)) for _ in chain.output])
    return Planner.measure(lambda: None, model, state=[])
