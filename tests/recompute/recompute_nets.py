"""Small networks with all that a second run has to find as the first one did, and a way to train them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide


class Block(nn.Module):
    """What a second run has to find as the first one did: dropout, running statistics, keywords, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: float = 1.0, gate: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.runs += 1
        y = F.dropout(self.norm(self.conv(x)).relu(), 0.3)
        y = y * gate if gate is not None else y
        return x + scale * y, y.sigmoid()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.stem(x), None
        for block in self.blocks:
            x, gate = block(x, scale=0.5, gate=gate)
        result: Tensor = self.head(F.gelu(x).mean((2, 3)))
        return result


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def attach(model: nn.Module, method: str = "exact", **options: Any) -> lowtide.Session:
    return lowtide.attach(model, method, min_size=64, **{"recompute": True, **options})


def train(model: nn.Module, *, bf16: bool = False, steps: int = 3) -> dict[str, Tensor]:
    """All that training leaves behind, by name."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(2)
    trace = {}
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(images())
        output.float().square().mean().backward()
        trace |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    trace |= {name: value.clone() for name, value in model.state_dict().items()}
    return trace | {"rng": torch.get_rng_state()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(got) == list(expected)
    assert [name for name in got if not torch.equal(got[name], expected[name])] == []
