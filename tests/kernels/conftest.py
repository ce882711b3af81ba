"""Kernels in CUDA C++ without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from guarded import Guarded

Emulate = Callable[[ModuleType, Callable[..., Any]], Guarded]


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
