"""Byte planes: the bytes of floats, place by place, those that repeat themselves coded and the others as they are.

A word is turned left by one bit first, so that its sign goes to the lowest place and the exponent begins with the
highest byte. The exponents of activations take few values: that byte is worth coding, and those of the mantissa look
like noise. Each byte is counted and the entropy decides.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.coding import integers
from lowtide.errors import PayloadError
from lowtide.records import Encoded

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORTHWHILE = 7.5  # bits a byte, below which a plane is coded


def write(words: Tensor, coder: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """A row of integers, the bits of floats, as metadata for every plane (highest first) and parts of a payload."""
    width = words.dtype.itemsize
    table = _turn(words, 1).view(torch.uint8).view(-1, width)
    planes = [table[:, width - 1 - number].clone() for number in range(width)]
    counts = torch.stack([torch.bincount(plane.int(), minlength=256) for plane in planes])
    metas: list[dict[str, Any]] = []
    parts: dict[str, Tensor] = {}
    for number, (plane, centre) in enumerate(zip(planes, centres(counts.cpu()), strict=True)):
        meta, coded = _write_plane(plane, centre, coder, f"plane{number}_")
        metas.append(meta)
        parts |= coded
    return metas, parts


def centres(counts: Tensor) -> list[int | None]:
    """From how often each byte occurs in each plane, on the CPU: the most frequent one, from which codes are counted.

    None for a plane that is not worth coding.
    """
    total = counts.sum(1, keepdim=True, dtype=torch.int64)
    entropy = torch.special.entr(counts.double() / total.clamp(min=1)).sum(1)
    worthwhile = (entropy < _WORTHWHILE * math.log(2)) & (total.squeeze(1) > 0)
    frequent = counts.argmax(1).tolist()
    return [centre if worth else None for centre, worth in zip(frequent, worthwhile.tolist(), strict=True)]


def _write_plane(
    plane: Tensor, centre: int | None, coder: str, prefix: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if centre is not None:
        meta, parts = integers.write(plane.to(torch.int16) - centre, coder, prefix)
        if sum(part.nbytes for part in parts.values()) < plane.nbytes:
            return {**meta, "centre": centre}, parts
    return {"coder": "raw"}, {f"{prefix}raw": plane}


def read(encoded: Encoded, metas: list[dict[str, Any]], count: int, dtype: torch.dtype) -> Tensor:
    """The inverse; ``dtype`` is that of the words."""
    width = dtype.itemsize
    if len(metas) != width:
        raise PayloadError(f"{encoded.codec} payload: {len(metas)} byte planes for {width} bytes: corrupted")
    planes = torch.empty((count, width), dtype=torch.uint8, device=encoded.spec.device)
    for number, meta in enumerate(metas):
        prefix = f"plane{number}_"
        if meta.get("coder") == "raw":
            plane = encoded.tensor(f"{prefix}raw", dtype=torch.uint8, numel=count)
        else:
            plane = integers.read(encoded, meta, count, prefix) + meta["centre"]
        planes[:, width - 1 - number] = plane
    return _turn(planes.flatten().view(dtype), 8 * width - 1)


def _turn(words: Tensor, left: int) -> Tensor:
    """Rotate every word to the left."""
    width = 8 * words.dtype.itemsize
    return (words << left) | (words >> (width - left)) & ((1 << left) - 1)
