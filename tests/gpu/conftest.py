"""Determinism for tests on a device, and a way to the cases and the training loop that the tests on the CPU use.

Deterministic mode also fills what ``torch.empty`` gives with NaN (integers: with their maximum), so an element that a
kernel leaves unwritten shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in ("kernels", "exact"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))


@pytest.fixture(scope="session", autouse=True)
def _cublas_workspace() -> Iterator[None]:
    """What cuBLAS needs in order to repeat itself; read when it is first used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        yield


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ops that cannot repeat themselves warn only: whether plain training repeats itself is checked where it counts."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)
