import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.gpt import GPT

# Cutting a normal distribution at ±3 leaves this much of its standard deviation.
CUT = 0.98658


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("gpt2_small") == 124_439_808
    assert count_parameters("gpt2_small", tied_embeddings=False) == 124_439_808 + 50257 * 768


def test_embeddings_are_tied_by_default() -> None:
    tied = GPT(depth=1, width=8, heads=2)
    assert tied.head.weight is tied.token_embedding.weight
    untied = GPT(depth=1, width=8, heads=2, tied_embeddings=False)
    assert untied.head.weight is not untied.token_embedding.weight


@pytest.mark.parametrize("tied", [True, False])
def test_residual_projections_start_smaller(tied: bool, assert_std: Callable[[torch.Tensor, float], None]) -> None:
    depth = 3
    model = GPT(depth=depth, width=96, heads=3, tied_embeddings=tied)
    for block in model.blocks:
        for layer in (block.attn.qkv, block.mlp[0]):
            assert_std(layer.weight, 0.02 * CUT)
        for layer in (block.attn.proj, block.mlp[2]):
            assert_std(layer.weight, 0.02 * CUT / math.sqrt(2 * depth))
    for layer in (model.token_embedding, model.position_embedding, model.head):
        assert_std(layer.weight, 0.02 * CUT)
    assert not any(layer.bias.any() for layer in model.blocks.modules() if isinstance(layer, nn.Linear))


def test_no_position_sees_the_next_token() -> None:
    model = GPT(vocab_size=10, context=8, depth=2, width=16, heads=2).double()
    tokens = torch.randint(10, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 10
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(after[:, :5], before[:, :5], rtol=1e-12, atol=1e-12)
    assert (after[:, 5:] != before[:, 5:]).any(dim=-1).all()


def test_the_context_is_a_limit_and_not_a_length() -> None:
    model = GPT(vocab_size=10, context=8, depth=1, width=8, heads=2)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 10)
    with pytest.raises(ValueError, match=r"positions for 8 tokens, got 9; shorten the input"):
        model(torch.zeros(1, 9, dtype=torch.int64))


def test_example_is_the_stream_one_position_later() -> None:
    inputs, target = zoo.describe("gpt").example(2, length=7)
    assert inputs.shape == target.shape == (2, 7)
    assert torch.equal(inputs[:, 1:], target[:, :-1])


def test_dropout_is_on_by_default_in_the_released_model_alone() -> None:
    assert zoo.describe("gpt2_small").options["dropout"] == 0.1
    assert zoo.describe("gpt").options["dropout"] == 0.0
    model = GPT(depth=2, width=8, heads=2, dropout=0.3)
    # After the embeddings, and per block after the attention's projection and the MLP.
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.3] * (1 + 2 * 2)
    assert all(block.attn.attention_dropout == 0.3 for block in model.blocks)
