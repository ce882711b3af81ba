"""What may surround a batch norm and its ReLU in a model: gradients under the default method are those of plain
training, but for the noise that it was allowed, and promises are kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowtide

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SIDES = {1: (257,), 2: (15, 16), 3: (6, 7, 8)}
NOISE = 0.003

Way = Callable[["Block", Tensor], Tensor]
WAYS: dict[str, Way] = {
    "in a residual block": lambda block, x: x + block.last(block.act(block.made(x))),
    "as a function": lambda block, x: x + block.last(torch.relu(block.made(x))),
    "as a clamp": lambda block, x: x + block.last(block.made(x).clamp(min=0)),
    "behind an addition": lambda block, x: block.last(block.act(block.made(x) + x)),
    "before a pool": lambda block, x: (
        x + block.act(block.made(x)).flatten(2).mean(2).view(*x.shape[:2], *[1] * (x.dim() - 2))
    ),
    "run again": lambda block, x: x + checkpoint(lambda v: block.last(F.relu(v)), block.made(x), use_reentrant=False),
    "leaky": lambda block, x: x + block.last(F.leaky_relu(block.made(x), 0.1)),
    "with a ceiling": lambda block, x: x + block.last(F.relu6(block.made(x))),
}


def _read_twice(block: Block, x: Tensor) -> Tensor:
    made = block.act(block.made(x))
    return block.last(made) + 0.5 * made + made.detach()


def _read_before(block: Block, x: Tensor) -> Tensor:
    normed = block.made(x)
    return block.last(F.relu(normed)) + normed.sigmoid()


WAYS |= {"read twice": _read_twice, "with another reader of the norm": _read_before}
NORMS_LIKE: dict[str, Callable[[nn.Module], object]] = {
    "usual": lambda norm: None,
    "negative scales": lambda norm: norm.weight.data.neg_(),
    "scales of zero": lambda norm: norm.weight.data[::2].zero_(),
    "frozen": lambda norm: norm.requires_grad_(False),
    "in evaluation": lambda norm: norm.eval(),
}


class Block(nn.Module):
    def __init__(self, dims: int, way: Way, *, inplace: bool) -> None:
        super().__init__()
        self.first, self.norm = CONVOLUTIONS[dims](8, 8, 3, padding=1), NORMS[dims](8)
        self.act, self.last, self.way = nn.ReLU(inplace), CONVOLUTIONS[dims](8, 8, 1), way

    def made(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def gradients(model: nn.Module, inputs: list[Tensor], *, amp: bool) -> Tensor:
    """Of several passes, added up."""
    model.zero_grad()
    for x in inputs:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            loss = F.cross_entropy(model(x).float(), torch.arange(len(x)) % 5)
        loss.backward()
    return torch.cat([item.grad.flatten() for item in model.parameters() if item.grad is not None])


@pytest.mark.parametrize("like", NORMS_LIKE)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_plain_training_but_for_the_noise(way: str, like: str) -> None:
    case = list(WAYS).index(way) + 3 * list(NORMS_LIKE).index(like)  # layouts and dtypes go around with the cases
    torch.manual_seed(case)
    dims, layout = case % 3 + 1, torch.channels_last if case % 3 == 1 and case % 2 else torch.contiguous_format
    width = 8 * torch.Size(SIDES[dims]).numel()
    blocks = [Block(dims, WAYS[way], inplace=case % 2 == 0) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(width, 5)).to(memory_format=layout)
    for block in blocks:
        NORMS_LIKE[like](block.norm)
    inputs = [torch.randn(9, 8, *SIDES[dims]).to(memory_format=layout) for _ in range(1 + case % 2)]
    plain = gradients(model, inputs, amp=case % 4 == 3)
    session = lowtide.attach(model, noise=NOISE, min_size=0, period=2, check=True, coder=("auto", "rans")[case % 2])
    for _ in range(3):
        found = gradients(model, inputs, amp=case % 4 == 3)
        session.step()
    session.detach()
    assert found.shape == plain.shape and bool(found.isfinite().all())
    assert float((found - plain).square().sum()) < 2 * NOISE * float(plain.square().sum())
