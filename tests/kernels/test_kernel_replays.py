"""Encoders of graphs draw other dither in each replay, and the same as ever for the number 0: in Triton's interpreter.

What they do with a number is what their codecs do with keys that are shifted by it.
"""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_replays_draw_anew_in_the_interpreter() -> None:
    assert interpret("interpreted_replays.py") == 11
