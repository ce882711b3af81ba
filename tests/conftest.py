"""Shared by all tests: GPU and slow tests say that they were skipped; every test starts from a known RNG state and no
hooks."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes, too")
    parser.addoption(
        "--races", action="store_true", help="look for races in all kernels that are emulated: takes minutes"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = {} if torch.cuda.is_available() else {"gpu": pytest.mark.skip(reason="no CUDA device")}
    if not config.getoption("--slow"):
        skipped["slow"] = pytest.mark.skip(reason="takes minutes: run it with --slow")
    for item in items:
        for name, skip in skipped.items():
            if name in item.keywords:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _hooks_are_off() -> Iterator[None]:
    """A test that leaves saved-tensor hooks on fails itself, and does not take the tests after it along."""
    yield
    left = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        left += 1
    assert left == 0, f"the test left {left} pairs of saved-tensor hooks on"


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one, on the CPU."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def assert_same() -> Callable[[list[Tensor], list[Tensor]], None]:
    """Bit-equal, one by one, and not an empty comparison."""

    def check(expected: list[Tensor], got: list[Tensor]) -> None:
        assert len(expected) == len(got) > 0
        for index, (plain, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(plain, other), f"tensor {index} of shape {tuple(plain.shape)} differs"

    return check


class _OfThread(io.TextIOBase):
    """Takes what this thread writes; what other threads write meanwhile goes where it would have gone."""

    def __init__(self, common: TextIO) -> None:
        self._common = common
        self._own = io.StringIO()
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return (self._own if threading.get_ident() == self._thread else self._common).write(text)

    def flush(self) -> None:
        self._common.flush()

    def text(self) -> str:
        return self._own.getvalue()


@pytest.fixture
def call_here() -> Callable[[list[str]], tuple[int, str, list[str]]]:
    """Carries out a command of lowtide in this process, one at a time; exit status, output, lines on stderr."""
    from lowtide.app import cli

    turn = threading.Lock()

    def call(arguments: list[str]) -> tuple[int, str, list[str]]:
        with turn:
            output, errors = _OfThread(sys.stdout), _OfThread(sys.stderr)
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
                status = cli.main(arguments)
        return status, output.text(), errors.text().splitlines()

    return call
