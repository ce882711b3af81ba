"""The twin of ``groups`` gives the codec's bytes and values: checked in Triton's interpreter."""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_twin_equals_codec_in_the_interpreter() -> None:
    assert interpret("interpreted_groups.py") == 3 * 20 + 4
