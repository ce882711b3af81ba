"""lowtide report: where it writes, and what it says when it cannot."""

from __future__ import annotations

import json
import os

import pytest


def test_one_run_has_its_report_inside(lowtide, make_run, capsys):
    folder = make_run("plain")
    assert lowtide("report", "plain") == 0
    assert capsys.readouterr().out == "plain/report.html\n"
    assert (folder / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_have_it_here_or_where_they_say(lowtide, make_run, tmp_path):
    make_run("plain"), make_run("ours", method="fixed", ratio=8.0)
    assert lowtide("report", "plain", "ours") == 0
    assert (tmp_path / "report.html").exists()
    assert lowtide("report", "plain", "ours", "--out", "deep/er/page.html") == 0
    assert (tmp_path / "deep/er/page.html").read_text() == (tmp_path / "report.html").read_text()


def test_text_goes_to_the_terminal(lowtide, make_run, capsys, tmp_path):
    make_run("plain")
    assert lowtide("report", "plain", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["summary"]["method"] == "plain"
    assert lowtide("report", "plain", "--format", "md", "--out", "report.md") == 0
    assert (tmp_path / "report.md").read_text().startswith("# Lowtide report\n")
    assert lowtide("report", "plain", "--out", "-") == 0
    assert capsys.readouterr().out.count("<!doctype html>") == 1


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("report", "plian"), 2, "there is no folder plian. Did you mean plain?"),
        (("report", "plain", "--format", "pdf"), 2, "invalid choice: 'pdf'"),
        (("report",), 2, "the following arguments are required: RUN"),
        (("report", "."), 2, ""),
        (("report", "broken"), 1, "metrics.jsonl:1 is not JSON"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(lowtide, make_run, capsys, tmp_path, arguments, status, message):
    if arguments == ("report", "."):
        (tmp_path / "a").mkdir()
        message = "is no run folder and holds none"
    else:
        make_run("plain")
        (make_run("broken") / "metrics.jsonl").write_text("{\n{}\n")
    assert lowtide(*arguments) == status
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert not list(tmp_path.rglob("*.html"))


def test_a_report_is_there_whole_or_not_at_all(lowtide, make_run, monkeypatch, capsys, tmp_path):
    folder = make_run("plain")
    assert lowtide("report", "plain") == 0
    before, files = (folder / "report.html").read_text(), sorted(folder.iterdir())

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", is_full)
    (folder / "result.json").write_text("{}")
    assert lowtide("report", "plain") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert (folder / "report.html").read_text() == before and sorted(folder.iterdir()) == files
