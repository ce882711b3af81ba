"""Twins of codecs for the GPU: same base name, same bytes, one pass over the raw tensor each way.

Triton is imported when a twin is first asked for, never with the package. Where there is no twin, no Triton or no GPU,
the plain-torch codec itself does the work.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from lowtide.codecs import Codec
from lowtide.registry import KERNELS


@cache
def available() -> bool:
    """Whether Triton kernels can run: on a CUDA device, or in Triton's interpreter (TRITON_INTERPRET=1)."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or interpreted())


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def twin(codec: Codec, device: torch.device, dtype: torch.dtype) -> Codec:
    """The codec's twin for tensors on ``device``, or the codec itself where it has none."""
    if (device.type != "cuda" and not interpreted()) or not available() or codec.name not in KERNELS.names():
        return codec
    found: Codec = KERNELS.load(codec.name)(codec)
    return found if found.accepts(dtype) else codec
