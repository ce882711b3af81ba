"""What each kind of model is fed and how it is scored: one sampler and one loss per kind.

Samplers draw from the generator they are given, on its device, and never from the global one, so that making a batch
does not move the dropout masks of the model it is made for.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.errors import UnknownNameError

Kind = Literal["image", "tokens", "segmentation", "text"]
"""A class per picture, the next token at each position, a class per pixel, a class per text."""

Stem = Literal["imagenet", "cifar"]
"""How a convolutional network begins: strided for pictures of about 224 pixels, or gentle for those of 32."""

_STEM_SIZES = {"imagenet": 224, "cifar": 32}


def check_stem(stem: str) -> None:
    """Raise `UnknownNameError` unless `stem` is one that the convolutional networks have."""
    if stem not in _STEM_SIZES:
        raise UnknownNameError("stem", stem, _STEM_SIZES)


def sample_images(
    batch: int, generator: torch.Generator, *, num_classes: int, image_size: int
) -> tuple[Tensor, Tensor]:
    """Standard normal pictures (batch, 3, image_size, image_size), and a class for each."""
    images = torch.randn(batch, 3, image_size, image_size, generator=generator, device=generator.device)
    return images, _draw_integers(num_classes, (batch,), generator=generator)


def sample_stem_images(
    batch: int, generator: torch.Generator, *, num_classes: int, stem: Stem, image_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """`sample_images` at the size that the stem was made for, unless another one is given."""
    check_stem(stem)
    size = _STEM_SIZES[stem] if image_size is None else image_size
    return sample_images(batch, generator, num_classes=num_classes, image_size=size)


def sample_segmentation(
    batch: int,
    generator: torch.Generator,
    *,
    num_classes: int,
    in_channels: int,
    depth: int,
    image_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pictures and a class for each pixel; by default 8 pixels wide where a network of this depth is coarsest."""
    size = 8 * 2**depth if image_size is None else image_size
    images = torch.randn(batch, in_channels, size, size, generator=generator, device=generator.device)
    return images, _draw_integers(num_classes, (batch, size, size), generator=generator)


def sample_next_tokens(
    batch: int, generator: torch.Generator, *, vocab_size: int, context: int, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Uniform tokens (batch, length), and the same stream one position later; by default as long as the context."""
    steps = context if length is None else length
    stream = _draw_integers(vocab_size, (batch, steps + 1), generator=generator)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def sample_text(
    batch: int, generator: torch.Generator, *, vocab_size: int, num_classes: int, length: int = 32
) -> tuple[Tensor, Tensor]:
    """Uniform tokens (batch, length), and a class for each sequence."""
    tokens = _draw_integers(vocab_size, (batch, length), generator=generator)
    return tokens, _draw_integers(num_classes, (batch,), generator=generator)


def classification_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, classes, ...) logits against (batch, ...) classes."""
    return F.cross_entropy(output, target)


def next_token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy of (batch, length, vocabulary) logits against (batch, length) tokens."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def _draw_integers(high: int, shape: tuple[int, ...], *, generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)
