"""The twins of ``bitmask`` and ``window_index`` give their codecs' bytes: checked in Triton's interpreter."""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_twins_equal_codecs_in_the_interpreter() -> None:
    assert interpret("interpreted_masks.py") == 3 * 33 + 9 + 35
