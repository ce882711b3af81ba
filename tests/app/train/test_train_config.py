"""Settings: declared once, checked when they are read, and written so that they are read as the same."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.app.shared.specs import UsageError
from lowtide.app.train import toml
from lowtide.app.train.config import Config, read_file
from lowtide.errors import UnknownNameError

_VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
_TABLES = st.recursive(
    st.dictionaries(st.text(), _VALUES, max_size=4),
    lambda inner: st.dictionaries(st.text(), _VALUES | inner, max_size=4),
    max_leaves=6,
)


def _without_empty(table: dict) -> dict:
    kept = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in table.items()}
    return {key: value for key, value in kept.items() if value != {}}


@settings(deadline=None, derandomize=True)
@given(_TABLES)
def test_what_is_written_is_what_is_read(table: dict):
    assert _without_empty(tomllib.loads(toml.dumps(table))) == _without_empty(table)


def test_what_toml_cannot_say_is_refused():
    with pytest.raises(TypeError, match="no way to write NoneType"):
        toml.dumps({"a": None})


def test_a_configuration_survives_its_file(tmp_path: Path):
    config = Config.read(
        {
            "model": {"name": "resnet18", "options": {"width": 8}},
            "method": {"name": "fixed", "options": {"linear": "0.4 std"}},
            "optimizer": {"lr": 1},
            "train": {"precision": "bf16", "clip": 1.5},
        }
    )
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)
    (tmp_path / "config.toml").write_text(toml.dumps(config.tables()))
    assert Config.read(read_file(tmp_path / "config.toml")) == config


@pytest.mark.parametrize(
    ("table", "kind", "message"),
    [
        ({"modle": {}}, UnknownNameError, "unknown section of the configuration 'modle'; .*Did you mean 'model'"),
        ({"train": {"epoch": 3}}, UnknownNameError, r"unknown setting of \[train\] 'epoch'; .*Did you mean 'epochs'"),
        ({"train": 3}, UsageError, r"\[train\] is a section"),
        ({"train": {"epochs": 0}}, UsageError, "train.epochs has to be at least 1, got 0"),
        ({"train": {"epochs": 2.5}}, UsageError, "train.epochs is a whole number, got 2.5"),
        ({"train": {"epochs": True}}, UsageError, "train.epochs is a whole number, got True"),
        ({"train": {"precision": "bf61"}}, UnknownNameError, "unknown train.precision 'bf61'; .*Did you mean 'bf16'"),
        ({"train": {"channels_last": "yes"}}, UsageError, "train.channels_last is true or false, got 'yes'"),
        ({"train": {"label_smoothing": 1.5}}, UsageError, "label_smoothing has to be from 0 to 1, got 1.5"),
        ({"optimizer": {"lr": -1.0}}, UsageError, "optimizer.lr has to be at least 0, got -1.0"),
        ({"optimizer": {"lr": float("nan")}}, UsageError, "optimizer.lr has to be at least 0, got nan"),
        ({"optimizer": {"lr": "fast"}}, UsageError, "optimizer.lr is a number, got 'fast'"),
        ({"model": {"options": 3}}, UsageError, "model.options is a table, got 3"),
    ],
)
def test_what_is_wrong_is_refused(table: dict, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        Config.read(table)


def test_files_that_are_no_configuration_are_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"cannot read the configuration .*none.toml: No such file"):
        read_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("epochs = = 3")
    with pytest.raises(UsageError, match=r"bad.toml is not TOML"):
        read_file(tmp_path / "bad.toml")


def test_a_run_is_named_after_what_its_result_depends_on():
    config = Config.read({"model": {"name": "resnet18"}})
    assert config.digest() == config.replace(run={"log_every": 7, "device": "cpu"}).digest()
    assert config.digest() != config.replace(train={"seed": 1}).digest()
    assert config.digest() != config.replace(method={"name": "fixed", "options": {"linear": 1.0}}).digest()


def test_differences_are_told_by_name():
    one = Config.read({"train": {"batch": 64}, "run": {"log_every": 1}})
    other = Config.read({"train": {"batch": 32, "clip": 1.0}})
    assert one.differences(other) == ["train.batch is 64, not 32", "train.clip is None, not 1.0"]
    assert one.differences(one.replace(run={"log_every": 9})) == []
