from collections.abc import Callable

import pytest
import torch

from lowtide.app import zoo
from lowtide.app.zoo.lstm import LSTMClassifier


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    # Embedding; four gates of input and state weights and two biases; classifier.
    assert count_parameters("lstm") == 20_000 * 128 + 4 * 256 * (128 + 256 + 2) + 2 * 257


@pytest.mark.parametrize("depth", [1, 2])
def test_the_classifier_sees_the_last_state_of_each_direction(depth: int) -> None:
    model = LSTMClassifier(vocab_size=10, embedding=4, width=3, depth=depth, bidirectional=True)
    tokens = torch.randint(10, (2, 5))
    outputs, _ = model.lstm(model.embedding(tokens))
    last = torch.cat([outputs[:, -1, :3], outputs[:, 0, 3:]], dim=1)
    torch.testing.assert_close(model(tokens), model.classifier(last))


def test_one_direction_sees_the_last_output() -> None:
    model = LSTMClassifier(vocab_size=10, embedding=4, width=3, num_classes=6)
    tokens = torch.randint(10, (2, 5))
    outputs, _ = model.lstm(model.embedding(tokens))
    torch.testing.assert_close(model(tokens), model.classifier(outputs[:, -1]))


def test_weights_start_orthogonal_with_an_open_forget_gate() -> None:
    model = LSTMClassifier(vocab_size=10, embedding=4, width=8, depth=2, bidirectional=True)
    parameters = dict(model.lstm.named_parameters())
    suffixes = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert len(parameters) == 4 * len(suffixes)
    for suffix in suffixes:
        for gate in parameters[f"weight_hh_{suffix}"].chunk(4):
            torch.testing.assert_close(gate @ gate.T, torch.eye(8), rtol=0, atol=1e-5)
        for gate in parameters[f"weight_ih_{suffix}"].chunk(4):
            assert 0 < gate.abs().max() <= (6 / sum(gate.shape)) ** 0.5
        biases = parameters[f"bias_ih_{suffix}"] + parameters[f"bias_hh_{suffix}"]
        assert biases.chunk(4)[1].eq(1).all() and biases.sum() == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_dropout_is_between_layers_only_where_there_are_some(depth: int) -> None:
    """Building with one layer must not warn either: warnings are errors here."""
    model = zoo.build("lstm", vocab_size=10, embedding=4, width=3, depth=depth, dropout=0.4)
    assert model.dropout.p == 0.4
    assert model.lstm.dropout == (0.4 if depth == 2 else 0.0)
