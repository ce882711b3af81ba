"""Twins of codecs for the GPU: same base name, same values, one pass over the raw tensor each way.

Twins are written in Triton, and in CUDA C++ for NVIDIA where votes within a warp or shared memory decide: ``sz`` and
``division`` once more, and ``cusz``, ``jpeg_act`` and ``lossless``. Neither Triton nor CUDA is touched before a twin is
asked for. Where there is no twin, the plain-torch codec itself does the work.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch

from lowtide.codecs import Codec
from lowtide.kernels import _nvrtc
from lowtide.registry import KERNELS


@cache
def available() -> bool:
    """Whether Triton kernels can run: on a CUDA device, or in Triton's interpreter (TRITON_INTERPRET=1)."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or interpreted())


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def twin(codec: Codec, device: torch.device, dtype: torch.dtype) -> Codec:
    """The codec's twin for tensors on ``device``, or the codec itself where it has none."""
    return _twin(codec, device.type, dtype)  # type: ignore[arg-type]


@cache
def _twin(codec: Codec, device: str, dtype: torch.dtype) -> Codec:
    if device == "cuda" and codec.name == "sz" and _nvrtc.available():
        from lowtide.kernels._sz_cuda import SzCuda

        found: Codec = SzCuda.of(codec)  # type: ignore[arg-type]
        if found.accepts(dtype):
            return found
    if device == "cuda" and codec.name == "division" and _nvrtc.available() and available():
        from lowtide.kernels._division_cuda import DivisionCuda

        found = DivisionCuda(codec)  # type: ignore[arg-type]
        if found.accepts(dtype):
            return found
    if (device != "cuda" and not interpreted()) or not available() or codec.name not in KERNELS.names():
        return codec
    found = KERNELS.load(codec.name)(codec)
    return found if found.accepts(dtype) else codec
