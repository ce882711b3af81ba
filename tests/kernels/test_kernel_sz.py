"""The twin of ``sz`` gives the codec's bytes and values: checked in Triton's interpreter, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("interpreted_sz.py")


def interpret(dtype: str) -> int:
    """Run the script in a process of its own; gives the number of cases, or fails with what it printed."""
    package = str(Path(lowtide.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), dtype]  # NumPy warns of every NaN and inf
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    passed = re.fullmatch(r"(\d+) of \1 cases passed", done.stdout.strip())
    assert passed, done.stdout
    return int(passed[1])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_twin_equals_codec_in_the_interpreter(dtype: str) -> None:
    assert interpret(dtype) >= 40
