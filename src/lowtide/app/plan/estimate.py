"""Put together: plain training and methods side by side, what each needs, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.app.plan.dryrun import DryRun
from lowtide.app.plan.trace import LEFT, NAMED, RECAST, Save, Trace

HEADROOM = 0.05  # of the memory: what ops need while they run, and what the allocator cannot use
_MOST = 1 << 20
_TRIES = 6


@dataclass(frozen=True, slots=True)
class Estimate:
    """A method at one batch size. ``largest`` is the batch that fits the memory that was asked about."""

    method: str
    trace: Trace
    ratio: float
    fits: bool | None = None
    largest: int | None = None


def estimate(
    dry: DryRun, method: str, batch: int, *, rates: Mapping[str, float] | None = None, memory: int | None = None
) -> Estimate:
    """``rates`` None is plain training."""
    trace = dry.trace(batch, rates)
    ratio = dry.trace(batch).held / trace.held if trace.held else 1.0
    if memory is None:
        return Estimate(method, trace, ratio)
    usable = int(memory * (1 - HEADROOM))
    return Estimate(method, trace, ratio, trace.needed <= usable, find_largest(dry, rates, batch, usable))


def find_largest(dry: DryRun, rates: Mapping[str, float] | None, batch: int, usable: int) -> int:
    """The largest batch whose step needs no more than ``usable`` bytes; 0 if there is none.

    Bytes are close to a line in the batch: the line through the two sizes nearest to the answer says where to look, and
    a dry run there whether it was right.
    """
    known = {size: dry.trace(size, rates).needed for size in (2, max(4, batch))}
    for _ in range(_TRIES):
        low, high = sorted(sorted(known, key=lambda size: abs(known[size] - usable))[:2])
        slope = (known[high] - known[low]) / (high - low)
        guess = low + int((usable - known[low]) // slope) if slope > 0 else _MOST
        guess = min(max(guess, 1), _MOST)
        if guess in known:
            break
        known[guess] = dry.trace(guess, rates).needed
    return max((size for size, needed in known.items() if needed <= usable), default=0)


def shares(trace: Trace) -> dict[str, tuple[int, int]]:
    """Saves and bytes in plain training by what backward reads; what Lowtide does not decide about stands apart."""
    names = {RECAST: "casts of parameters", LEFT: "no codec takes it"}
    groups: dict[str, tuple[int, int]] = {}
    for save in trace.counted:
        key = save.need if save.fate == NAMED else names[save.fate]
        saves, nbytes = groups.get(key, (0, 0))
        groups[key] = (saves + 1, nbytes + save.nbytes)
    return dict(sorted(groups.items(), key=lambda item: -item[1][1]))


def layers(trace: Trace) -> list[Save]:
    """The saves that Lowtide decides about, the largest first."""
    return sorted((save for save in trace.counted if save.fate == NAMED and save.nbytes), key=lambda save: -save.nbytes)
