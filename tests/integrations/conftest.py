"""Real libraries, where they are installed; each with a model that is small and repeats itself bit for bit."""

from __future__ import annotations

import importlib
import runpy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.session import Session

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def library() -> Callable[[str], ModuleType]:
    """A library, or the test is skipped; its own warnings are not ours to fix."""

    def load(name: str) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return importlib.import_module(name)
            except ImportError as error:
                pytest.skip(f"{name} is not installed ({error})")

    return load


@pytest.fixture
def run_example() -> Callable[..., Session]:
    """Runs ``main`` of an example."""

    def run(name: str, **options: Any) -> Session:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        session: Session = main(**options)
        return session

    return run


@pytest.fixture
def assert_compressed() -> Callable[[Session], None]:
    """By the ledger: values were coded, and at least three times less was held than in plain training."""

    def check(tide: Session) -> None:
        ledger = tide.ledger
        assert any(entry.codec == "sz" and entry.held_nbytes for entry in ledger.sites.values())
        assert ledger.raw_peak > 3 * ledger.held_peak > 0
        assert ledger.raw == ledger.held == 0, "a graph is still alive"

    return check


@pytest.fixture
def assert_detached() -> Callable[[nn.Module], None]:
    def check(model: nn.Module) -> None:
        assert not any("lowtide" in module._forward_pre_hooks for module in model.modules())

    return check


@pytest.fixture
def make_net() -> Callable[[], nn.Module]:
    return build_net


def build_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
