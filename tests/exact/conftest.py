"""A test that fails must not take the next ones with it: hooks it left on are taken off here, and reported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _without_leftovers() -> Iterator[None]:
    yield
    leftovers = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        leftovers += 1
    assert not leftovers, "the test left saved-tensor hooks on"
