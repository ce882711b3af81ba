"""MNIST and sets in its format (Fashion-MNIST, KMNIST): four idx files, packed with gzip or not.

The format (http://yann.lecun.com/exdb/mnist): two zero bytes, a code for the type (8: bytes), the number of dimensions,
each of them as four bytes with the highest first, then the values.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from lowtide.app.data.archive import Archive, DataError
from lowtide.app.data.images import make_images
from lowtide.app.data.splits import DataSet
from lowtide.app.shared.specs import UsageError

_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def load(name: str, path: Path, *, size: int | None = None) -> DataSet:
    """The four files from a folder, a tar or a zip; ``size`` resizes the pictures."""
    archive = Archive(path)
    found: list[str] = []
    for stem in _FILES:
        dotted = stem.replace("-idx", ".idx")
        file = archive.find(stem, f"{stem}.gz", dotted, f"{dotted}.gz")
        if file is None:
            raise UsageError(f"{path} has no {stem} or {stem}.gz: {name} comes as four idx files")
        found.append(file)
    contents = archive.read(found)
    parts = [read_idx(contents[file], file) for file in found]
    for images, labels, file in ((parts[0], parts[1], found[1]), (parts[2], parts[3], found[3])):
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise DataError(f"{path}: {len(images)} pictures, and {file} has {tuple(labels.shape)} labels")
    train, test = (parts[0].unsqueeze(1), parts[1].long()), (parts[2].unsqueeze(1), parts[3].long())
    return make_images(name, train=train, test=test, classes=10, size=size)


def read_idx(content: bytes, name: str) -> Tensor:
    """One idx file of bytes."""
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise DataError(f"{name} is no idx file of bytes: it begins with {content[:4].hex() or 'nothing'}")
    dimensions = content[3]
    begin = 4 + 4 * dimensions
    if len(content) < begin:
        raise DataError(f"{name} ends within its header: truncated")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    if len(content) - begin != math.prod(shape):
        raise DataError(
            f"{name} should have {math.prod(shape)} values of shape {shape} and has {len(content) - begin}: truncated"
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begin).view(shape)
