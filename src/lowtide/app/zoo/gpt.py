"""GPT: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).

Pre-norm decoder with learned positions and the tanh form of GELU. Weights start with a std of 0.02, and the projections
that end in the residual stream with 0.02 / sqrt(2 × depth), as that many branches add up in it.
"""

import math
from functools import partial

import torch
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import truncated_normal_
from lowtide.app.zoo.tasks import next_token_loss, sample_next_tokens
from lowtide.app.zoo.transformer import PreNormBlock, SelfAttention


class GPT(nn.Module):
    """A transformer that predicts, at each position, the token that follows.

    The defaults are a byte-level model of about 10.8 million parameters; `gpt2_small` has those of the released one.

    Args:
        vocab_size: number of tokens, and of logits at each position.
        context: the most positions that it takes.
        depth: number of blocks.
        width: features per position.
        heads: attention heads, a divisor of `width`.
        dropout: probability after the embeddings, on the attention weights and at the end of each branch.
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
        dropout: float = 0.0,
        tied_embeddings: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_make_block(width, heads, dropout=dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tied_embeddings:
            self.head.weight = self.token_embedding.weight
        self._initialize(residual_std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, length, vocab_size) logits."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"this GPT has positions for {self.context} tokens, got {length}; "
                "shorten the input or build it with a longer context"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    def _initialize(self, *, residual_std: float) -> None:
        for name, layer in self.named_modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.proj", "mlp.2"))
                truncated_normal_(layer.weight, residual_std if ends_branch else 0.02)
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                nn.init.zeros_(layer.bias)


def _make_block(width: int, heads: int, *, dropout: float) -> PreNormBlock:
    mlp = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(approximate="tanh"),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )
    attention = SelfAttention(width, heads, causal=True, attention_dropout=dropout, dropout=dropout)
    return PreNormBlock(attention, mlp, width=width, eps=1e-5)


ENTRIES = tuple(
    ZooEntry(
        name=name,
        kind="tokens",
        builder=builder,
        sampler=sample_next_tokens,
        loss=next_token_loss,
        tiny={"vocab_size": 64, "context": 16, "depth": 2, "width": 32, "heads": 2},
    )
    for name, builder in (
        ("gpt", GPT),
        ("gpt2_small", partial(GPT, vocab_size=50257, context=1024, depth=12, width=768, heads=12, dropout=0.1)),
    )
)
