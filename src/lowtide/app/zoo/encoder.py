"""A small encoder that classifies text: the encoder of Vaswani et al., "Attention Is All You Need" (2017), pre-norm.

Learned positions, exact GELU, and a linear layer over the mean of the words. Weights start with a std of 0.02, as in
Devlin et al., "BERT" (2019).
"""

import torch
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.initialization import truncated_normal_
from lowtide.app.zoo.tasks import classification_loss, sample_text
from lowtide.app.zoo.transformer import PreNormBlock, SelfAttention


class EncoderClassifier(nn.Module):
    """A transformer in which every position sees all others, classified from the mean over the words.

    To attention, padding is a token like any other; in the mean it does not count.

    Args:
        num_classes: number of logits.
        vocab_size: number of tokens.
        context: the most positions that it takes.
        depth: number of blocks.
        width: features per position.
        heads: attention heads, a divisor of `width`.
        dropout: probability after the embeddings, at the end of each branch and before the classifier.
        padding: the token that fills up short texts.
    """

    def __init__(
        self,
        *,
        num_classes: int = 2,
        vocab_size: int = 20_000,
        context: int = 64,
        depth: int = 4,
        width: int = 256,
        heads: int = 4,
        dropout: float = 0.1,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.context, self.padding = context, padding
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_make_block(width, heads, dropout=dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, num_classes) logits."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(
                f"this encoder has positions for {self.context} tokens, got {length}; "
                "shorten the input or build it with a longer context"
            )
        positions = torch.arange(length, device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        x = self.norm(self.blocks(x))
        is_word = (tokens != self.padding).unsqueeze(-1)
        mean = (x * is_word).sum(1) / is_word.sum(1).clamp(min=1)  # a text may be padding alone
        logits: Tensor = self.classifier(self.dropout(mean))
        return logits

    def _initialize(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                truncated_normal_(layer.weight, 0.02)
            if isinstance(layer, nn.Linear):
                nn.init.zeros_(layer.bias)


def _make_block(width: int, heads: int, *, dropout: float) -> PreNormBlock:
    mlp = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )
    return PreNormBlock(SelfAttention(width, heads, causal=False, dropout=dropout), mlp, width=width, eps=1e-5)


ENTRIES = (
    ZooEntry(
        name="encoder",
        kind="text",
        builder=EncoderClassifier,
        sampler=sample_text,
        loss=classification_loss,
        tiny={"vocab_size": 100, "context": 32, "depth": 2, "width": 32, "heads": 2, "dropout": 0.0},
    ),
)
