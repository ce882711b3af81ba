import math

import pytest
import torch
from torch import nn

from lowtide.app.zoo.transformer import PreNormBlock, SelfAttention


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_that_of_the_formula(causal: bool) -> None:
    """softmax(q kᵀ / sqrt(features)) v for each head, written out, in float64."""
    attention = SelfAttention(12, 3, causal=causal).double()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    mixed = []
    for head in range(3):
        features = slice(4 * head, 4 * head + 4)
        scores = query[..., features] @ key[..., features].mT / math.sqrt(4)
        if causal:
            scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        mixed.append(scores.softmax(-1) @ value[..., features])
    torch.testing.assert_close(attention(x), attention.proj(torch.cat(mixed, dim=-1)), rtol=1e-12, atol=1e-12)


def test_attention_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"divisible by its heads, got width=10 and heads=3"):
        SelfAttention(10, 3, causal=False)


@pytest.mark.parametrize("options", [{"attention_dropout": 0.5}, {"dropout": 0.5}])
def test_attention_drops_in_training_alone(options: dict[str, float]) -> None:
    attention = SelfAttention(8, 2, causal=False, **options)
    x = torch.randn(2, 6, 8)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), attention(x))


def test_the_residual_stream_is_not_normalised() -> None:
    block = PreNormBlock(SelfAttention(8, 2, causal=False), nn.Sequential(nn.Linear(8, 8)), width=8, eps=1e-5)
    for parameter in (*block.attn.proj.parameters(), *block.mlp.parameters()):
        nn.init.zeros_(parameter)
    x = torch.randn(2, 3, 8)
    assert torch.equal(block(x), x)
