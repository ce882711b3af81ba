"""What every data set is turned into: two splits of tensors, and what a model has to know about them.

A split hands out the keys of its samples, in order or shuffled, and gathers a batch by its keys. Everything that
differs between pictures, sentences and streams of text is in here, so that the loop knows one way to ask for a batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Kind = Literal["image", "tokens", "text"]
_SAMPLED = 5000  # pictures, evenly spaced, that mean and deviation are measured on: a cache may be larger than memory


class Split(Protocol):
    """The samples of training or of testing."""

    @property
    def nbytes(self) -> int: ...

    @property
    def per_epoch(self) -> int:
        """How many keys ``shuffled`` gives."""
        ...

    def keys(self) -> Tensor:
        """Every sample once, in order."""
        ...

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """The keys of one epoch of training."""
        ...

    def select(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, on the device of the split; so are the keys."""
        ...

    def to(self, device: torch.device) -> Split: ...


@dataclass(frozen=True, slots=True)
class Table:
    """One row a sample: pictures (count, channels, height, width) or tokens (count, length), and a class for each."""

    inputs: Tensor
    targets: Tensor

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes

    @property
    def per_epoch(self) -> int:
        return len(self.targets)

    def keys(self) -> Tensor:
        return torch.arange(len(self.targets))

    def shuffled(self, generator: torch.Generator) -> Tensor:
        return torch.randperm(len(self.targets), generator=generator)

    def select(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.inputs.index_select(0, keys)
        # Pictures stay bytes until they are on the device of the model; tokens are what embeddings take.
        return inputs if inputs.dtype == torch.uint8 else inputs.long(), self.targets.index_select(0, keys)

    def to(self, device: torch.device) -> Table:
        return Table(self.inputs.to(device), self.targets.to(device))


@dataclass(frozen=True, slots=True)
class Stream:
    """One long text; a sample is a window of ``length`` tokens, its target the same window one token later.

    A key is where the window begins. An epoch cuts the text into windows from a beginning of its own, so that a token
    is not always seen with the same distance to the end of its window.
    """

    tokens: Tensor
    length: int

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes

    @property
    def per_epoch(self) -> int:
        return (len(self.tokens) - self.length) // self.length

    def keys(self) -> Tensor:
        return torch.arange((len(self.tokens) - 1) // self.length) * self.length

    def shuffled(self, generator: torch.Generator) -> Tensor:
        begin = torch.randint(self.length, (1,), generator=generator)
        return torch.randperm(self.per_epoch, generator=generator) * self.length + begin

    def select(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        places = keys.unsqueeze(1) + torch.arange(self.length + 1, device=keys.device)
        windows = self.tokens[places].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def to(self, device: torch.device) -> Stream:
        return Stream(self.tokens.to(device), self.length)


@dataclass(frozen=True)
class DataSet:
    """A data set in memory. ``classes`` counts classes, or the tokens of the vocabulary where text is predicted.

    ``augment`` is what is done to the pictures of this set unless the user says otherwise.
    """

    name: str
    kind: Kind
    train: Split
    test: Split
    classes: int
    vocabulary: int = 0
    length: int = 0
    augment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one picture: channels, height, width."""
        assert isinstance(self.train, Table) and self.kind == "image", "only pictures have a shape"
        return tuple(self.train.inputs.shape[1:])

    @cached_property
    def scale(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel of (a sample of) the training pictures, in units of one byte."""
        assert isinstance(self.train, Table) and self.kind == "image", "only pictures are normalised"
        images = self.train.inputs
        step = max(1, len(images) // _SAMPLED)
        sums = torch.zeros(2, images.shape[1], dtype=torch.float64)
        count = 0
        for part in images[::step].split(512):
            values = part.to(torch.float64)
            sums += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
            count += values.numel() // values.shape[1]
        mean = sums[0] / count
        deviation = (sums[1] / count - mean.square()).clamp(min=1.0).sqrt()
        return tuple(mean.tolist()), tuple(deviation.tolist())

    def limited(self, train: int | None, test: int | None) -> DataSet:
        """The first samples only, for a quick look; streams are cut to as many windows."""
        return dataclasses.replace(self, train=_cut(self.train, train), test=_cut(self.test, test))


def _cut(split: Split, count: int | None) -> Split:
    if count is None:
        return split
    if isinstance(split, Stream):
        return Stream(split.tokens[: (count + 1) * split.length], split.length)
    assert isinstance(split, Table), "there are two kinds of splits"
    return Table(split.inputs[:count], split.targets[:count])
