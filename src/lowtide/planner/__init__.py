"""For each block of a model: keep, compress, offload or recompute, the cheapest mixture within a byte budget."""

from __future__ import annotations

from lowtide.planner.knapsack import Choice
from lowtide.planner.plan import Plan, Planner, plan_blocks
from lowtide.planner.trial import BOTH, COMPRESS, KEEP, OFFLOAD, RECOMPUTE, RECOMPUTE_EXACT

__all__ = [
    "BOTH",
    "COMPRESS",
    "KEEP",
    "OFFLOAD",
    "RECOMPUTE",
    "RECOMPUTE_EXACT",
    "Choice",
    "Plan",
    "Planner",
    "plan_blocks",
]
