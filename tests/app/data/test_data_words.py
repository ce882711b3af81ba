"""Text for language models and classified sentences."""

from __future__ import annotations

import lzma
import zipfile
from pathlib import Path

import pytest
import torch

from lowtide.app import data
from lowtide.app.data import DataError, Stream
from lowtide.app.data.vocabulary import PADDING, UNKNOWN, Vocabulary
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

_TEXT = bytes(range(97, 123)) * 40  # 1040 bytes


def test_a_window_and_the_same_one_byte_later(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(_TEXT)
    found = data.load("text", str(tmp_path / "a.txt"), length=10, testing=0.25)
    assert found.kind == "tokens" and found.vocabulary == found.classes == 256 and found.length == 10
    inputs, targets = found.train.select(torch.tensor([0, 5]))
    assert bytes(inputs[0].tolist()) == _TEXT[:10] and bytes(targets[0].tolist()) == _TEXT[1:11]
    assert bytes(inputs[1].tolist()) == _TEXT[5:15]
    inputs, _ = found.test.select(found.test.keys())
    assert bytes(inputs.flatten().tolist()) == _TEXT[780:1030]  # what is left over at the end has no successor


def test_an_epoch_cuts_the_text_anew_and_stays_inside():
    stream = Stream(torch.arange(103), 10)
    begins = set()
    for seed in range(20):
        keys = stream.shuffled(torch.Generator().manual_seed(seed))
        assert len(keys) == stream.per_epoch == 9
        inputs, targets = stream.select(keys)
        assert torch.equal(targets, inputs + 1)
        assert len(inputs.flatten().unique()) == 90  # no token twice
        begins.add(int(keys.min()))
    assert len(begins) > 5


@pytest.mark.parametrize("form", ["folder", "zip", "xz"])
def test_parts_are_found_by_name(tmp_path: Path, form: str):
    files = {"wiki.train.tokens": _TEXT, "wiki.valid.tokens": b"v" * 100, "wiki.test.tokens": b"t" * 100}
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    for name, content in files.items():
        if form == "xz":
            (folder / f"{name}.xz").write_bytes(lzma.compress(content))
        else:
            (folder / name).write_bytes(content)
    path = tmp_path / "wikitext-2-v1.zip"
    if form == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            for name in files:
                archive.write(folder / name, f"wikitext-2/{name}")
    found = data.load("text", str(path if form == "zip" else tmp_path), length=8)
    assert set(found.test.select(found.test.keys())[0].flatten().tolist()) == {ord("t")}
    assert isinstance(found.train, Stream) and len(found.train.tokens) == len(_TEXT)


def test_words_have_numbers_by_frequency(tmp_path: Path):
    (tmp_path / "train.txt").write_text("b b b a a c d " * 20)
    (tmp_path / "test.txt").write_text("a b zzz d " * 20)
    found = data.load("text", str(tmp_path), length=4, tokens="words", vocabulary=5)
    assert found.vocabulary == 5
    inputs, _ = found.test.select(torch.tensor([0]))
    assert inputs.tolist() == [[3, 2, UNKNOWN, UNKNOWN]]  # c comes before d, and there is room for one of them


def test_equal_frequencies_are_ordered_by_the_alphabet():
    assert Vocabulary.of(["z y x", "x y z"], 10).numbers == {"x": 2, "y": 3, "z": 4}


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"length": 2000}, UsageError, "has 936 tokens for training, too few for windows of 2000"),
        ({"length": 60}, UsageError, "has 104 tokens for testing"),
        ({"tokens": "letters"}, UnknownNameError, "unknown kind of tokens 'letters'; known: bytes, words"),
        ({"length": 0}, UsageError, "length is 1 or more"),
        ({"lenght": 8}, UnknownNameError, "Did you mean 'length'"),
        ({"length": "long"}, UsageError, "cannot be loaded with the options"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: dict, kind: type[Exception], message: str):
    (tmp_path / "a.txt").write_bytes(_TEXT)
    with pytest.raises(kind, match=message):
        data.load("text", str(tmp_path / "a.txt"), **options)


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path):
    (tmp_path / "train.txt").write_bytes(b"\xff\xfe" * 50)
    with pytest.raises(UsageError, match=r"no file for testing; names that are looked for: wiki.test.tokens"):
        data.load("text", str(tmp_path))
    (tmp_path / "test.txt").write_bytes(b"x " * 50)
    with pytest.raises(DataError, match="not UTF-8"):
        data.load("text", str(tmp_path), tokens="words", length=2)
    (tmp_path / "b.txt.xz").write_bytes(lzma.compress(_TEXT)[:50])
    with pytest.raises(DataError, match=r"b\.txt\.xz is truncated or corrupted"):
        data.load("text", str(tmp_path / "b.txt.xz"))


def _write_sst2(folder: Path, train: str, dev: str) -> None:
    (folder / "train.tsv").write_text(train)
    (folder / "dev.tsv").write_text(dev)


def test_sentences_are_padded_in_front_and_cut_behind(tmp_path: Path):
    _write_sst2(tmp_path, "sentence\tlabel\na fine film\t1\na b c d e\t0\n", "sentence\tlabel\nfine a unheard\t1\n")
    found = data.load("sst2", str(tmp_path), length=4)
    assert found.kind == "text" and found.classes == 2 and found.vocabulary == 2 + 7
    inputs, targets = found.train.select(found.train.keys())
    assert inputs.dtype == torch.int64 and targets.tolist() == [1, 0]
    assert inputs[0, 0] == PADDING and inputs[0, 1] == inputs[1, 0] == 2  # "a" is the most frequent word
    assert (inputs[1] != PADDING).all()
    assert found.test.select(found.test.keys())[0][0].tolist()[-1] == UNKNOWN


def test_sentences_from_the_zip(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "SST-2.zip", "w") as archive:
        for part in ("train", "dev"):
            archive.writestr(f"SST-2/{part}.tsv", "sentence\tlabel\ngood\t1\nbad\t0\n")
    assert data.load("sst2", str(tmp_path)).train.per_epoch == 2
    assert data.load("sst2", str(tmp_path / "SST-2.zip")).train.per_epoch == 2


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ("", "should begin with the columns sentence and label"),
        ("text\tlabel\na\t1\n", "should begin with the columns sentence and label"),
        ("sentence\tlabel\n", "has no sentences"),
        ("sentence\tlabel\na\t1\nb\n", "train.tsv, line 3: no sentence with a label"),
        ("sentence\tlabel\na\tgood\n", "train.tsv, line 2"),
    ],
)
def test_a_broken_table_is_refused(tmp_path: Path, train: str, message: str):
    _write_sst2(tmp_path, train, "sentence\tlabel\na\t1\n")
    with pytest.raises(DataError, match=message):
        data.load("sst2", str(tmp_path))
