"""Small integers, losslessly, by the coders of ``sz``: the entropy stage of codecs that have codes of their own.

Integers are int16. Those that a coder does not reach are escapes, stored as they are, and a chunk that would not be
smaller than its integers is those integers: 16 bits each and a head, at worst.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowtide.coding import blocks, rans, rans_fit
from lowtide.errors import PayloadError, UnknownNameError
from lowtide.records import Encoded

CODERS = ("blocks", "rans")
_FEW = 1 << 15  # below, fitting a table for ``rans`` costs more time than it saves bytes
_PIECES = 768  # of a sample
_MOST_BITS = 9.0  # an integer; where rans would need more, its alphabet is too small
_RANS_PARTS = {"heads": torch.int32, "words": torch.int32, "freqs": torch.int16}
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24  # integers that ``blocks`` works on at a time, in whole chunks


def require_coder(coder: str) -> None:
    if coder not in CODERS:
        raise UnknownNameError("coder", coder, CODERS)


def write(codes: Tensor, coder: str, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A row of integers as metadata and parts of a payload, whose names begin with ``prefix``.

    ``blocks`` has a bit width for every 32 of them. ``rans`` comes near their entropy and takes several times as long
    in plain torch; few integers are left to blocks.
    """
    if not codes.numel():
        return {"coder": "none"}, {}
    model = _fit(codes) if coder == "rans" and codes.numel() >= _FEW else None
    if model is not None:
        meta: dict[str, Any] = {"coder": "rans", "alphabet": model.alphabet.meta()}
        lost = codes.int().abs() > blocks.MAX_CODE  # also of rans, to which 4096 means zero
        parts = rans.write(torch.where(lost, 0, codes.int()), None, lost, codes, model)
    else:
        meta, parts = {"coder": "blocks"}, blocks.join([_write_blocks(codes[slab]) for slab in _slabs(codes)])
    meta["words"] = parts["words"].numel()
    return meta, {prefix + name: part for name, part in parts.items()}


def read(encoded: Encoded, meta: dict[str, Any], count: int, prefix: str = "") -> Tensor:
    """The ``count`` integers that ``write`` gave ``meta`` and the parts named ``prefix`` for."""
    codes = torch.empty(count, dtype=torch.int16, device=encoded.spec.device)
    coder = meta.get("coder")
    if coder == "none" and not count:
        return codes
    if coder not in ("rans", "blocks"):
        raise PayloadError(f"{encoded.codec} payload: {count} integers by coder {coder!r}: corrupted")
    words = encoded.tensor(prefix + "words", dtype=torch.int32, numel=meta["words"])
    if coder == "rans":
        alphabet = rans.Alphabet(**meta["alphabet"])
        parts = {name: encoded.tensor(prefix + name, dtype=dtype) for name, dtype in _RANS_PARTS.items()}
        codes.copy_(rans.read(parts, alphabet, dtype=codes.dtype, count=count)[0])
        rans.write_exact(parts, alphabet, codes)
        return codes
    offsets = encoded.tensors.get(prefix + "offsets")
    if offsets is None or offsets.dtype not in (torch.int32, torch.int64):
        raise PayloadError(f"{encoded.codec} payload lacks its chunk offsets: truncated or corrupted")
    headers = encoded.tensor(prefix + "headers", dtype=torch.uint8)
    reader = blocks.Reader(headers, offsets, words, dtype=codes.dtype, count=count)
    for slab in _slabs(codes):
        magnitude, negative = reader.read(slab.start, slab.stop)
        codes[slab] = torch.where(negative, -magnitude, magnitude)
    reader.write_exact(codes)
    return codes


def _write_blocks(codes: Tensor) -> blocks.Stream:
    magnitude = codes.int().abs()
    lost = magnitude > blocks.MAX_CODE
    return blocks.write(torch.where(lost, 0, magnitude), (codes < 0) & ~lost, lost, codes)


def _slabs(codes: Tensor) -> Iterator[slice]:
    size = _SLAB_CPU if codes.device.type == "cpu" else _SLAB
    for start in range(0, codes.numel(), size):
        yield slice(start, min(start + size, codes.numel()))


def _fit(codes: Tensor) -> rans.Model | None:
    """A model of evenly spaced pieces; None where no alphabet of ``rans`` suits them."""
    pieces = max(1, min(_PIECES, codes.numel() // rans_fit.PIECE))
    start = torch.arange(pieces, device=codes.device) * (codes.numel() // pieces)
    index = (start.unsqueeze(1) + torch.arange(rans_fit.PIECE, device=codes.device)).flatten() % codes.numel()
    sample = codes[index].short().cpu().clamp_(max=rans.ZERO_CODE - 1)
    model = rans_fit.fit(sample, codes.numel(), zero_code=False, lasts=False)
    if model.bits > _MOST_BITS:
        return None
    return rans.Model(model.alphabet, model.freqs.to(codes.device), model.bits)
