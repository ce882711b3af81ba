"""A model with a site of every kind, what a session does at each."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.ledger import SiteEntry


class Net(nn.Module):
    """Sites: values (conv, head, gelu), a mask (relu), an unknown op (logcumsumexp), a statistic (rsqrt)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.head = nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.conv(x))
        hidden = self.body(hidden).flatten(1)
        output = torch.logcumsumexp(self.head(hidden), 1)
        return output * (output.square() + 1).rsqrt()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def sites(net, x) -> Callable[..., dict[str, SiteEntry]]:
    """``sites(rules, ...)``: what a session with these rules did at each site of the net in one step."""

    def run(rules: Any, *, method: str = "fixed", **options: Any) -> dict[str, SiteEntry]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "this forward saved tensors", lowtide.LowtideWarning)
            session = lowtide.attach(net, method, rules=rules, check="full", **options)
            net(x).sum().backward()
            session.detach()
        return {entry.name: entry for entry in session.report().sites}

    return run
