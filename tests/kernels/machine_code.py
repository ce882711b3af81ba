"""What NVRTC makes of a kernel: the resources it takes, read without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from lowtide.kernels import _nvrtc

requires_nvrtc = pytest.mark.skipif(
    _nvrtc._nvrtc() is None, reason="NVRTC is not installed: pip install nvidia-cuda-nvrtc cuda-bindings"
)


def usage(cubin: bytes, folder: Path) -> dict[str, int]:
    """Registers, stack and local memory of the kernel."""
    report = _inspect("--dump-resource-usage", cubin, folder)
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    assert found.keys() == {"REG", "STACK", "SHARED", "LOCAL"}, report
    return found


def listing(cubin: bytes, folder: Path) -> str:
    """The kernel's instructions."""
    return _inspect("--dump-sass", cubin, folder)


def _inspect(what: str, cubin: bytes, folder: Path) -> str:
    """By NVIDIA's tool; it comes with Triton."""
    tools = pytest.importorskip("triton", reason="the tool that reads machine code comes with Triton").knobs.nvidia
    path = folder / "inspected.cubin"
    path.write_bytes(cubin)
    command = [tools.cuobjdump.path, what, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
