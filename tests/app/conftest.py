"""The command line, in this process and on the CPU."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lowtide.app import cli
from lowtide.app.shared import allocator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tensors are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _allocator_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands leave a choice of the user alone, even an empty one: here the process is not theirs."""
    if allocator.find_setting() is None:
        monkeypatch.setenv(allocator.VARIABLE, "")


@pytest.fixture
def lowtide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Runs a command in an empty folder; its exit status."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> int:
        try:
            return cli.main(arguments)
        except SystemExit as exit:
            assert isinstance(exit.code, int)
            return exit.code

    return run


@pytest.fixture
def bench_codec(lowtide: Callable[..., int]) -> Callable[..., int]:
    """One source in one dtype, tiny, timed once; arguments that are given again win."""
    few = ("--device", "cpu", "--bytes", "64K", "--repeats", "1", "--warm", "0", "--out", "rows.csv")
    kinds = ("--codecs", "sz:blocks", "--bounds", "1.0 std", "--dtypes", "float32", "--sources", "relu")
    return lambda *arguments: lowtide("bench", "codec", *few, *kinds, *arguments)


@pytest.fixture
def bench_step(lowtide: Callable[..., int]) -> Callable[..., int]:
    """A tiny AlexNet with a batch of two, timed once."""
    few = ("--device", "cpu", "--batch", "2", "--repeats", "1", "--warm", "0", "--out", "rows.csv")

    def run(*arguments: str, model: str = "alexnet") -> int:
        return lowtide("bench", "step", model, "--tiny", *few, *arguments)

    return run


@pytest.fixture
def read_rows(tmp_path: Path) -> Callable[[], list[dict[str, str]]]:
    def read() -> list[dict[str, str]]:
        with (tmp_path / "rows.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    return read
