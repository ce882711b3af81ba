"""The pre-norm transformer block that ViT and GPT share: Vaswani et al., "Attention Is All You Need" (2017).

Normalisation before each branch instead of after each addition follows GPT-2 and ViT (and Xiong et al., "On Layer
Normalization in the Transformer Architecture", 2020).
"""

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head self-attention with one linear layer for queries, keys and values.

    Args:
        width: features per position.
        heads: number of heads, a divisor of `width`.
        causal: let each position see only itself and those before it.
        attention_dropout: probability on the attention weights.
        dropout: probability on the output.
    """

    def __init__(
        self, width: int, heads: int, *, causal: bool, attention_dropout: float = 0.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if width % heads != 0:
            raise ValueError(f"attention needs a width divisible by its heads, got width={width} and heads={heads}")
        self.heads = heads
        self.causal = causal
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        # (batch, length, 3, heads, features) to three views of (batch, heads, length, features).
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.attention_dropout if self.training else 0.0, is_causal=self.causal
        )
        out: Tensor = self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))
        return out


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        attention: the first branch.
        mlp: the second one.
        width: features per position.
        eps: what the normalisations add to the variance.
    """

    def __init__(self, attention: SelfAttention, mlp: nn.Sequential, *, width: int, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x
