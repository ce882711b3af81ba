"""MNIST's format: what is read is what was written, and what is broken is refused with the name of the file."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.app import data
from lowtide.app.data import DataError
from lowtide.app.data.idx import read_idx
from lowtide.app.shared.specs import UsageError


def _idx(values: Tensor) -> bytes:
    return struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape) + bytes(values.flatten().tolist())


@pytest.fixture
def parts() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (7, 6, 6), dtype=torch.uint8, generator=generator)
    labels = torch.tensor([0, 9, 3, 3, 1, 7, 2], dtype=torch.uint8)
    return {
        "train-images-idx3-ubyte": images[:5],
        "train-labels-idx1-ubyte": labels[:5],
        "t10k-images-idx3-ubyte": images[5:],
        "t10k-labels-idx1-ubyte": labels[5:],
    }


@pytest.mark.parametrize("style", ["plain", "gz", "dotted"])
def test_what_is_read_is_what_was_written(tmp_path: Path, parts: dict[str, Tensor], style: str):
    for name, values in parts.items():
        content = _idx(values)
        if style == "gz":
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / (name.replace("-idx", ".idx") if style == "dotted" else name)).write_bytes(content)
    found = data.load("fashion_mnist", str(tmp_path))
    assert found.shape == (1, 6, 6) and found.classes == 10 and found.kind == "image"
    inputs, targets = found.train.select(found.train.keys())
    assert torch.equal(inputs.squeeze(1), parts["train-images-idx3-ubyte"])
    assert torch.equal(targets, parts["train-labels-idx1-ubyte"].long())
    assert torch.equal(found.test.select(found.test.keys())[1], torch.tensor([7, 2]))


def test_pictures_are_resized(tmp_path: Path, parts: dict[str, Tensor]):
    for name, values in parts.items():
        flat = torch.full_like(values, 200) if "images" in name else values
        (tmp_path / name).write_bytes(_idx(flat))
    found = data.load("mnist", str(tmp_path), size=9)
    assert found.shape == (1, 9, 9)
    assert (found.train.select(found.train.keys())[0] == 200).all()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no idx file of bytes: it begins with nothing"),
        (b"\x1f\x8b\x08\x00", "begins with 1f8b0800"),
        (b"\0\0\x08\x03\0\0", "ends within its header"),
        (b"\0\0\x08\x01\0\0\0\x05abc", "should have 5 values .* and has 3: truncated"),
    ],
)
def test_a_broken_file_is_named(content: bytes, message: str):
    with pytest.raises(DataError, match=message) as raised:
        read_idx(content, "some-file")
    assert "some-file" in str(raised.value)


def test_a_truncated_gz_is_named(tmp_path: Path, parts: dict[str, Tensor]):
    for name, values in parts.items():
        content = gzip.compress(_idx(values))
        (tmp_path / f"{name}.gz").write_bytes(content[:-9] if "t10k-images" in name else content)
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz is truncated or corrupted"):
        data.load("mnist", str(tmp_path))


def test_labels_that_do_not_fit_are_refused(tmp_path: Path, parts: dict[str, Tensor]):
    for name, values in parts.items():
        (tmp_path / name).write_bytes(_idx(values[:-1] if name == "train-labels-idx1-ubyte" else values))
    with pytest.raises(DataError, match="5 pictures, and train-labels-idx1-ubyte has"):
        data.load("mnist", str(tmp_path))


def test_a_label_that_is_no_class_is_refused(tmp_path: Path, parts: dict[str, Tensor]):
    for name, values in parts.items():
        (tmp_path / name).write_bytes(_idx(values + 1 if "train-labels" in name else values))
    with pytest.raises(DataError, match="a label is 10, but there are 10 classes"):
        data.load("mnist", str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path, parts: dict[str, Tensor]):
    for name, values in list(parts.items())[:-1]:
        (tmp_path / name).write_bytes(_idx(values))
    with pytest.raises(UsageError, match="has no t10k-labels-idx1-ubyte"):
        data.load("mnist", str(tmp_path))
