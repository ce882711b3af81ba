"""The planner on a device: a budget is met by what the allocator counts, with what is on its way to the host in it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.planner import BOTH, KEEP, OFFLOAD, Planner

pytestmark = pytest.mark.gpu
WIDTH, ROWS, BLOCKS = 1024, 1 << 14, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x.mean()


def test_budgets_are_met_by_the_allocator() -> None:
    torch.manual_seed(0)
    model, x = Net().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    planner = Planner.measure(step, model, state=[model, optimizer], modules="blocks.*", steps=3)
    assert all(planner.ways[block][OFFLOAD].link_ms > 0 for block in planner.ways), (
        "there is a link, and it has a speed"
    )
    plain = sum(ways[KEEP].held for ways in planner.ways.values())
    for share in (0.7, 0.4):
        budget = int(share * plain)
        plan = planner.plan(budget)
        assert plan.held <= budget
        session = lowtide.attach(model, optimizer=optimizer, **plan.options)
        for _ in range(3):
            step()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = model(x)
        torch.cuda.synchronize()
        session.report()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        session.detach()
        assert held <= 1.05 * budget, plan
        if not {OFFLOAD, BOTH} & set(plan.choices.values()):
            assert held == pytest.approx(plan.held, rel=0.05), plan
