"""Result files only grow, and are refused where they do not fit."""

from __future__ import annotations

import subprocess

import pytest
import torch

from lowtide.app.shared import rows
from lowtide.app.shared.rows import ResultFile
from lowtide.app.shared.specs import UsageError


def test_a_new_file_gets_a_header_and_rows_are_appended(tmp_path):
    path = tmp_path / "deep" / "rows.csv"
    ResultFile(path, ("a", "b", "c")).begin().append({"b": 1 / 3, "a": "x, y"})
    ResultFile(path, ("a", "b", "c")).begin().append({"a": None, "c": True})
    assert path.read_text() == 'a,b,c\n"x, y",0.333333,\n,,True\n'


@pytest.mark.parametrize(
    ("header", "message"),
    [("a,c", r"it lacks b; it has c"), ("b,a", "another order"), ("a", "it lacks b"), ("a,b,b2", "it has b2")],
)
def test_other_columns_are_refused_and_nothing_is_written(tmp_path, header, message):
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n1,2\n")
    with pytest.raises(UsageError, match=rf"rows.csv has other columns .*{message}.*--out"):
        ResultFile(path, ("a", "b"))
    assert path.read_text() == f"{header}\n1,2\n"


def test_a_last_line_that_was_cut_off_stays_a_line_of_its_own(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n1")
    ResultFile(path, ("a", "b")).begin().append({"a": 2})
    assert path.read_text() == "a,b\n1\n2,\n"


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ResultFile(None, ("a",)).begin().append({"a": 1})
    assert not list(tmp_path.iterdir())


def test_the_environment_names_what_counts():
    environment = rows.describe_environment(torch.device("cpu"), revision="abc")
    assert set(environment) | {"date"} == set(rows.ENVIRONMENT)
    assert environment["revision"] == "abc" and environment["torch"] == torch.__version__
    assert environment["device"].startswith("cpu")


def test_no_revision_where_there_is_no_git(monkeypatch):
    def missing(*args, **options):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", missing)
    monkeypatch.setattr(rows, "ARCHIVED", "$Format$")
    assert rows.find_revision() == ""


def test_no_revision_of_somebody_elses_repository(monkeypatch, tmp_path):
    """An installed package may lie inside a repository that does not track it."""
    monkeypatch.setattr(rows, "_PACKAGE", tmp_path)
    monkeypatch.setattr(rows, "ARCHIVED", "$Format$")
    assert rows.find_revision() == ""


def test_sources_from_an_archive_know_their_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "_PACKAGE", tmp_path)
    monkeypatch.setattr(rows, "ARCHIVED", "0123456789abcdef")
    assert rows.find_revision() == "0123456789ab"


def test_a_revision_has_a_plus_where_the_sources_differ(monkeypatch):
    answers = {"ls-files": "__init__.py", "rev-parse": "0123456789ab", "status": " M sz.py"}
    monkeypatch.setattr(rows, "_git", lambda command, *rest: answers[command])
    assert rows.find_revision() == "0123456789ab+"
    answers["status"] = ""
    assert rows.find_revision() == "0123456789ab"


def test_an_exception_fits_into_a_cell():
    assert rows.explain(RuntimeError("first\nsecond")) == "RuntimeError: first"
    assert rows.explain(RuntimeError()) == "RuntimeError: "
