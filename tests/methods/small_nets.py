"""Small nets of every kind that methods meet: convolutions with batch norm, a transformer, a recurrent net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """A pre-norm transformer block: softmax attention, GELU, layer norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.mix = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.lstm(x)[0])


class Pooled(nn.Module):
    """A head on the mean over the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x).mean(1))


def _conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU()),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)),
    )


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()

    def batch(self, step: int = 0) -> tuple[Tensor, Tensor]:
        """Noise around one pattern for each class."""
        patterns = torch.randn(5, *self.shape, generator=torch.Generator().manual_seed(-1))
        generator = torch.Generator().manual_seed(step)
        target = torch.randint(0, 5, (8,), generator=generator)
        return torch.randn(8, *self.shape, generator=generator) + patterns[target], target


NETS = {
    "conv": Net(_conv_net, (3, 16, 16)),
    "attention": Net(lambda: nn.Sequential(Attention(), Pooled()), (12, 32)),
    "recurrent": Net(lambda: nn.Sequential(Recurrent(), Pooled()), (10, 32)),
}
