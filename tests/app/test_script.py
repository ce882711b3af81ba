"""The frame of benchmark scripts: exit status, one line for an error, a table at the end."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from lowtide.app.shared.script import run_script
from lowtide.app.shared.specs import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true")


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/some.py"])


@pytest.mark.parametrize(("rows", "status"), [([{"ok": True}], 0), ([{"ok": True}, {"ok": False}], 1), ([{}], 0)])
def test_a_row_that_is_not_fine_shows_in_the_status(rows: list[dict[str, Any]], status: int, capsys) -> None:
    assert run_script("", configure, lambda options: rows, lambda rows: [f"{len(rows)} rows"]) == status
    assert capsys.readouterr().out == f"{len(rows)} rows\n"


def test_what_counts_as_fine_is_up_to_the_script() -> None:
    rows = [{"ok": False, "error": "skipped: too slow"}]
    assert run_script("", configure, lambda options: rows, is_fine=lambda row: "skipped" in row["error"]) == 0


def test_an_error_of_use_is_one_line(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(options: argparse.Namespace) -> list[dict[str, Any]]:
        raise UsageError("no such budget")

    assert run_script("", configure, run) == 2
    assert capsys.readouterr().err == "some.py: no such budget\n"
    monkeypatch.setattr("sys.argv", ["benchmarks/some.py", "--traceback"])
    with pytest.raises(UsageError):
        run_script("", configure, run)
