"""The frame of benchmark scripts: exit status, attempts, one line for an error, a table at the end."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lowtide.app.shared.script import attempt, run_script
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


def options(*, traceback: bool = False) -> argparse.Namespace:
    return argparse.Namespace(traceback=traceback)


def fail_after(*found: dict[str, Any], error: Exception) -> Iterator[dict[str, Any]]:
    yield from found
    raise error


def test_an_attempt_is_a_row_of_all_that_was_found():
    assert attempt(iter([{"batch": 8}, {"loss": 0.5}]), options()) == {"ok": True, "error": "", "batch": 8, "loss": 0.5}
    refused = {"ok": False, "error": "skipped: too slow"}
    assert attempt([{"batch": 8}, refused], options()) == {**refused, "batch": 8}, "a script may judge for itself"


def test_an_attempt_that_fails_keeps_what_was_found_before():
    row = attempt(fail_after({"batch": 8}, {"peak": 5}, error=ValueError("no such luck\nin detail")), options())
    assert row == {"ok": False, "error": "ValueError: no such luck", "batch": 8, "peak": 5}


def test_a_traceback_is_for_mistakes_and_not_for_a_lack_of_memory():
    with pytest.raises(ValueError, match="no such luck"):
        attempt(fail_after(error=ValueError("no such luck")), options(traceback=True))
    for error in (torch.OutOfMemoryError("2 GiB"), RuntimeError("CUDA driver error: out of memory")):
        row = attempt(fail_after({"batch": 8}, error=error), options(traceback=True))
        assert not row["ok"] and row["error"].startswith(type(error).__name__) and row["batch"] == 8


def test_an_interrupt_ends_the_run():
    with pytest.raises(KeyboardInterrupt):
        attempt(fail_after(error=KeyboardInterrupt()), options())  # type: ignore[arg-type]
