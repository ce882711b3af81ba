"""Torch's allocator of GPU memory: segments that grow, unless the user has decided otherwise.

Payloads are small and stay from forward to backward, while activations many times their size come and go. By default
they share cached segments of fixed size, and after some steps payloads may lie so that no gap takes the next large
tensor, with most of the memory free. Expandable segments are mapped page by page, so that gaps are not lost.

Torch reads the setting when the allocator is first asked for, not when torch is imported. It holds for the whole
process, so it is for commands and scripts, whose process is ours, and never for ``lowtide.attach``.
"""

from __future__ import annotations

import os
import platform
import sys

import torch

VARIABLE, SETTING = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", VARIABLE)  # torch goes by the first that is set
# Names of kernels under which the first allocation fails: WSL (pytorch issue 192330) and Tegra boards.
_UNABLE = ("microsoft", "tegra")


def use_expandable_segments() -> None:
    """In this process and those that it starts. Comes too late once CUDA is in use, and does nothing then."""
    if find_setting() is None and _is_able() and not torch.cuda.is_initialized():
        os.environ[VARIABLE] = SETTING


def find_setting() -> tuple[str, str] | None:
    """The environment variable that torch goes by, and its text; None where none is set."""
    return next(((name, os.environ[name]) for name in _VARIABLES if name in os.environ), None)


def describe_setting() -> str:
    """As one would write it in front of a command; empty where torch's own defaults hold."""
    return "=".join(find_setting() or ())


def is_off_by_choice() -> bool:
    """Whether the user has a setting that leaves out expandable segments, where they would help."""
    found = find_setting()
    if found is None or not _is_able():
        return False
    text = found[1].replace(" ", "")
    return SETTING not in text and "backend:cudaMallocAsync" not in text  # which has no segments


def _is_able() -> bool:
    """Windows would only warn; elsewhere training would fail."""
    kernel = platform.release().lower()
    return torch.version.cuda is not None and sys.platform == "linux" and not any(name in kernel for name in _UNABLE)
