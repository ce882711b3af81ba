"""From bytes to pictures: what the loaders of picture sets share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.app.data.archive import DataError
from lowtide.app.data.splits import DataSet, Table
from lowtide.app.shared.specs import UsageError


def make_images(
    name: str,
    *,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    classes: int,
    size: int | None = None,
    augment: Mapping[str, Any] | None = None,
) -> DataSet:
    """A set of pictures; (images, labels) of bytes and int64. ``size`` resizes them to so many pixels a side."""
    for labels in (train[1], test[1]):
        if not len(labels):
            raise DataError(f"{name}: there are no pictures")
        if int(labels.amax()) >= classes or int(labels.amin()) < 0:
            raise DataError(f"{name}: a label is {int(labels.amax())}, but there are {classes} classes: corrupted")
    splits = [Table(resize(images, size), labels) for images, labels in (train, test)]
    return DataSet(name, "image", splits[0], splits[1], classes, augment=augment or {})


def resize(images: Tensor, size: int | None) -> Tensor:
    """Bilinear with antialiasing, a few at a time: as floats they are four times as large."""
    if size is None or tuple(images.shape[-2:]) == (size, size):
        return images
    if size < 1:
        raise UsageError(f"size is a number of pixels, 1 or more; got {size}")
    parts = [
        F.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True).round_().clamp_(0, 255)
        for part in images.split(1024)
    ]
    return torch.cat([part.to(torch.uint8) for part in parts])
