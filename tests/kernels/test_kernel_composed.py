"""The twins of ``norm_groups`` and ``sample_groups`` give their codecs' bytes and values, in Triton's interpreter."""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_twins_equal_codecs_in_the_interpreter() -> None:
    assert interpret("interpreted_composed.py") == 22
