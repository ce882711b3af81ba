"""Shared by all tests: GPU tests say that they were skipped; every test starts from a known RNG state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    leftover = torch._C._autograd._top_saved_tensors_default_hooks(False)
    assert leftover is None, "the test left saved-tensor hooks on"
