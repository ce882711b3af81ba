"""Models put together at random: what layers read and make goes other ways in each of them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, LENGTH, WIDTH, HEADS, CLASSES = 6, 12, 16, 2, 5

ACTIVATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.leaky_relu, F.elu, F.softplus, F.hardswish, F.relu6, F.mish,
    lambda x: F.gelu(x, approximate="tanh"), lambda x: x.clamp(max=2).exp(), lambda x: F.relu(x).square(),
)  # fmt: skip


class Block(nn.Module):
    """One of many things that blocks do, its details drawn when it is made."""

    def __init__(self, draw: random.Random, shared: nn.Linear) -> None:
        super().__init__()
        self.kind = draw.choice(sorted(KINDS))
        self.act, self.act_after = draw.choice(ACTIVATIONS), draw.choice(ACTIVATIONS)
        self.coins = [draw.random() < 0.5 for _ in range(4)]
        self.norm_kind = draw.choice(("layer", "rms", "rms by hand", "batch", "group"))
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=self.coins[0]), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.qkv = (
            nn.Linear(*sizes) for sizes in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH))
        )
        self.conv, self.shared = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), shared
        self.layer_norm, self.wide_norm = nn.LayerNorm(WIDTH, elementwise_affine=self.coins[1]), nn.LayerNorm(2 * WIDTH)
        self.rms_norm, self.batch_norm, self.group_norm = (
            nn.RMSNorm(WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.GroupNorm(2, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return KINDS[self.kind](self, x)

    def norm(self, x: Tensor) -> Tensor:
        if self.norm_kind == "layer":
            return self.layer_norm(x)
        if self.norm_kind == "rms":
            return F.rms_norm(x, (WIDTH,), self.rms_norm.weight.to(x.dtype))
        if self.norm_kind == "rms by hand":
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
            return self.rms_norm.weight * (x.float() * scale).to(x.dtype)
        norm = self.batch_norm if self.norm_kind == "batch" else self.group_norm
        return norm(x.mT).mT

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(self.norm(x) if self.coins[2] else x)))

    def norm_behind(self, x: Tensor) -> Tensor:
        return self.down(self.wide_norm(self.act(self.up(x))))

    def norm_before(self, x: Tensor) -> Tensor:
        return self.first(self.act(self.norm(self.second(x))))

    def gate(self, x: Tensor) -> Tensor:
        one, other = self.up(self.norm(x)).chunk(2, -1)
        return self.first(self.act(one) * other)

    def attention(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in parts)
        if self.coins[2]:
            angle = torch.arange(LENGTH)[:, None].to(x.dtype)
            one, other = q.chunk(2, -1)
            q, k = q * angle.cos() + torch.cat((-other, one), -1) * angle.sin(), k * angle.cos()
        if self.coins[3]:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.coins[0])
        else:
            y = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.first(y.transpose(1, 2).reshape(x.shape))

    def convolution(self, x: Tensor) -> Tensor:
        y = self.conv(x.mT)
        return self.act(self.batch_norm(y) if self.coins[2] else y).mT

    def batch_norm_and_relu(self, x: Tensor) -> Tensor:
        return self.conv(F.relu(self.batch_norm(self.conv(x.mT)), inplace=self.coins[2])).mT

    def pool(self, x: Tensor) -> Tensor:
        return F.max_pool1d(self.conv(x.mT), 3, 1, 1).mT

    def one_layer_twice(self, x: Tensor) -> Tensor:
        return self.shared(self.act(self.shared(x)))

    def products(self, x: Tensor) -> Tensor:
        y = self.first(x * self.second(x))
        return y * x if self.coins[2] else y

    def dropout(self, x: Tensor) -> Tensor:
        return self.first(F.dropout(self.act(x), 0.3))

    def views(self, x: Tensor) -> Tensor:
        y = self.up(x).view(BATCH, LENGTH, 2, WIDTH).permute(2, 0, 1, 3)[int(self.coins[2])]
        return self.first(self.act(y.contiguous() if self.coins[3] else y))

    def in_place(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(F.silu(y.add_(1) if self.coins[2] else y)).mul_(0.5)

    def two_readers(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.first(y) + self.second(self.act(y)) + 0.1 * x.detach()


KINDS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    kind.__name__: kind
    for kind in (
        Block.mlp, Block.norm_behind, Block.norm_before, Block.gate, Block.attention, Block.convolution, Block.pool,
        Block.batch_norm_and_relu, Block.one_layer_twice, Block.products, Block.dropout, Block.views, Block.in_place,
        Block.two_readers,
    )
}  # fmt: skip


class RandomModel(nn.Module):
    """Two to seven blocks, each of which adds to what came before or takes its place."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(draw, shared) for _ in range(draw.randint(2, 7)))
        self.adds = [draw.random() < 0.6 for _ in self.blocks]
        self.takes_mean = draw.random() < 0.5
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block, adds in zip(self.blocks, self.adds, strict=True):
            y = block(x)
            x = x + y if adds else y
        return self.head(x.mean(1) if self.takes_mean else x[:, -1])

    def describe(self) -> str:
        parts = (f"{block.kind}{' +' if adds else ''}" for block, adds in zip(self.blocks, self.adds, strict=True))
        return ", ".join(parts)
