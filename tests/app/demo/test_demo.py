"""lowtide demo: two runs, a table and a report, with nothing to download; earlier results stay."""

from __future__ import annotations

import json
import re

import pytest

from lowtide.app import demo
from lowtide.session import DEFAULT_METHOD


@pytest.fixture
def small(monkeypatch):
    """Few pictures of 8 x 8."""
    settings = {**demo.SETTINGS, "data": {"name": "digits", "options": {"train": 128, "test": 64}}}
    monkeypatch.setattr(demo, "SETTINGS", settings)


def test_a_demo_ends_in_a_table_and_a_report(lowtide, small, capsys, tmp_path):
    assert lowtide("demo", "--epochs", "2", "--device", "cpu") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split() == ["method", "test", "accuracy", "held", "ratio", "peak", "time"]
    assert lines[2].startswith("plain ") and lines[3].startswith(DEFAULT_METHOD)
    assert max(map(len, lines[:-1])) <= 80
    report = tmp_path / "runs" / "demo" / "report.html"
    assert lines[-1] == f"report: {report}"
    results = {
        name: json.loads((tmp_path / "runs" / "demo" / name / "result.json").read_text())
        for name in ("plain", DEFAULT_METHOD)
    }
    for line in lines[2:4]:
        result = results[line.split()[0]]
        assert f"{100 * result['accuracy']:.2f} %" in line
    ratio = results[DEFAULT_METHOD]["ratio"]
    assert ratio > 2 and f"{ratio:.2f}x" in lines[3]
    page = report.read_text()
    assert f"{ratio:.2f}x" in page and 'id="step-memory"' in page and "bn1:native_batch_norm.input" in page
    assert "epoch 2/2" in shown.err and "test accuracy" in shown.err


def test_earlier_results_stay(lowtide, small, capsys, tmp_path):
    arguments = ("demo", "--epochs", "1", "--methods", "exact", "--device", "cpu", "--out", "here")
    assert lowtide(*arguments) == 0
    before = (tmp_path / "here" / "report.html").read_bytes()
    assert lowtide(*arguments) == 0
    assert (tmp_path / "here-2" / "exact" / "result.json").exists()
    assert (tmp_path / "here" / "report.html").read_bytes() == before
    accuracies = [re.findall(r"[\d.]+ %", line) for line in capsys.readouterr().out.splitlines() if " % " in line]
    assert (
        len(accuracies) == 4 and len({cell for cells in accuracies for cell in cells}) == 1
    )  # exact is plain, repeated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "blod"), "unknown method 'blod'; .*Did you mean 'bold'"),
        (("--epochs", "0"), "--epochs has to be at least 1, got 0"),
        (("--device", "gpu"), "cannot read 'gpu' as a device"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_trained(lowtide, capsys, tmp_path, arguments, message):
    assert lowtide("demo", *arguments) == 2
    shown = capsys.readouterr()
    assert re.search(message, shown.err) and shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
