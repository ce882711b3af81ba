"""LSTM classifier: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997).

The forget gate is from Gers et al. (2000), reading in both directions from Graves and Schmidhuber (2005). Recurrent
weights start orthogonal (Saxe et al., 2014), input weights as Glorot and Bengio (2010) have them, and the forget gate
open with a bias of 1 (Jozefowicz et al., 2015).
"""

import torch
from torch import Tensor, nn

from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.tasks import classification_loss, sample_text


class LSTMClassifier(nn.Module):
    """Embedding, LSTM layers, and a linear layer over the last state of each direction.

    Args:
        num_classes: number of logits.
        vocab_size: number of tokens.
        embedding: features per token.
        width: features of the state, in each direction.
        depth: number of layers.
        bidirectional: read the sequence backwards too.
        dropout: probability after the embedding, between layers and before the classifier.
    """

    def __init__(
        self,
        *,
        num_classes: int = 2,
        vocab_size: int = 20_000,
        embedding: int = 128,
        width: int = 256,
        depth: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.directions = 2 if bidirectional else 1
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            embedding,
            width,
            num_layers=depth,
            batch_first=True,
            bidirectional=bidirectional,
            # With one layer there is nothing between layers, and torch warns of a probability it cannot use.
            dropout=dropout if depth > 1 else 0.0,
        )
        self.classifier = nn.Linear(self.directions * width, num_classes)
        self._initialize()

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, num_classes) logits."""
        _, (state, _) = self.lstm(self.dropout(self.embedding(tokens)))
        # The states of the last layer come last: (directions, batch, width).
        last = state[-self.directions :].transpose(0, 1).flatten(1)
        logits: Tensor = self.classifier(self.dropout(last))
        return logits

    @torch.no_grad()
    def _initialize(self) -> None:
        for name, parameter in self.lstm.named_parameters():
            # torch stacks the gates as input, forget, cell, output, and adds the two biases.
            gates = parameter.chunk(4)
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                if name.startswith("bias_ih"):
                    nn.init.ones_(gates[1])
                continue
            for gate in gates:
                if name.startswith("weight_hh"):
                    nn.init.orthogonal_(gate)
                else:
                    nn.init.xavier_uniform_(gate)


ENTRIES = (
    ZooEntry(
        name="lstm",
        kind="text",
        builder=LSTMClassifier,
        sampler=sample_text,
        loss=classification_loss,
        tiny={"vocab_size": 100, "embedding": 16, "width": 16, "depth": 2, "bidirectional": True, "dropout": 0.1},
    ),
)
