"""Two ranks for all tests of a run; they are started by the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without torch.distributed, or without gloo")
    found = Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.close()
