"""Masks at the edges of their branches: what they stand for must take the same branch, in every dtype."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide

# Zeros of both signs, thresholds and their neighbours, infinities, subnormals.
EDGES = torch.tensor([0, 0.1, 0.5, 1, 3, 6, math.inf, 1e-40])
BRANCHES = {
    "relu": F.relu,
    "leaky relu": F.leaky_relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardtanh at 0.1": lambda h: F.hardtanh(h, -0.1, 0.1),
    "threshold at 0.1": lambda h: F.threshold(h, 0.1, 0.0),
    "hardsigmoid": F.hardsigmoid,
    "clamp": lambda h: h.clamp(-0.5, 0.5),
    "clamp at 0.1": lambda h: h.clamp(-0.1, 0.1),
    "clamp below": lambda h: h.clamp(min=0.1),
    "clamp above": lambda h: h.clamp(max=0.1),
    "hardshrink": F.hardshrink,
    "hardshrink at 0.1": lambda h: F.hardshrink(h, 0.1),
    "softshrink": F.softshrink,
    "softshrink at 0.1": lambda h: F.softshrink(h, 0.1),
    "abs": torch.abs,
}


@pytest.fixture
def same_branch(build):
    """Checks that an op's gradient at ``x``, element by element, is the one of plain training."""

    def check(op: str, x: torch.Tensor) -> None:
        model = build(lambda self, x: BRANCHES[op](x + self.shift))
        model.shift = nn.Parameter(torch.zeros((), dtype=x.dtype))
        x = x.clone().requires_grad_()
        (plain,) = torch.autograd.grad(model(x), x, torch.ones_like(x))
        lowtide.attach(model, "exact", min_size=0)
        (coded,) = torch.autograd.grad(model(x), x, torch.ones_like(x))
        different = (plain != coded) & ~(plain.isnan() & coded.isnan())
        found = torch.stack([x.detach(), plain, coded], 1)[different]
        assert not len(found), f"(x, plain, coded) = {found[:4].tolist()}"

    return check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("op", BRANCHES)
def test_masks_take_the_branch_of_the_op(same_branch, op, dtype):
    """A threshold of 0.1 is no bfloat16: an op compares with it unrounded, or rounded, and so must the mask."""
    edges = torch.cat([EDGES, -EDGES]).to(dtype)
    above, below = torch.nextafter(edges, torch.tensor(9, dtype=dtype)), torch.nextafter(edges, -edges - 9)
    same_branch(op, torch.cat([edges, above, below]).repeat(4))


# Here torch's own kernels differ: its scalar code passes the gradient at NaN, its vector code does not. Masks pass it.
UNSETTLED = ("relu6", "hardtanh", "hardshrink", "softshrink")


@pytest.mark.parametrize("count", [1, 128], ids=["scalar code", "vector code"])
@pytest.mark.parametrize("op", [op for op in BRANCHES if " at " not in op])
def test_masks_take_the_branch_of_the_op_at_nan(same_branch, op, count):
    same_branch(op, torch.full((1 if op in UNSETTLED else count,), math.nan))
