"""Runs a script in Triton's interpreter, in a process of its own: TRITON_INTERPRET=1 holds for a whole process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lowtide


def interpret(script: str, *arguments: str) -> int:
    """The number of cases that the script passed; fails with what it printed unless it passed them all."""
    package = str(Path(lowtide.__file__).parents[1])
    paths = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    # NumPy warns of every NaN and inf.
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-6000:]}"
    passed = re.fullmatch(r"(\d+) of \1 cases passed", done.stdout.strip())
    assert passed, done.stdout
    return int(passed[1])
