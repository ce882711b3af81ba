"""Kernels in CUDA C++ without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import simt
from guarded import Guarded

from lowtide.kernels import _nvrtc

Emulate = Callable[[ModuleType, Callable[..., Any]], Guarded]


@pytest.fixture
def names_races(request: pytest.FixtureRequest) -> bool:
    """Whether emulated kernels are watched for races."""
    return bool(request.config.getoption("--races")) or "races" in request.keywords


@pytest.fixture(autouse=True)
def _races(names_races: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt, "names_races", names_races)


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulate]:
    """Has a module launch what a function gives in place of its kernels, in memory that is guarded, and looked at."""
    guarded = Guarded()

    def stand_in(module: ModuleType, function: Callable[..., Any]) -> Guarded:
        monkeypatch.setattr(module, "_function", function)
        monkeypatch.setattr(module, "current_stream", lambda device: 0)
        monkeypatch.setattr(module, "torch", guarded)
        return guarded

    yield stand_in
    guarded.check()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled kernels are kept on disk: a folder that is not there yet."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was compiled, and not read from disk."""
    seen, build = [], _nvrtc._build

    def recorded(*arguments: Any) -> tuple[bytes, str]:
        seen.append(arguments[1:])
        return build(*arguments)

    monkeypatch.setattr(_nvrtc, "_build", recorded)
    return seen
