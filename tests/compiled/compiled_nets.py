"""A model to compile: in a file of its own, since torch.compile looks up a function's globals by the file's name."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A batch norm with ReLU behind it, a ReLU that a layer norm reads, GELU: pairs, masks, what is made again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.rows = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 64)
        self.head = nn.Linear(64, 10)

    def begin(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        return F.relu(self.second(x)).flatten(2).transpose(1, 2)

    def end(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.wide(self.rows(x)))).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.begin(x))
