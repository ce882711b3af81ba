"""CIFAR from its official forms: python and binary, tar and folder; pickles are read without being run."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowtide.app import data
from lowtide.app.data import DataError
from lowtide.app.data.cifar import RELEASES, read_binary, read_pickle
from lowtide.app.shared.specs import UsageError

_EACH = 3


def _images(number: int, count: int = _EACH) -> tuple[Tensor, list[int]]:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(256, (count, 3072), dtype=torch.uint8, generator=generator)
    return images, torch.randint(10, (count,), generator=generator).tolist()


def _binary(images: Tensor, *labels: list[int]) -> bytes:
    rows = [*(torch.tensor(part, dtype=torch.uint8).unsqueeze(1) for part in labels), images]
    return bytes(torch.cat(rows, 1).flatten().tolist())


def _text(value: bytes) -> bytes:
    """A string as Python 2 pickled it."""
    return b"T" + struct.pack("<I", len(value)) + value


def _python2(images: Tensor, labels: list[int], key: bytes = b"labels") -> bytes:
    """A batch as Python 2 and numpy of that time wrote the official files, opcode by opcode."""
    content = bytes(images.flatten().tolist())
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + _text(b"b") + b"\x87R"
        b"(K\x01J" + struct.pack("<i", len(images)) + b"M\x00\x0c\x86"
        b"cnumpy\ndtype\n"
        + _text(b"u1")
        + b"K\0K\x01\x87R(K\x03"
        + _text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
        b"\x89" + _text(content) + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    name = _text(b"batch_label") + _text(b"testing batch 1 of 1")
    return b"\x80\x02}(" + name + _text(b"data") + array + _text(key) + numbers + b"u."


def _write_release(folder: Path, form: str) -> tuple[Tensor, list[int]]:
    everything, labels = [], []
    for number, stem in enumerate((*RELEASES["cifar10"].train, "test_batch")):
        images, classes = _images(number)
        content = _binary(images, classes) if form == "binary" else _python2(images, classes)
        (folder / (f"{stem}.bin" if form == "binary" else stem)).write_bytes(content)
        everything.append(images)
        labels += classes
    (folder / "batches.meta").write_bytes(b"not looked at")
    return torch.cat(everything).view(-1, 3, 32, 32), labels


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("place", ["folder", "tar", "folder with tar", "folder above"])
def test_every_official_form_gives_the_same(tmp_path: Path, form: str, place: str):
    inner = tmp_path / "cifar-10-batches"
    inner.mkdir()
    images, labels = _write_release(inner, form)
    path = {"folder": inner, "folder above": tmp_path}.get(place)
    if path is None:
        archive = tmp_path / "data" / f"cifar-10-{form}.tar.gz"
        archive.parent.mkdir()
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(inner, "cifar-10-batches")
        path = archive if place == "tar" else archive.parent
    found = data.load("cifar10", str(path))
    assert found.shape == (3, 32, 32) and found.classes == 10
    assert found.augment == {"crop": 4, "flip": True, "cutout": 8}
    inputs, targets = found.train.select(found.train.keys())
    assert torch.equal(inputs, images[:-_EACH]) and targets.tolist() == labels[:-_EACH]
    inputs, targets = found.test.select(found.test.keys())
    assert torch.equal(inputs, images[-_EACH:]) and targets.tolist() == labels[-_EACH:]


@pytest.mark.parametrize("form", ["binary", "python"])
def test_cifar100_has_its_fine_labels(tmp_path: Path, form: str):
    for number, stem in enumerate(("train", "test")):
        images, coarse = _images(number)
        fine = [label + 80 for label in coarse]
        if form == "binary":
            (tmp_path / f"{stem}.bin").write_bytes(_binary(images, coarse, fine))
        else:
            (tmp_path / stem).write_bytes(_python2(images, fine, b"fine_labels"))
    found = data.load("cifar100", str(tmp_path))
    assert found.classes == 100
    assert found.train.select(found.train.keys())[1].tolist() == [label + 80 for label in _images(0)[1]]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_pickles_of_todays_numpy_are_read_too(protocol: int):
    numpy = pytest.importorskip("numpy")
    images, labels = _images(0)
    content = pickle.dumps({"data": numpy.array(images.tolist(), dtype="uint8"), "labels": labels}, protocol)
    found, targets = read_pickle(content, "batch", RELEASES["cifar10"])
    assert torch.equal(found.flatten(1), images) and targets.tolist() == labels


class _Spiteful:
    def __reduce__(self) -> tuple[object, ...]:
        return (print, ("this must not be printed",))


def test_a_pickle_cannot_run_anything(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(DataError, match=r"it asks for builtins\.print"):
        read_pickle(pickle.dumps({"data": _Spiteful()}), "batch", RELEASES["cifar10"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("value", [{}, {"data": 3, "labels": []}, [1], {"data": "text", "labels": [1]}])
def test_a_pickle_of_something_else_is_refused(value: object):
    with pytest.raises(DataError, match="is no batch of CIFAR"):
        read_pickle(pickle.dumps(value), "batch", RELEASES["cifar10"])


@pytest.mark.parametrize("cut", [1, 100, 5000])
def test_a_truncated_file_is_refused(cut: int):
    images, labels = _images(0)
    with pytest.raises(DataError, match=r"batch has .* bytes, which is no multiple of 3073: truncated"):
        read_binary(_binary(images, labels)[:-cut], "batch", RELEASES["cifar10"])
    with pytest.raises(DataError, match="batch is"):
        read_pickle(_python2(images, labels)[:-cut], "batch", RELEASES["cifar10"])


def test_more_labels_than_pictures_are_refused():
    images, labels = _images(0)
    with pytest.raises(DataError, match="is no batch of CIFAR"):
        read_pickle(_python2(images, [*labels, 1]), "batch", RELEASES["cifar10"])


def test_a_broken_tar_is_refused(tmp_path: Path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for number, stem in enumerate((*RELEASES["cifar10"].train, "test_batch")):
            content = _binary(*_images(number))
            member = tarfile.TarInfo(f"{stem}.bin")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(buffer.getvalue()[:-2000])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz"):
        data.load("cifar10", str(path))
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="is no archive that can be read"):
        data.load("cifar10", str(path))


def test_what_is_missing_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"there is no .*nowhere"):
        data.load("cifar10", str(tmp_path / "nowhere"))
    _write_release(tmp_path, "binary")
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(UsageError, match=r"has no data_batch_4.bin; cifar10 is its official tar \(cifar-10-binary"):
        data.load("cifar10", str(tmp_path))
