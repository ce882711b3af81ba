"""A command sets up torch's allocator in time: the segments of its process can grow, unless the user says otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        sys.platform != "linux" or any(name in platform.release().lower() for name in ("microsoft", "tegra")),
        reason="segments cannot grow here",
    ),
]

# Torch, and with it all of Lowtide, is imported long before the command begins.
SCRIPT = """
from lowtide.app import cli
assert cli.main(["env", "--no-test"]) == 0
import torch
tensor = torch.ones(1 << 20, device="cuda")
print(sorted({segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}))
"""


@pytest.mark.parametrize(("given", "wanted"), [({}, "[True]"), ({"PYTORCH_CUDA_ALLOC_CONF": ""}, "[False]")])
def test_segments_of_a_command(given: dict[str, str], wanted: str) -> None:
    inherited = {name: text for name, text in os.environ.items() if not name.endswith("_ALLOC_CONF")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=inherited | given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == wanted
