"""A simulated link on which no copy may race."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slow_link import SlowLink


@pytest.fixture
def link() -> Iterator[SlowLink]:
    made = SlowLink()
    yield made
    assert made.races == []
