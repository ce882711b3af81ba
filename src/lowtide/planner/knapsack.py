"""The cheapest choice for each block within a number of bytes, where all blocks share one link to the host.

Two things add up over the blocks beside the cost: bytes held, which must not exceed the room, and the time for which
the link is busy, which costs nothing as long as the device is busy too and all that exceeds it afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lowtide.errors import SizeError
from lowtide.reports.text import size

_BINS, _LINK_BINS = 1000, 40  # of the room and of the link's time; what a choice takes is rounded up to whole ones


@dataclass(frozen=True, slots=True)
class Choice:
    """What one way to hold a block's saves costs: bytes between forward and backward, milliseconds a step, and
    milliseconds on the link, each way."""

    held: int
    cost_ms: float
    link_ms: float = 0.0


Ways = Mapping[str, Mapping[str, Choice]]  # by block, by name of the choice


def solve(ways: Ways, room: int, *, overlap_ms: float = 0.0, spare_ms: float = 0.0) -> dict[str, str] | None:
    """The cheapest choice for each block within ``room`` bytes; None if there is none.

    ``spare_ms`` is what it costs to leave all of the room unused.

    Exact, but for the rounding to bins. best[b, l] is the least cost at which the blocks so far fill b bins of the room
    and l of the link; where it came from is kept for the way back.
    """
    if least_held(ways) > room:
        return None
    byte_scale = max(room, 1) / _BINS
    busiest = sum(max(choice.link_ms for choice in choices.values()) for choices in ways.values())
    link_scale = busiest / _LINK_BINS or 1.0
    shape = (_BINS + 1, (_LINK_BINS + len(ways) if busiest else 0) + 1)
    best = torch.full(shape, torch.inf, dtype=torch.float64)
    best[0, 0] = 0.0
    steps: list[tuple[torch.Tensor, list[tuple[str, int, int]]]] = []
    for choices in ways.values():
        sizes = [
            (name, math.ceil(choice.held / byte_scale), math.ceil(choice.link_ms / link_scale))
            for name, choice in choices.items()
        ]
        reached = torch.stack([_shifted(best, *bins) + choices[name].cost_ms for name, *bins in sizes])
        best, picks = reached.min(0)
        steps.append((picks, sizes))
    beyond = (link_scale * torch.arange(shape[1], dtype=torch.float64) - overlap_ms).clamp(min=0)
    unused = torch.linspace(spare_ms, 0, shape[0], dtype=torch.float64).unsqueeze(1)
    at = int((best + beyond + unused).argmin())
    full, busy = divmod(at, shape[1])
    if best[full, busy] == torch.inf:  # rounding up took the room that there was
        return {block: min(choices, key=lambda name: choices[name].held) for block, choices in ways.items()}
    names: list[str] = []
    for picks, sizes in reversed(steps):
        name, held, link = sizes[int(picks[full, busy])]
        names.append(name)
        full, busy = full - held, busy - link
    return dict(zip(ways, reversed(names), strict=True))


def cost_of(ways: Ways, choices: Mapping[str, str], *, overlap_ms: float) -> float:
    """Milliseconds that a mixture adds to a step."""
    chosen = [ways[block][name] for block, name in choices.items()]
    return sum(way.cost_ms for way in chosen) + max(sum(way.link_ms for way in chosen) - overlap_ms, 0.0)


def least_held(ways: Ways) -> int:
    return sum(min(choice.held for choice in choices.values()) for choices in ways.values())


def refusal(limit: int, *, blocks: int, outside: int) -> SizeError:
    """Why a budget cannot be met, where blocks hold so much at least."""
    return SizeError(
        f"no mixture holds {size(limit)} or less: the blocks need {size(blocks)} at least, and what lies outside of "
        f"them {size(outside)}. The smallest budget is {size(blocks + outside)}"
    )


def _shifted(best: torch.Tensor, held: int, link: int) -> torch.Tensor:
    """What was best with so many bins less; nothing was where there are fewer."""
    moved = torch.full_like(best, torch.inf)
    rows, columns = best.shape
    if held < rows and link < columns:
        moved[held:, link:] = best[: rows - held, : columns - link]
    return moved
