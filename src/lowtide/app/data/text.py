"""Text for language models: one file, of which the end is for testing, or a folder or zip with a file for each part.

The parts are found by name, WikiText's official ones included (``wiki.train.tokens``, ``wiki.test.tokens``). Files may
be packed (.gz, .xz). A token is a byte, or a word of the training part.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import torch
from torch import Tensor

from lowtide.app.data.archive import Archive, DataError, read_text
from lowtide.app.data.splits import DataSet, Stream
from lowtide.app.data.vocabulary import Vocabulary
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

_TRAIN = ("wiki.train.tokens", "wiki.train.raw", "train.txt")
_TEST = ("wiki.test.tokens", "wiki.test.raw", "test.txt", "wiki.valid.tokens", "wiki.valid.raw", "valid.txt", "val.txt")
_TOKENS = ("bytes", "words")


def load(
    path: Path, *, length: int = 256, tokens: str = "bytes", vocabulary: int = 20_000, testing: float = 0.1
) -> DataSet:
    """A text in windows of ``length`` tokens. ``testing`` is the share at the end that a single file is tested on."""
    if tokens not in _TOKENS:
        raise UnknownNameError("kind of tokens", tokens, _TOKENS)
    if length < 1 or vocabulary < 3 or not 0 < testing < 1:
        raise UsageError("text: length is 1 or more, vocabulary 3 or more, testing between 0 and 1")
    train, test = _read(path, testing)
    numbers, size = _as_bytes(train, test) if tokens == "bytes" else _as_words(train, test, vocabulary)
    splits = [Stream(part, length) for part in numbers]
    for split, part in zip(splits, ("training", "testing"), strict=True):
        if len(split.tokens) < 2 * length + 1:
            raise UsageError(
                f"{path} has {len(split.tokens)} tokens for {part}, too few for windows of {length}: choose a smaller "
                "length"
            )
    return DataSet("text", "tokens", splits[0], splits[1], size, vocabulary=size, length=length)


def _read(path: Path, testing: float) -> tuple[bytes, bytes]:
    if path.is_file() and not zipfile.is_zipfile(path):
        content = read_text(path)
        cut = int(len(content) * (1 - testing))
        return content[:cut], content[cut:]
    archive = Archive(path)
    files = [
        archive.find(*(name + suffix for name in part for suffix in ("", ".gz", ".xz"))) for part in (_TRAIN, _TEST)
    ]
    train, test = files
    if train is None or test is None:
        raise UsageError(
            f"{path} has no file for {'training' if train is None else 'testing'}; names that are looked for: "
            f"{', '.join(_TRAIN if train is None else _TEST)}"
        )
    contents = archive.read([train, test])
    return contents[train], contents[test]


def _as_bytes(*parts: bytes) -> tuple[list[Tensor], int]:
    return [torch.frombuffer(bytearray(part or b"\0"), dtype=torch.uint8) for part in parts], 256


def _as_words(train: bytes, test: bytes, limit: int) -> tuple[list[Tensor], int]:
    try:
        texts = [part.decode("utf-8", errors="strict" if part is train else "ignore") for part in (train, test)]
    except UnicodeDecodeError as error:
        raise DataError(f"the text is not UTF-8 ({error}); with tokens=bytes it need not be") from error
    vocabulary = Vocabulary.of(texts[:1], limit)
    return [torch.tensor(vocabulary.encode(text), dtype=torch.int32) for text in texts], len(vocabulary)
