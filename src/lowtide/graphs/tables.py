"""The tables that the payloads of a graph are coded by: copies of its own, so that a refresh can write them anew.

A launch that was captured has fixed addresses and fixed constants. What has been measured since reaches it by way of
the tables, if the constants are still right: those that follow from an alphabet, from the kind of a grid and, for how
much a warp can stage, from the bits of a model. Encoders and decoders of a replay read the same tables, and nothing is
in flight between two replays, so whatever runs next on the stream sees the new ones only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lowtide.codecs.sz import Plan
from lowtide.records import Bound
from lowtide.sites import Memo

_MOST_BITS = 1.1  # times those of the model that the graph was captured with: warps stage a quarter more than expected


class Tables:
    """Made before a graph is captured, of all that sites have learnt so far."""

    def __init__(self, memos: Sequence[Memo]) -> None:
        self._plans = {id(memo): (memo, _copy(memo.plan)) for memo in memos if memo.is_complete}
        self._used: dict[int, tuple[Memo, Plan]] = {}
        bounds = [memo for memo in memos if memo.plan is None and memo.saves]  # of tensors that are coded with others
        self._bounds = {id(memo): (memo, Bound(memo.bound.value.clone(), memo.bound.axes)) for memo in bounds}
        self._bounded: dict[int, tuple[Memo, Bound]] = {}  # those that are used

    def plan(self, memo: Memo, plan: Plan) -> Plan:
        """``plan``, which is that of the memo or one for the rows at hand, with the graph's own tables."""
        key = id(memo)
        own = self._used[key] = self._plans[key]
        return own[1] if plan is memo.plan else own[1].on(plan.grid)

    def bound(self, memo: Memo) -> Bound | None:
        """The memo's bound, in the graph's own memory; None if it was not known when that was made."""
        own = self._bounds.get(id(memo))
        if own is None:
            return None
        self._bounded[id(memo)] = own
        return own[1]

    def renew(self, memos: Sequence[Memo]) -> bool:
        """Write what sites know now; False, and nothing is written, where the graph has no place for it."""
        known = {id(memo) for memo in memos if memo.is_complete}
        if not self._used.keys() <= known <= self._plans.keys():  # forgotten, or not known when it was captured
            return False
        if not all(_is_alike(own, memo.plan) for memo, own in self._used.values()):
            return False
        known = {id(memo) for memo in memos}
        if any(
            key not in known or memo.bound.value.shape != own.value.shape for key, (memo, own) in self._bounded.items()
        ):
            return False
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for memo, own in self._used.values():
            for target, source in zip(_tables(own), _tables(memo.plan), strict=True):
                targets, sources = alike.setdefault((target.device, target.dtype), ([], []))
                targets.append(target)
                sources.append(source)
        for memo, bound in self._bounded.values():
            bound.value.copy_(memo.bound.value)
        for targets, sources in alike.values():  # one launch takes tables of one dtype
            torch._foreach_copy_(targets, sources)
        return True


def _is_alike(captured: Plan, new: Plan) -> bool:
    """Whether a launch has the same constants by either plan."""
    one, other = captured.grid, new.grid
    if (
        captured.zero_code != new.zero_code
        or (one.axes, one.rounding, one.centre is None) != (other.axes, other.rounding, other.centre is None)
        or [table.shape for table in _tables(captured)] != [table.shape for table in _tables(new)]
    ):
        return False
    if captured.model is None or new.model is None:
        return captured.model is new.model
    return captured.model.alphabet == new.model.alphabet and new.model.bits <= _MOST_BITS * captured.model.bits


def _tables(plan: Plan) -> list[Tensor]:
    """What launches read of a plan. Bounds of rows are measured in every replay, and no table of theirs is kept."""
    grid, model = plan.grid, plan.model
    grids = (grid.inverse, grid.promised, grid.step, grid.centre) if 0 not in grid.axes else ()
    return [table for table in (*grids, model.freqs if model is not None else None) if table is not None]


def _copy(plan: Plan) -> Plan:
    grid, model = plan.grid, plan.model
    if 0 not in grid.axes:
        assert grid.inverse is not None and grid.promised is not None, "an encoder's grid has both"
        grid = replace(
            grid,
            step=grid.step.clone(),
            centre=grid.centre.clone() if grid.centre is not None else None,
            inverse=grid.inverse.clone(),
            promised=grid.promised.clone(),
        )
    return replace(plan, grid=grid, model=replace(model, freqs=model.freqs.clone()) if model is not None else None)
