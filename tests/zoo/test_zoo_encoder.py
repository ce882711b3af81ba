from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.app import zoo
from lowtide.app.zoo.encoder import EncoderClassifier


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    # Embeddings; in each block two norms, attention and an MLP of four times the width; last norm; classifier.
    block = 2 * 2 * 256 + (256 + 1) * 3 * 256 + (256 + 1) * 256 + (256 + 1) * 1024 + (1024 + 1) * 256
    assert count_parameters("encoder") == (20_000 + 64) * 256 + 4 * block + 2 * 256 + 2 * 257


def test_padding_does_not_count_in_the_mean() -> None:
    """Without blocks a position is its embedding alone, so that the mean can be written out."""
    model = EncoderClassifier(vocab_size=10, context=6, depth=0, width=8, heads=2).double().eval()
    tokens = torch.tensor([[0, 0, 0, 4, 5, 7]])
    words = model.token_embedding(tokens[:, 3:]) + model.position_embedding.weight[3:]
    expected = model.classifier(model.norm(words).mean(1))
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)


def test_a_text_of_padding_alone_is_finite() -> None:
    model = EncoderClassifier(vocab_size=10, context=4, depth=1, width=8, heads=2)
    assert model(torch.zeros(2, 4, dtype=torch.int64)).isfinite().all()


def test_every_position_sees_all_others() -> None:
    model = EncoderClassifier(vocab_size=10, context=4, depth=1, width=8, heads=2).double().eval()
    seen: list[torch.Tensor] = []
    model.blocks.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    for last in (4, 5):
        model(torch.tensor([[1, 2, 3, last]]))
    assert (seen[0][:, :3] != seen[1][:, :3]).any(dim=-1).all()


def test_the_context_is_a_limit_and_not_a_length() -> None:
    model = EncoderClassifier(vocab_size=10, context=8, depth=1, width=8, heads=2, num_classes=3)
    assert model(torch.ones(1, 3, dtype=torch.int64)).shape == (1, 3)
    with pytest.raises(ValueError, match=r"positions for 8 tokens, got 9; shorten the input"):
        model(torch.ones(1, 9, dtype=torch.int64))


def test_dropout_is_after_the_embeddings_in_each_branch_and_before_the_classifier() -> None:
    model = zoo.build("encoder", vocab_size=10, depth=2, width=8, heads=2, dropout=0.3)
    # One module serves before and after the blocks; per block the attention's projection and the MLP.
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.3] * (1 + 2 * 2)
