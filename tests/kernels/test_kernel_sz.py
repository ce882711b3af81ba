"""The Triton twin of ``sz`` gives the codec's bytes and values: checked in Triton's interpreter."""

from __future__ import annotations

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


@pytest.mark.parametrize(("dtype", "cases"), [("fp32", 40), ("fp16", 12), ("bf16", 30)])
def test_twin_equals_codec_in_the_interpreter(dtype: str, cases: int) -> None:
    assert interpret("interpreted_sz.py", dtype) >= cases
