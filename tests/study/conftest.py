"""The scripts of the study on a net and a set so small that a run takes a fraction of a second."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository_scripts import load_script

from lowtide.app.compare.runs import Run, Runner

sys.path.insert(0, str(Path(__file__).parents[2] / "study"))

_NET = """
from torch import nn


def net(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
                         nn.Linear(128, num_classes))
"""
_TABLE = """
[study]
title = "Digits, a small net"

[study.methods]
plain = 2
budget = 2
exact = 1

[model]
name = "nets.py:net"

[data]
name = "digits"
options = { train = 256, test = 64 }

[train]
epochs = 2
batch = 64

[optimizer]
lr = 0.05
"""


@pytest.fixture(scope="session")
def runner() -> ModuleType:
    return load_script("study/run.py")


@pytest.fixture(scope="session")
def page() -> ModuleType:
    return load_script("study/page.py")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table in an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(_NET)
    path = Path("digits.toml")
    path.write_text(_TABLE)
    return path


@pytest.fixture
def study(runner: ModuleType, table: Path) -> Callable[..., int]:
    """Carries out the table; the exit status."""
    return lambda *arguments: runner.main([str(table), "--results", "results", "--device", "cpu", *arguments])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, call_here: Callable[[list[str]], tuple[int, str, list[str]]]) -> list[str]:
    """Runs are carried out in this process, one after the other; the list of what was called."""
    made: list[str] = []

    def call(self: Runner, run: Run, command: list[str]) -> tuple[int, str, str]:
        made.append(f"{run.method.split(' = ')[0]} {run.seed}")
        status, output, lines = call_here(command[3:])
        assert self.watch is not None
        for line in lines:
            self.watch(run, line)
        return status, output, lines[-1].removeprefix("lowtide: ") if lines else ""

    monkeypatch.setattr(Runner, "_call", call)
    return made
