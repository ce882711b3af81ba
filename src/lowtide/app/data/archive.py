"""Files of a data set by name, whether they lie in a folder, in a tar or in a zip; errors say which file is wrong."""

from __future__ import annotations

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from lowtide.app.shared.specs import UsageError
from lowtide.errors import LowtideError

_DEPTH = 2  # folders below the one that was named: unpacked archives bring one of their own
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError)
_PACKED = {".gz": gzip.decompress, ".xz": lzma.decompress}


class DataError(LowtideError):
    """A file of a data set that cannot be read as what it should be: truncated, corrupted, or something else."""


class Archive:
    """A folder, a tar (compressed or not) or a zip."""

    def __init__(self, path: Path, inside: Sequence[str] = ()) -> None:
        """``inside`` are names of archives to look into, should ``path`` be a folder that holds one of them."""
        if not path.exists():
            raise UsageError(f"there is no {path}")
        if path.is_dir():
            nested = next((path / name for name in inside if (path / name).is_file()), None)
            path = nested or path
        self.path = path
        try:
            self.names = tuple(self._list())
        except _BROKEN as error:
            raise DataError(f"{path} is no archive that can be read: {error}") from error

    def find(self, *alternatives: str) -> str | None:
        """The first file of one of these names, in whatever folder it is."""
        for wanted in alternatives:
            for name in self.names:
                if PurePosixPath(name).name == wanted:
                    return name
        return None

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        """Contents by name; what is packed by itself (.gz, .xz) is unpacked."""
        contents, name = {}, ""
        try:
            for name, read in self._open(set(names)):
                contents[name] = _PACKED.get(PurePosixPath(name).suffix, bytes)(read())
        except _BROKEN as error:
            raise DataError(f"{self.path}: {name} is truncated or corrupted ({error})") from error
        return contents

    def _list(self) -> Iterator[str]:
        if self.path.is_dir():
            for depth in range(1, _DEPTH + 1):
                files = sorted(self.path.glob("/".join("*" * depth)))
                yield from (file.relative_to(self.path).as_posix() for file in files if file.is_file())
        elif zipfile.is_zipfile(self.path):
            with zipfile.ZipFile(self.path) as archive:
                yield from (name for name in archive.namelist() if not name.endswith("/"))
        else:
            with tarfile.open(self.path) as archive:
                yield from (member.name for member in archive.getmembers() if member.isfile())

    def _open(self, names: set[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Names, each with what reads its content, before the next one is asked for."""
        if self.path.is_dir():
            yield from ((name, (self.path / name).read_bytes) for name in names)
        elif zipfile.is_zipfile(self.path):
            with zipfile.ZipFile(self.path) as archive:
                yield from ((name, partial(archive.read, name)) for name in names)
        else:
            with tarfile.open(self.path, "r|*") as archive:  # once from its beginning to its end
                for member in archive:
                    if member.name in names and (file := archive.extractfile(member)) is not None:
                        yield member.name, file.read


def read_text(path: Path) -> bytes:
    """A text file, unpacked if its name says that it is packed."""
    try:
        return _PACKED.get(path.suffix, bytes)(path.read_bytes())
    except _BROKEN as error:
        raise DataError(f"{path} is truncated or corrupted ({error})") from error
