"""Photos in folders named after their classes, decoded once into a cache that later runs map into memory.

``PATH/train/CLASS/*.jpg`` and ``PATH/val/CLASS/*.jpg`` (or ``test``). Each picture is scaled so that its shorter side
has ``size`` pixels, then cut to the square in its middle. The cache is one file of bytes for each part: what is on disk
is what a batch is gathered from, so an epoch costs no decoding, and a set larger than memory is read as it is needed.

A cache is named after a digest of the names, sizes and dates of its pictures: a changed folder gets another one. It is
complete or absent, since its index is written last.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowtide.app.data.archive import DataError
from lowtide.app.data.images import make_images
from lowtide.app.data.splits import DataSet
from lowtide.app.shared.specs import UsageError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff")
_PARTS = (("train",), ("val", "test", "valid"))
_AUGMENT = {"resized_crop": 0.35, "flip": True}
_VERSION = 1
_CHUNK = 256  # pictures decoded between two writes


def load(path: Path, *, size: int = 128, cache: str | None = None) -> DataSet:
    """The photos at ``size`` pixels a side. ``cache`` is a folder (default: ``lowtide`` in the user's cache folder)."""
    if size < 1:
        raise UsageError(f"size is a number of pixels, 1 or more; got {size}")
    if not path.is_dir():
        raise UsageError(f"{path} is no folder; it should have train/CLASS/*.jpg and val/CLASS/*.jpg")
    folders = [_find_part(path, names) for names in _PARTS]
    classes = sorted(folder.name for folder in folders[0].iterdir() if folder.is_dir())
    home = Path(cache) if cache else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "lowtide"
    train, test = (_load_part(folder, classes, size=size, home=home) for folder in folders)
    return make_images("imagefolder", train=train, test=test, classes=len(classes), augment=_AUGMENT)


def _find_part(path: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (path / name).is_dir():
            return path / name
    raise UsageError(f"{path} has no folder {' or '.join(names)}; it should have train/CLASS/*.jpg and val/CLASS/*.jpg")


def _load_part(folder: Path, classes: list[str], *, size: int, home: Path) -> tuple[Tensor, Tensor]:
    files = sorted(_list_pictures(folder, classes))
    if not files:
        raise UsageError(f"{folder} has no pictures ({', '.join(_SUFFIXES)}) in folders named after their classes")
    labels = [classes.index(file.parent.relative_to(folder).parts[0]) for file in files]
    name = _digest(folder, files, size)
    index, pixels = home / f"{name}.json", home / f"{name}.bytes"
    wanted = {"version": _VERSION, "count": len(files), "size": size}
    if not _is_complete(index, pixels, wanted):
        home.mkdir(parents=True, exist_ok=True)
        _decode_all(files, pixels, size)
        _replace(index, json.dumps(wanted).encode())
    values = torch.from_file(str(pixels), shared=False, size=len(files) * 3 * size * size, dtype=torch.uint8)
    return values.view(len(files), 3, size, size), torch.tensor(labels)


def _list_pictures(folder: Path, classes: list[str]) -> Iterator[Path]:
    known = set(classes)
    for place in folder.iterdir():
        if not place.is_dir():
            continue
        if place.name not in known:
            raise DataError(f"{place}: there is no class of this name among those of training")
        yield from (file for file in place.rglob("*") if file.suffix.lower() in _SUFFIXES)


def _digest(folder: Path, files: list[Path], size: int) -> str:
    digest = hashlib.sha256(f"{_VERSION} {size}\n".encode())
    for file in files:
        about = file.stat()
        digest.update(f"{file.relative_to(folder)}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _is_complete(index: Path, pixels: Path, wanted: dict[str, int]) -> bool:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))
        return bool(found == wanted) and pixels.stat().st_size == wanted["count"] * 3 * wanted["size"] ** 2
    except (OSError, ValueError):
        return False


def _decode_all(files: list[Path], pixels: Path, size: int) -> None:
    """Write the file of bytes under another name first: it is there whole or not at all."""
    draft = pixels.with_name(f"{pixels.name}.{os.getpid()}")
    image = _import_pillow()
    try:
        # Threads: decoding and scaling let other threads run.
        with ThreadPoolExecutor() as pool, draft.open("wb") as out:
            for begin in range(0, len(files), _CHUNK):
                for content in pool.map(lambda file: _decode(image, file, size), files[begin : begin + _CHUNK]):
                    out.write(content)
        draft.replace(pixels)
    finally:
        draft.unlink(missing_ok=True)


def _decode(image: Any, file: Path, size: int) -> bytes:
    """(3, size, size) bytes of one picture."""
    try:
        with image.open(file) as picture:
            picture.draft(
                "RGB", (2 * size, 2 * size)
            )  # JPEG can be decoded at a fraction of its size, to this at least
            photo = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{file} is no picture that can be decoded: {error}") from error
    scale = size / min(photo.size)
    width, height = (max(size, round(side * scale)) for side in photo.size)
    if (width, height) != photo.size:
        photo = photo.resize((width, height), image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    square = photo.crop((left, top, left + size, top + size))
    return b"".join(band.tobytes() for band in square.split())


def _import_pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise UsageError("photos are decoded by Pillow, which is not installed: pip install pillow") from None


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
