"""What the budget holds of ops whose gradients may be divided by next to nothing, before anything has been measured."""

from __future__ import annotations

import math

import pytest
import torch
from test_budget import level, settled, site, value
from torch import nn

import lowtide
from lowtide.bounds import BoundRule
from lowtide.controllers import Keep
from lowtide.controllers.budget import Budget
from lowtide.records import Kind, Need, Site
from lowtide.statistics import PROPAGATED, Claim

DIVIDED = ("div", "linalg_vector_norm", "norm", "std", "std_mean", "exp", "mse_loss")


@pytest.mark.parametrize("op", DIVIDED)
def test_what_may_be_divided_by_next_to_nothing_is_exact_until_it_is_measured(op):
    need, name = Need(Kind.VALUES, "", family="product"), f"a:{op}.self"
    for options in ({}, {"memory": 0.5}):
        assert isinstance(Budget(**options).bound(Site("a", op, "self"), need), Keep)
    assert Budget(warm_up="0.1 std").bound(Site("a", op, "self"), need) == BoundRule(0.1, "std")
    known = site(name, (Claim(PROPAGATED, 1.0, 1.0),), family="product")
    budget = settled(known, updates=1)
    assert value(budget, name) == level(math.sqrt(3 * 0.01)), "at once, and the energy had no noise of its own"


def _small_rows(x):
    return x / x.norm(dim=-1, keepdim=True)


FIRST = {
    "rows over their norms": _small_rows,
    "the same by torch": lambda x: torch.nn.functional.normalize(x, dim=-1),
    "rows over their spread": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "softmax by hand": lambda x: (e := (8 * _small_rows(x) * 8).exp()) / e.sum(-1, keepdim=True),
    "logarithms of sums": lambda x: x + (x * 8e3).clamp(max=40).exp().sum(-1, keepdim=True).log(),
}


@pytest.mark.parametrize("case", [*FIRST, "squared error"])
def test_the_first_steps_have_no_more_noise_than_later_ones(case):
    """Rows of very different sizes, or targets that are nearly met: the noise was 2 to 10^7 in the first two steps."""
    torch.manual_seed(0)
    stem, head = nn.Linear(64, 64, bias=False), nn.Linear(64, 10)
    x, labels = torch.randn(128, 64), torch.randint(0, 10, (128,))
    rows = x * torch.logspace(-4, 0, 128)[:, None]
    near = (head(stem(x)) + 0.003 * torch.randn(128, 10)).detach()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = stem, head

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if case == "squared error":
                return nn.functional.mse_loss(self.head(self.stem(x)), near)
            return nn.functional.cross_entropy(self.head(FIRST[case](self.stem(rows))), labels)

    model = Net()
    model(rows).backward()
    exact = {name: part.grad.clone() for name, part in model.named_parameters()}
    tide, noise = lowtide.attach(model, "budget", min_size=0, coder="blocks"), []
    for _ in range(2):
        model.zero_grad()
        model(rows).backward()
        errors = sum(float((part.grad - exact[name]).square().sum()) for name, part in model.named_parameters())
        noise.append(errors / sum(float(part.square().sum()) for part in exact.values()))
        tide.step()
    tide.detach()
    assert max(noise) < 0.03
