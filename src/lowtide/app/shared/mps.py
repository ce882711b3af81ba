"""Several processes on one GPU at the same time, where NVIDIA's Multi-Process Service (MPS) is installed.

Without it the GPU works for one process at a time, in turns; a small net leaves most of it idle in its turn. With it,
kernels of all of them run side by side. The daemon here is one of our own, for the processes that are given its
environment and for nobody else, and ends with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping

_CONTROL, _PIPES, _LOGS = "nvidia-cuda-mps-control", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_PATIENCE = 15  # seconds


@contextlib.contextmanager
def shared_gpu(count: int) -> Iterator[Mapping[str, str]]:
    """Variables for the environment of ``count`` processes; none where there is no MPS, or the user runs it already."""
    control = shutil.which(_CONTROL)
    if count < 2 or control is None or _PIPES in os.environ or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="lowtide-mps-") as folder:  # a short path: pipes are sockets
        variables = {_PIPES: folder, _LOGS: folder}
        if not _tell(control, variables, "-d"):
            yield {}
            return
        try:
            yield variables
        finally:
            _tell(control, variables, words="quit\n")


def _tell(control: str, variables: Mapping[str, str], *arguments: str, words: str = "") -> bool:
    """Whether the daemon did what it was told. Its output goes nowhere: it would keep a pipe open for ever."""
    try:
        done = subprocess.run(
            [control, *arguments], env={**os.environ, **variables}, input=words, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=_PATIENCE, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
