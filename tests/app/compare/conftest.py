"""``lowtide compare`` on a net and a set so small that a run takes a fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lowtide.app.compare.runs import Run, Runner

_NET = """
from torch import nn


def net(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, num_classes))
"""


@pytest.fixture
def compare(lowtide: Callable[..., int], tmp_path: Path) -> Callable[..., int]:
    """Two epochs of 4 steps; arguments that are given again win."""
    (tmp_path / "nets.py").write_text(_NET)
    few = (
        "--data",
        "digits",
        "--data-option",
        "train=128",
        "--data-option",
        "test=64",
        "--batch",
        "32",
        "--epochs",
        "2",
    )
    model = ("--model", "nets.py:net", "--device", "cpu", "--lr", "0.05")
    return lambda *arguments: lowtide("compare", *model, *few, "--out", "out", *arguments)


@pytest.fixture
def calls(
    monkeypatch: pytest.MonkeyPatch, call_here: Callable[[list[str]], tuple[int, str, list[str]]]
) -> list[list[str]]:
    """Runs are carried out in this process, one after the other; the list of what was called."""
    made: list[list[str]] = []

    def call(self: Runner, run: Run, command: list[str]) -> tuple[int, str, str]:
        made.append(command)
        status, output, lines = call_here(command[3:])
        return status, output, lines[-1].removeprefix("lowtide: ") if lines else ""

    monkeypatch.setattr(Runner, "_call", call)
    return made
