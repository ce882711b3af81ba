"""Which model is planned, and what its batches look like."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.app import models
from lowtide.app.data import DataSet, Table
from lowtide.app.shared import workload
from lowtide.app.shared.specs import UsageError
from lowtide.app.shared.workload import Workload
from lowtide.app.zoo.tasks import classification_loss, next_token_loss, sample_next_tokens

_TORCHVISION = "torchvision:"


def find_subject(
    name: str, options: Mapping[str, Any], *, tiny: bool, shape: tuple[int, ...] | None, classes: int | None
) -> Workload:
    """A model of the zoo or of torchvision, whose batches are known, or any other, for batches of ``shape``."""
    if ":" not in name or name.startswith(_TORCHVISION):
        if shape is not None or classes is not None:
            raise UsageError(f"the batches of {name!r} are known; write --set image_size=160 or --set num_classes=10")
        return workload.find_workload(name, options, tiny=tiny)
    if tiny:
        raise UsageError(f"--tiny is for models of the zoo, {name!r} is none")
    if shape is None:
        raise UsageError(f"say what a sample of {name!r} looks like: --input 3x224x224, or --input 1024 for tokens")
    return _from_elsewhere(name, options, shape, classes or 1000)


def parse_shape(text: str) -> tuple[int, ...]:
    """``"3x224x224"`` (channels, height, width) or ``"1024"`` (tokens)."""
    try:
        shape = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        shape = ()
    if len(shape) not in (1, 3) or any(size < 1 for size in shape):
        raise UsageError(f"cannot read {text!r} as the shape of a sample; write 3x224x224, or 1024 for tokens")
    return shape


def _from_elsewhere(name: str, options: Mapping[str, Any], shape: tuple[int, ...], classes: int) -> Workload:
    """``find_model`` fits models to a data set; one sample of nothing tells it the same."""
    if len(shape) == 3:
        blank = Table(torch.zeros(1, *shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
        data = DataSet("plan", "image", blank, blank, classes)
        sample = partial(_sample_images, shape=shape, classes=classes)
        return Workload(
            name, "image", classes, models.find_model(name, options, data).build, sample, classification_loss
        )
    tokens = Table(torch.zeros(1, *shape, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    data = DataSet("plan", "tokens", tokens, tokens, classes, vocabulary=classes, length=math.prod(shape))
    drawn = partial(sample_next_tokens, vocab_size=classes, context=math.prod(shape))
    return Workload(name, "tokens", classes, models.find_model(name, options, data).build, drawn, next_token_loss)


def _sample_images(
    batch: int, generator: torch.Generator, *, shape: tuple[int, ...], classes: int
) -> tuple[Tensor, Tensor]:
    images = torch.randn(batch, *shape, generator=generator, device=generator.device)
    return images, torch.randint(classes, (batch,), generator=generator, device=generator.device)
