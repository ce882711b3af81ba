"""A planner whose trials are made up: what sixteen blocks in a row hold and share, without a step being run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
from torch import nn

from lowtide.planner import COMPRESS, KEEP, RECOMPUTE, RECOMPUTE_EXACT, Planner
from lowtide.planner.trial import Measured, Trial

MIB = 1 << 20
SURVEY = 7  # mixtures that a planner runs before it plans: three uniform ones and four that alternate
# Times smaller that the inputs of a ResNet-50's blocks were under the bound of boundaries (batch 256, bf16, on an H200
# at fcc339f, as benchmarks/plans.py has printed them); in the last three blocks, which no plan ran again, as in layer3.
_SMALLER = (1.8, 3.5, 1.8, 1.9, 3.5, 2.5, 2.2, 1.9, 3.5, 2.6, 2.2, 1.9, 1.7, 1.7, 3.5, 2.6)


@dataclass
class Chain:
    """Stands in for trials with ResNet-50 at batch 256: what blocks hold and share, counted as the ledger counts it.

    The output of a block is saved by its own ReLU and by the block behind. It is held once: as it is, by the first of
    the two that keeps it, or else by the one behind: compressed, finely if that one is run again, or as it is if that
    one wants it so.
    """

    scale: float = 1.0
    surcharge: Callable[[Mapping[str, str], str], float] = lambda choices, block: 1.0  # on coded bytes
    insides: dict[str, int] = field(default_factory=dict)
    input: dict[str, int] = field(default_factory=dict)
    output: dict[str, int] = field(default_factory=dict)
    smaller: dict[str, float] = field(default_factory=dict)
    ran: list[dict[str, str]] = field(default_factory=list)
    outside: int = 130 * MIB

    def __post_init__(self) -> None:
        self.outside = int(self.scale * self.outside)
        before = int(self.scale * 98 * MIB)
        for stage, (depth, out) in enumerate(zip((3, 4, 6, 3), (392, 196, 98, 49), strict=True)):
            for number in range(depth):
                of_output = 2.0 if number else 4.5 if stage else 3.0
                block = f"layers.{len(self.output)}"
                self.smaller[block] = _SMALLER[len(self.output)]
                self.input[block] = before
                self.output[block] = before = int(self.scale * out * MIB)
                self.insides[block] = int(self.scale * out * MIB * of_output)

    def measure(self, choices: Mapping[str, str]) -> Measured:
        self.ran.append(dict(choices))
        names = list(choices)
        raw, coded, kept = (dict.fromkeys(names, 0) for _ in range(3))
        before, cost = "", 0.0
        for number, (block, name) in enumerate(choices.items()):
            behind = names[number + 1] if number + 1 < len(names) else None
            raw[block] += self.insides[block]
            raw[behind if behind and name == COMPRESS else block] += self.output[block]
            raw[block] += 0 if before else self.input[block]
            if name == KEEP:
                kept[block] += self.insides[block] + self.output[block]
            elif name == COMPRESS:
                coded[block] += self.insides[block] // 6 + (self.output[block] // 16 if behind is None else 0)
                cost += 84.0 * (self.insides[block] + self.output[block])
            else:
                cost += 40.0 * (self.insides[block] + self.output[block])
            if before == KEEP:  # holds it already
                pass
            elif name in (KEEP, RECOMPUTE_EXACT):
                kept[block] += self.input[block]
            else:
                coded[block] += int(self.input[block] / (6 if name == COMPRESS else self.smaller[block]))
                cost += 84.0 * self.input[block] * (name == RECOMPUTE)
            before = name
        by_block = {block: kept[block] + int(self.surcharge(choices, block) * coded[block]) for block in names}
        held = sum(by_block.values()) + self.outside
        step_ms = 55 + cost / sum(raw.values())
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
