"""The cheapest choice for each block within a number of bytes, where all blocks share one link to the host.

Blocks form a chain: a tensor between two of them is held once, so what a choice holds depends on the choice of the
block before. Two things add up over the blocks beside the cost: bytes held, which must not exceed the room, and the
time for which the link is busy, which costs nothing as long as the device is busy too and all that exceeds it
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lowtide.errors import SizeError
from lowtide.reports.text import size
from lowtide.threads import one_thread

_BINS, _LINK_BINS = 1000, 40  # of the room and of the link's time; times are rounded up to whole ones, bytes to nearest


@dataclass(frozen=True, slots=True)
class Choice:
    """What one way to hold a block's saves costs: bytes between forward and backward, milliseconds a step, and
    milliseconds on the link, each way."""

    held: int
    cost_ms: float
    link_ms: float = 0.0


Ways = Mapping[str, Mapping[str, Choice]]  # by block, by name of the choice
Pair = tuple[str, str]  # the choice of the block before, and the block's own
Beside = Mapping[str, Mapping[Pair, int]]  # by block: bytes that a choice holds more, or less, behind another
_NONE: Beside = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Stage:
    """How one block was reached: which choice of the block before was best, and the bins that each pair takes."""

    names: list[str]
    before: Tensor  # [choice, bytes, link]
    bins: list[list[int]]  # by choice, by that of the block before
    links: list[int]


def solve(
    ways: Ways, room: int, *, beside: Beside = _NONE, overlap_ms: float = 0.0, spare_ms: float = 0.0
) -> dict[str, str] | None:
    """The cheapest choice for each block within ``room`` bytes; None if there is none.

    ``spare_ms`` is what it costs to leave all of the room unused.

    Exact, but for the rounding to bins. best[c, b, l] is the least cost at which the blocks so far fill b bins of the
    room and l of the link, the last of them by its choice c; where it came from is kept for the way back. Bins say
    which mixtures are compared, not what they hold: their bytes are carried along, and at the end those that fit count.
    """
    least = lightest(ways, beside)
    if held_by(ways, least, beside) > room:
        return None
    byte_scale = max(room, 1) / _BINS
    busiest = sum(max(choice.link_ms for choice in choices.values()) for choices in ways.values())
    link_scale = busiest / _LINK_BINS or 1.0
    rows, columns = _BINS + len(ways) + 1, (_LINK_BINS + len(ways) if busiest else 0) + 1
    best = torch.full((1, rows, columns), torch.inf, dtype=torch.float64)
    best[0, 0, 0] = 0.0
    held = torch.zeros_like(best)
    stages: list[_Stage] = []
    befores = [""]
    for block, choices in ways.items():
        sizes = [[_held_behind(ways, beside, block, name, before) for before in befores] for name in choices]
        bins = [[round(nbytes / byte_scale) for nbytes in row] for row in sizes]
        links = [math.ceil(choice.link_ms / link_scale) for choice in choices.values()]
        with one_thread():
            best, held, before = _extend(best, held, sizes, bins, links)
        best += torch.tensor([choice.cost_ms for choice in choices.values()], dtype=torch.float64)[:, None, None]
        befores = list(choices)
        stages.append(_Stage(befores, before, bins, links))
    beyond = (link_scale * torch.arange(columns, dtype=torch.float64) - overlap_ms).clamp(min=0)
    total = (best + beyond + spare_ms * (1 - held / max(room, 1))).masked_fill(held > room, torch.inf)
    at = int(total.argmin())
    if total.flatten()[at] == torch.inf:  # rounding took the room that there was
        return least
    return dict(zip(ways, reversed(list(_walk_back(stages, at, rows, columns))), strict=True))


def _extend(
    best: Tensor, held: Tensor, sizes: list[list[int]], bins: list[list[int]], links: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """One block more: the least cost of getting to each of its choices from those of the block before, the bytes held
    there, and from which it was."""
    _, rows, columns = best.shape
    reached = best.new_full((len(sizes), rows, columns), torch.inf)
    bytes_there, before = torch.zeros_like(reached), torch.zeros(reached.shape, dtype=torch.uint8)
    for choice, link in enumerate(links):
        cost, nbytes, origin = reached[choice], bytes_there[choice], before[choice]
        for last, (more, up) in enumerate(zip(sizes[choice], bins[choice], strict=True)):
            if up < rows:
                better = best[last, : rows - up] < cost[up:]
                cost[up:] = torch.where(better, best[last, : rows - up], cost[up:])
                nbytes[up:] = torch.where(better, held[last, : rows - up] + more, nbytes[up:])
                origin[up:].masked_fill_(better, last)
        if link:  # the same from wherever one comes
            for state, nothing in ((cost, torch.inf), (nbytes, 0), (origin, 0)):
                state.copy_(state.roll(link, 1))[:, :link] = nothing
    return reached, bytes_there, before


def _walk_back(stages: list[_Stage], at: int, rows: int, columns: int) -> Iterator[str]:
    """The choices, the last block's first."""
    at, busy = divmod(at, columns)
    choice, full = divmod(at, rows)
    for stage in reversed(stages):
        yield stage.names[choice]
        last = int(stage.before[choice, full, busy])
        full, busy, choice = full - stage.bins[choice][last], busy - stage.links[choice], last


def cost_of(ways: Ways, choices: Mapping[str, str], *, overlap_ms: float) -> float:
    """Milliseconds that a mixture adds to a step."""
    chosen = [ways[block][name] for block, name in choices.items()]
    return sum(way.cost_ms for way in chosen) + max(sum(way.link_ms for way in chosen) - overlap_ms, 0.0)


def held_by(ways: Ways, choices: Mapping[str, str], beside: Beside = _NONE) -> int:
    """Bytes that a mixture holds."""
    return sum(held_by_block(ways, choices, beside).values())


def held_by_block(ways: Ways, choices: Mapping[str, str], beside: Beside = _NONE) -> dict[str, int]:
    befores = ["", *choices.values()]
    return {
        block: _held_behind(ways, beside, block, name, before)
        for (block, name), before in zip(choices.items(), befores, strict=False)
    }


def lightest(ways: Ways, beside: Beside = _NONE) -> dict[str, str]:
    """The mixture that holds the least."""
    found: dict[str, tuple[int, list[str]]] = {"": (0, [])}  # by the last choice
    for block, choices in ways.items():
        found = {
            name: min(
                (
                    (held + _held_behind(ways, beside, block, name, before), [*names, name])
                    for before, (held, names) in found.items()
                ),
                key=lambda item: item[0],
            )
            for name in choices
        }
    _, names = min(found.values(), key=lambda item: item[0])
    return dict(zip(ways, names, strict=True))


def _held_behind(ways: Ways, beside: Beside, block: str, name: str, before: str) -> int:
    return max(ways[block][name].held + beside.get(block, {}).get((before, name), 0), 0)


def refusal(limit: int, *, least: int, outside: int) -> SizeError:
    """Why a budget cannot be met, where the smallest mixture that was run holds so much."""
    return SizeError(
        f"no mixture holds {size(limit)} or less: of those that were run the smallest holds {size(least)}, and "
        f"{size(outside)} lie outside of the blocks. The smallest budget is {size(least)} ({least} bytes)"
    )
