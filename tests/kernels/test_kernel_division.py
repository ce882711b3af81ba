"""The twin of ``division`` gives the codec's bytes and values: checked in Triton's interpreter."""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_twin_equals_codec_in_the_interpreter() -> None:
    assert interpret("interpreted_division.py") == 35 + 2 * 8
