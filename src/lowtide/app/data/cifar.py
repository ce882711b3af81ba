"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009) from their official files, python or binary version, tar or unpacked.

The python version is pickles. They are read without running anything they name: arrays become stand-ins made of their
bytes, and any other class is refused. That needs no numpy either.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.app.data.archive import Archive, DataError
from lowtide.app.data.images import make_images
from lowtide.app.data.splits import DataSet
from lowtide.app.shared.specs import UsageError

_PIXELS = 3 * 32 * 32
_AUGMENT = {"crop": 4, "flip": True, "cutout": 8}


@dataclass(frozen=True, slots=True)
class Release:
    """How one of the two sets is distributed. ``label_bytes`` go before each picture of a binary file."""

    archives: tuple[str, ...]
    train: tuple[str, ...]
    test: str
    labels: str
    label_bytes: int
    classes: int


RELEASES = {
    "cifar10": Release(
        archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test="test_batch",
        labels="labels",
        label_bytes=1,
        classes=10,
    ),
    "cifar100": Release(
        archives=("cifar-100-binary.tar.gz", "cifar-100-python.tar.gz"),
        train=("train",),
        test="test",
        labels="fine_labels",
        label_bytes=2,
        classes=100,
    ),
}


def load(name: str, path: Path, *, size: int | None = None) -> DataSet:
    """The set from its tar, from the folder that the tar holds, or from a folder with either."""
    release = RELEASES[name]
    archive = Archive(path, inside=release.archives)
    stems = (*release.train, release.test)
    is_binary = archive.find(f"{release.test}.bin") is not None
    suffix, read = (".bin", read_binary) if is_binary else ("", read_pickle)
    files = [archive.find(stem + suffix) for stem in stems]
    missing = [stem + suffix for stem, file in zip(stems, files, strict=True) if file is None]
    if missing:
        raise UsageError(
            f"{path} has no {', '.join(missing)}; {name} is its official tar ({' or '.join(release.archives)}) or what "
            "that unpacks to"
        )
    names = [file for file in files if file is not None]
    contents = archive.read(names)
    parts = [read(contents[file], file, release) for file in names]
    train = (torch.cat([images for images, _ in parts[:-1]]), torch.cat([labels for _, labels in parts[:-1]]))
    return make_images(name, train=train, test=parts[-1], classes=release.classes, size=size, augment=_AUGMENT)


def read_binary(content: bytes, name: str, release: Release) -> tuple[Tensor, Tensor]:
    """Records of labels (the finest one last) and pixels, plane after plane."""
    record = release.label_bytes + _PIXELS
    if not content or len(content) % record:
        raise DataError(f"{name} has {len(content)} bytes, which is no multiple of {record}: truncated or corrupted")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, record)
    images = rows[:, release.label_bytes :].reshape(-1, 3, 32, 32)
    return images, rows[:, release.label_bytes - 1].long()


def read_pickle(content: bytes, name: str, release: Release) -> tuple[Tensor, Tensor]:
    """A dict with ``data`` (count, 3072) and a list of labels."""
    try:
        batch = _Unpickler(io.BytesIO(content), encoding="bytes").load()
        values = {key.decode() if isinstance(key, bytes) else key: value for key, value in batch.items()}
        data, labels = values["data"], values[release.labels]
        pixels = data.tensor()
        targets = labels.tensor() if isinstance(labels, _Array) else torch.tensor(list(labels))
        return pixels.reshape(-1, 3, 32, 32), targets.long().view(len(pixels))
    except (pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{name} is truncated or no batch of CIFAR: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DataError(f"{name} is no batch of CIFAR ({type(error).__name__}: {error}): corrupted") from error


class _Dtype:
    def __init__(self, code: Any, *_: Any) -> None:
        self.code = code.decode() if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment: of no interest for bytes."""


class _Array:
    """A numpy array of bytes, as its shape and its bytes."""

    def __init__(self, shape: Sequence[int] = (0,), dtype: _Dtype | None = None, content: Any = b"") -> None:
        self.shape, self.dtype, self.content = shape, dtype, content

    def __setstate__(self, state: Any) -> None:
        _, self.shape, self.dtype, by_columns, self.content = state
        if by_columns:
            raise ValueError("an array stored by columns")

    def tensor(self) -> Tensor:
        if self.dtype is None or self.dtype.code not in ("u1", "|u1"):
            raise ValueError(f"an array of {getattr(self.dtype, 'code', None)}, not of bytes")
        if len(self.content) != math.prod(self.shape):
            raise ValueError(f"{len(self.content)} bytes for the shape {tuple(self.shape)}")
        return torch.frombuffer(bytearray(self.content), dtype=torch.uint8).view(tuple(self.shape))


def _reconstruct(*_: Any) -> _Array:
    return _Array()


def _from_buffer(content: Any, dtype: _Dtype, shape: Sequence[int], order: str) -> _Array:
    return _Array(shape, dtype, content)


_STAND_INS: Mapping[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy._core.multiarray._reconstruct": _reconstruct,
    "numpy.core.numeric._frombuffer": _from_buffer,
    "numpy._core.numeric._frombuffer": _from_buffer,
    "numpy.ndarray": _Array,
    "numpy.dtype": _Dtype,
    "_codecs.encode": codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _STAND_INS.get(f"{module}.{name}")
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch has no use for")
        return known
