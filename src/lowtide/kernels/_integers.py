"""The coder ``blocks`` for small integers on NVIDIA GPUs (integers.cu): the parts of ``lowtide.coding.integers``.

How long a payload becomes is known once its integers have been measured: the host waits for that, once for all rows of
integers that a codec measures together, and makes room for neither more nor less.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.coding import blocks, lorenzo
from lowtide.coding.planes import Planes
from lowtide.errors import PayloadError
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import current_stream
from lowtide.records import Encoded

PROGRAM = _nvrtc.Program.read("integers", "dtypes.cuh", "four.cuh", "warp.cuh", "integers.cu")
MOST = (1 << 31) - blocks.CHUNK  # integers in a row

_ARGS = struct.Struct("<7Q5I4x")
_WARPS = 8  # of a block, as in integers.cu
_PREDICTIONS = {"none": 0, "lorenzo": 1, "auto": 2}
_LONGEST_ROW = 1 << 16  # that one warp adds up


@dataclass(frozen=True, slots=True)
class Row:
    """Integers to code: int16; or bytes, counted from ``centre``; or maps of int16, of which -32768 means no code.

    For maps ``prediction`` says whether neighbours predict a code; "auto" leaves it to ``costs``, on the device.
    """

    values: Tensor
    centre: int = 0
    maps: Planes | None = None
    prediction: str = "none"
    costs: Tensor | None = None

    @property
    def source(self) -> str:
        return "Bytes" if self.values.dtype == torch.uint8 else "Shorts" if self.maps is None else "Maps"

    def launch(self, kernel: str, chunks: int, **parts: Tensor) -> None:
        maps = self.maps if self.maps is not None else Planes(1, 1, 1)
        if self.costs is not None:
            parts["costs"] = self.costs
        numbers = (self.centre, maps.width, maps.height, _PREDICTIONS[self.prediction])
        _launch(f"{kernel}<{self.source}>", chunks, self.values.numel(), numbers, source=self.values, **parts)


@dataclass(frozen=True, slots=True)
class Measured:
    """A row whose length is known to the device, in the last of ``offsets``."""

    row: Row
    headers: Tensor
    offsets: Tensor

    def nbytes(self, words: int) -> int:
        return self.headers.nbytes + self.offsets.nbytes + 4 * words

    def pack(self, words: int, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Metadata and parts, as ``integers.write`` gives them, of a row that takes so many words."""
        stream = torch.empty(words, dtype=torch.int32, device=self.headers.device)
        self.row.launch("pack", self.offsets.numel() - 1, offsets=self.offsets, words=stream)
        parts = {"headers": self.headers, "offsets": self.offsets, "words": stream}
        return {"coder": "blocks", "words": words}, {prefix + name: part for name, part in parts.items()}


def measure(row: Row) -> Measured:
    """Headers and offsets of a row that has integers, and no more than ``MOST``."""
    device, chunks = row.values.device, -(-row.values.numel() // blocks.CHUNK)
    headers = torch.empty(chunks * blocks.HEADER_NBYTES, dtype=torch.uint8, device=device)
    lengths = torch.empty(chunks, dtype=torch.int32, device=device)
    row.launch("measure", chunks, headers=headers, lengths=lengths)
    offsets = torch.empty(chunks + 1, dtype=torch.int32, device=device)
    offsets[0] = 0
    torch.cumsum(lengths, 0, dtype=torch.int32, out=offsets[1:])
    return Measured(row, headers, offsets)


def lengths(rows: Sequence[Measured], *others: Tensor) -> list[int]:
    """The words of all rows, then the numbers in ``others``: waits for the device."""
    numbers: list[int] = torch.cat([*[row.offsets[-1:].long() for row in rows], *others]).tolist()
    return numbers


def survey(row: Row) -> None:
    """Add the bits of some codes and of their residuals to the two ``costs``."""
    count = row.values.numel()
    stride = lorenzo.stride(count)
    replace(row, centre=stride).launch("survey", -(-count // (32 * stride)))


def read(encoded: Encoded, meta: dict[str, Any], into: Tensor, prefix: str = "", centre: int = 0) -> Tensor:
    """Fill ``into`` (int16, or bytes counted from ``centre``) with what ``integers.write`` gave ``meta`` for."""
    count = into.numel()
    if meta["coder"] == "none" and not count:
        return into
    chunks = -(-count // blocks.CHUNK)
    words = encoded.tensor(prefix + "words", dtype=torch.int32, numel=meta["words"])
    headers = encoded.tensor(prefix + "headers", dtype=torch.uint8, numel=chunks * blocks.HEADER_NBYTES)
    offsets = encoded.tensor(prefix + "offsets", dtype=torch.int32, numel=chunks + 1)
    if not chunks:
        raise PayloadError(f"{encoded.codec} payload: no integers by coder {meta['coder']!r}: corrupted")
    kernel = "unpack<Bytes>" if into.dtype == torch.uint8 else "unpack<Shorts>"
    _launch(kernel, chunks, count, (centre, 1, 1, 0), target=into, headers=headers, offsets=offsets, words=words)
    return into


def accumulate(residuals: Tensor, maps: Planes) -> Tensor:
    """``lorenzo.accumulate`` as int16; a row of integers that stand in memory plane after plane, changed in place."""
    if maps.width > _LONGEST_ROW:
        return lorenzo.accumulate(maps.split(residuals)).to(torch.int16).flatten()
    numbers = (0, maps.width, maps.height, 1)
    _launch("accumulate<Shorts>", maps.count, residuals.numel(), numbers, target=residuals)
    return residuals


def is_readable(meta: dict[str, Any]) -> bool:
    """Whether these kernels read what ``integers.write`` gave this metadata for."""
    return meta.get("coder") in ("blocks", "none")


_FIELDS = ("source", "target", "headers", "lengths", "offsets", "words", "costs")


def _launch(kernel: str, warps: int, count: int, numbers: tuple[int, int, int, int], **tensors: Tensor) -> None:
    pointers = [tensors[name].data_ptr() if name in tensors else 0 for name in _FIELDS]
    device = next(iter(tensors.values())).device.index or 0
    arguments = _ARGS.pack(*pointers, count, *numbers)
    _function(kernel, device).launch(-(-warps // _WARPS), 32 * _WARPS, 0, arguments, current_stream(device))


@cache
def _function(kernel: str, device: int) -> _nvrtc.Function:
    return PROGRAM.function(kernel, device)
