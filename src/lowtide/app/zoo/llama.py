"""Llama: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models" (2023).

Pre-norm decoder with RMS norms (Zhang and Sennrich, 2019), rotary positions (Su et al., "RoFormer", 2021), a SwiGLU
feed-forward (Shazeer, "GLU Variants Improve Transformer", 2020) and no biases. Groups of heads share their keys and
values, as in Llama 2 and 3 (Ainslie et al., "GQA", 2023). Weights start as those of `gpt.py`.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import truncated_normal_
from lowtide.app.zoo.tasks import next_token_loss, sample_next_tokens


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) over the features, in float32, times a weight in the dtype of x.

    In single ops, as the released models write it, and not `nn.RMSNorm`, which is one op.

    Args:
        width: features per position.
        eps: what is added to the mean square.
    """

    def __init__(self, width: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        dtype = x.dtype
        x = x.to(torch.float32)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(dtype)


class GroupedAttention(nn.Module):
    """Causal self-attention with rotary positions, in which groups of heads share their keys and values.

    Args:
        width: features per position.
        heads: number of heads of the queries, a divisor of `width` that leaves each an even number of features.
        kv_heads: number of heads of the keys and values, a divisor of `heads`.
        base: of the rotary positions: per position, pair i of a head's features turns by base^(-2 i / features).
    """

    def __init__(self, width: int, heads: int, *, kv_heads: int, base: float) -> None:
        super().__init__()
        if width % heads != 0 or (width // heads) % 2 != 0:
            raise ValueError(
                "rotary attention needs a width that gives each head an even number of features, "
                f"got width={width} and heads={heads}"
            )
        if kv_heads < 1 or heads % kv_heads != 0:
            raise ValueError(
                f"grouped attention needs heads divisible by its kv_heads, got heads={heads} and kv_heads={kv_heads}"
            )
        self.heads = heads
        self.kv_heads = kv_heads
        self.features = width // heads
        self.base = base
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.features, bias=False)
        self.v = nn.Linear(width, kv_heads * self.features, bias=False)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        # Each (batch, heads, length, features).
        query = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.k(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        value = self.v(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        cos, sin = make_rotation(x.shape[1], self.features, base=self.base, device=x.device)
        cos, sin = cos.to(query.dtype), sin.to(query.dtype)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        groups = self.heads // self.kv_heads
        mixed = F.scaled_dot_product_attention(
            query, _repeat_heads(key, groups), _repeat_heads(value, groups), is_causal=True
        )
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Args:
        width: features per position.
        hidden: features in between.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.act = nn.SiLU()
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


class LlamaBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: the first branch.
        mlp: the second one.
        width: features per position.
    """

    def __init__(self, attention: GroupedAttention, mlp: SwiGLU, *, width: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(width)
        self.attn = attention
        self.mlp_norm = RMSNorm(width)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        x = x + self.attn(self.attn_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Llama(nn.Module):
    """A transformer that predicts, at each position, the token that follows.

    The defaults are a byte-level model of about 9.6 million parameters; `llama_1b` has the sizes of Llama 3.2 1B, with
    the context that this one was first trained with and without its later stretching of the rotary positions.

    Args:
        vocab_size: number of tokens, and of logits at each position.
        context: the most positions that it takes.
        depth: number of blocks.
        width: features per position.
        heads: attention heads, a divisor of `width`.
        kv_heads: heads of the keys and values, a divisor of `heads`.
        hidden: features inside the feed-forward layers.
        base: of the rotary positions.
        tied_embeddings: let the output layer use the token embedding as its weight.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        context: int = 256,
        depth: int = 6,
        width: int = 384,
        heads: int = 6,
        kv_heads: int = 2,
        hidden: int = 1024,
        base: float = 10000.0,
        tied_embeddings: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.Sequential(
            *(
                LlamaBlock(
                    GroupedAttention(width, heads, kv_heads=kv_heads, base=base), SwiGLU(width, hidden), width=width
                )
                for _ in range(depth)
            )
        )
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied_embeddings:
            self.head.weight = self.embedding.weight
        self._initialize(residual_std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, length, vocab_size) logits."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"this Llama has positions for {self.context} tokens, got {length}; "
                "shorten the input or build it with a longer context"
            )
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return logits

    def _initialize(self, *, residual_std: float) -> None:
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.proj", "mlp.down"))
                truncated_normal_(layer.weight, residual_std if ends_branch else 0.02)


def make_rotation(length: int, features: int, *, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (length, features) of position × base^(-2 i / features), of pair i = feature mod half, float32.

    They are made anew in each forward: a buffer would be rounded with the weights where a model is cast to 16 bits.
    """
    exponents = torch.arange(0, features, 2, dtype=torch.float32, device=device) / features
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = positions.unsqueeze(1) * base**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + features / 2) of (..., length, features) by the angles of `make_rotation`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """(batch, heads, length, features), each head `times` in a row."""
    batch, heads, length, features = x.shape
    return x.unsqueeze(2).expand(-1, -1, times, -1, -1).reshape(batch, heads * times, length, features)


ENTRIES = tuple(
    ZooEntry(
        name=name,
        kind="tokens",
        builder=builder,
        sampler=sample_next_tokens,
        loss=next_token_loss,
        tiny={"vocab_size": 64, "context": 16, "depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48},
    )
    for name, builder in (
        ("llama", Llama),
        (
            "llama_1b",
            partial(
                Llama,
                vocab_size=128256,
                context=8192,
                depth=16,
                width=2048,
                heads=32,
                kv_heads=8,
                hidden=8192,
                base=500000.0,
                tied_embeddings=True,
            ),
        ),
    )
)
