"""Photos in folders: decoded once, cut to a square, cached whole or not at all. Needs Pillow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lowtide.app import data
from lowtide.app.data import DataError, imagefolder
from lowtide.app.shared.specs import UsageError

Image = pytest.importorskip("PIL.Image")

_COLOURS = {"blue": (10, 20, 200), "red": (200, 20, 10)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Pictures of one colour: 3 of each class to train, 1 to test, of several sizes and formats."""
    sizes = ((30, 20), (20, 30), (16, 16), (40, 40))
    for name, colour in _COLOURS.items():
        for number, size in enumerate(sizes):
            folder = tmp_path / "photos" / ("val" if number == 3 else "train") / name
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", size, colour).save(
                folder / f"{number}.{'png' if number else 'JPG'}", "png" if number else "jpeg"
            )
    return tmp_path / "photos"


def _load(photos: Path, **options: object) -> data.DataSet:
    return data.load("imagefolder", str(photos), cache=str(photos.parent / "cache"), **options)


def test_pictures_and_classes(photos: Path):
    found = _load(photos, size=16)
    assert found.shape == (3, 16, 16) and found.classes == 2 and found.augment["flip"]
    images, labels = found.train.select(found.train.keys())
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]  # by the alphabet: blue, red
    for label, colour in enumerate(_COLOURS.values()):
        mean = images[labels == label].float().mean((0, 2, 3))
        torch.testing.assert_close(mean, torch.tensor(colour).float(), atol=3.0, rtol=0)  # JPEG rounds colours


def test_the_middle_is_what_is_kept(photos: Path):
    wide = Image.new("RGB", (60, 20), (0, 0, 0))
    wide.paste((255, 255, 255), (20, 0, 40, 20))
    wide.save(photos / "val" / "red" / "wide.png")
    images, _ = (found := _load(photos, size=20)).test.select(found.test.keys())
    assert (images[-1] == 255).all()


def test_the_second_time_nothing_is_decoded(photos: Path, monkeypatch: pytest.MonkeyPatch):
    first = _load(photos, size=16)
    monkeypatch.setattr(imagefolder, "_decode", lambda *_: pytest.fail("decoded again"))
    again = _load(photos, size=16)
    assert torch.equal(first.train.select(first.train.keys())[0], again.train.select(again.train.keys())[0])
    monkeypatch.undo()
    Image.new("RGB", (16, 16), (0, 255, 0)).save(photos / "train" / "blue" / "new.png")
    assert _load(photos, size=16).train.per_epoch == 7


def test_a_cache_that_was_cut_off_is_made_again(photos: Path):
    first = _load(photos, size=16)
    wanted = first.train.select(first.train.keys())[0]
    del first
    for file in (photos.parent / "cache").glob("*.bytes"):
        file.write_bytes(file.read_bytes()[:-5])
    again = _load(photos, size=16)
    assert torch.equal(again.train.select(again.train.keys())[0], wanted)


def test_a_picture_that_is_none_is_named_and_leaves_no_cache(photos: Path):
    (photos / "train" / "red" / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken.jpg is no picture that can be decoded"):
        _load(photos, size=16)
    assert not list((photos.parent / "cache").iterdir())


def test_a_truncated_picture_is_named(photos: Path):
    path = photos / "train" / "red" / "1.png"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"red/1.png is no picture"):
        _load(photos, size=16)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ("train", UsageError, "has no folder train; it should have train/CLASS"),
        ("val", UsageError, "has no folder val or test or valid"),
        ("train/red", DataError, "val/red: there is no class of this name"),
    ],
)
def test_folders_that_are_missing_are_named(photos: Path, change: str, kind: type[Exception], message: str):
    (photos / change).rename(photos.parent / "away")
    with pytest.raises(kind, match=message):
        _load(photos, size=16)


def test_a_folder_is_needed(tmp_path: Path):
    with pytest.raises(UsageError, match="is no folder"):
        data.load("imagefolder", str(tmp_path / "x"))
