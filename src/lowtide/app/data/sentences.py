"""Classified sentences as GLUE distributes SST-2: ``train.tsv`` and ``dev.tsv`` with the columns sentence and label.

From the folder, or from ``SST-2.zip``. Other files of that form will do: labels are whole numbers from 0.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lowtide.app.data.archive import Archive, DataError
from lowtide.app.data.splits import DataSet, Table
from lowtide.app.data.vocabulary import PADDING, Vocabulary
from lowtide.app.shared.specs import UsageError

_PARTS = ("train.tsv", "dev.tsv")
_COLUMNS = ("sentence", "label")


def load(path: Path, *, length: int = 64, vocabulary: int = 20_000) -> DataSet:
    """Sentences as the numbers of their words. Longer ones lose their end; shorter ones are padded in front, so that a
    recurrent net ends with words."""
    if length < 1 or vocabulary < 3:
        raise UsageError("sst2: length is 1 or more, vocabulary 3 or more")
    archive = Archive(path, inside=("SST-2.zip",))
    files = {part: archive.find(part) for part in _PARTS}
    for part, file in files.items():
        if file is None:
            raise UsageError(f"{path} has no {part}; SST-2 is a folder or a zip with {' and '.join(_PARTS)}")
    names = [file for file in files.values() if file is not None]
    contents = archive.read(names)
    train, test = (read_rows(contents[name], name) for name in names)
    words = Vocabulary.of((sentence for sentence, _ in train), vocabulary)
    splits = [_make_table(rows, words, length) for rows in (train, test)]
    classes = 1 + max(label for rows in (train, test) for _, label in rows)
    return DataSet("sst2", "text", splits[0], splits[1], classes, vocabulary=len(words), length=length)


def read_rows(content: bytes, name: str) -> list[tuple[str, int]]:
    """(sentence, label) of every line after the heads."""
    try:
        lines = content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: {error}") from error
    heads = lines[0].split("\t") if lines else []
    if any(column not in heads for column in _COLUMNS):
        raise DataError(f"{name} should begin with the columns {' and '.join(_COLUMNS)}, it begins with {heads}")
    sentence, label = (heads.index(column) for column in _COLUMNS)
    rows = []
    for number, line in enumerate(lines[1:], 2):
        cells = line.split("\t")
        if len(cells) != len(heads) or not cells[label].isdigit():
            raise DataError(f"{name}, line {number}: no sentence with a label (a whole number): truncated or corrupted")
        rows.append((cells[sentence], int(cells[label])))
    if not rows:
        raise DataError(f"{name} has no sentences")
    return rows


def _make_table(rows: list[tuple[str, int]], words: Vocabulary, length: int) -> Table:
    encoded = [words.encode(sentence)[:length] for sentence, _ in rows]
    padded = [[PADDING] * (length - len(numbers)) + numbers for numbers in encoded]
    return Table(torch.tensor(padded, dtype=torch.int32), _labels(rows))


def _labels(rows: list[tuple[str, int]]) -> Tensor:
    return torch.tensor([label for _, label in rows])
