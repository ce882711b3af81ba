"""The coder ``blocks``: a bit width for every 32 codes, then bit planes; blocks of zeros cost their header only.

Format. Codes are magnitudes in 0 .. 2**15 - 1 with an optional sign. 32 neighbouring codes are a block. A block whose
largest magnitude needs w bits stores w words: bit k of word p is bit p of code k; if any code of the block is negative
one more word holds the signs. The header of a block is w + 16 * signed, one byte; if no w exceeds 7, headers are
w + 8 * signed, two to a byte. 32 blocks are a chunk; ``offsets`` holds the position of every chunk's first word, so
that chunks decode independently of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.coding import bitpack
from lowtide.errors import PayloadError

BLOCK = 32
CHUNK = 32 * BLOCK
MAX_WIDTH = 15
MAX_CODE = (1 << MAX_WIDTH) - 1
_NARROW = 7


@dataclass(frozen=True, slots=True)
class Planes:
    """Widths, signs and words of a stretch of whole chunks, before headers are packed."""

    width: Tensor
    signed: Tensor
    words: Tensor


def split(codes: Tensor, negative: Tensor | None) -> Planes:
    """Magnitudes (int32) and signs of one slab into planes; the last chunk is filled up with zeros."""
    missing = -codes.numel() % CHUNK
    if missing:
        codes = torch.cat([codes, codes.new_zeros(missing)])
        negative = None if negative is None else torch.cat([negative, negative.new_zeros(missing)])
    codes = codes.view(-1, BLOCK)
    width = _bit_length(codes.amax(1))
    signed = width.new_zeros(width.shape, dtype=torch.bool)
    if negative is not None:
        negative = negative.view(-1, BLOCK)
        signed = negative.any(1)
    count = width + signed
    first = count.cumsum(0) - count
    words = torch.empty(int(count.sum()), dtype=torch.int32, device=codes.device)
    for plane in range(int(width.amax()) if width.numel() else 0):
        chosen = (width > plane).nonzero().squeeze(1)
        words[first[chosen] + plane] = _gather_bits((codes[chosen] >> plane) & 1)
    if negative is not None:
        chosen = signed.nonzero().squeeze(1)
        words[first[chosen] + width[chosen]] = _gather_bits(negative[chosen].to(torch.int32))
    return Planes(width.to(torch.uint8), signed, words)


def join(slabs: list[Planes]) -> tuple[dict[str, Tensor], bool]:
    """The payload parts of all slabs together, and whether headers are narrow (two to a byte)."""
    width = torch.cat([slab.width for slab in slabs])
    signed = torch.cat([slab.signed for slab in slabs])
    words = slabs[0].words if len(slabs) == 1 else torch.cat([slab.words for slab in slabs])
    narrow = not bool((width > _NARROW).any())
    headers = width | (signed.to(torch.uint8) << (3 if narrow else 4))
    per_chunk = (width + signed).view(-1, CHUNK // BLOCK).sum(1)
    offsets = (per_chunk.cumsum(0) - per_chunk).to(torch.int32 if words.numel() < 1 << 31 else torch.int64)
    return {"headers": bitpack.pack(headers, 4 if narrow else 8), "offsets": offsets, "words": words}, narrow


class Reader:
    """Random access to the chunks of a payload; its constructor refuses parts that contradict each other."""

    def __init__(self, headers: Tensor, offsets: Tensor, words: Tensor, *, narrow: bool, count: int) -> None:
        chunks = -(-count // CHUNK)
        blocks = chunks * (CHUNK // BLOCK)
        if headers.numel() != bitpack.packed_nbytes(blocks, 4 if narrow else 8) or offsets.numel() != chunks:
            raise PayloadError(
                f"blocks payload: {headers.numel()} header bytes and {offsets.numel()} chunk offsets do not describe "
                f"{count} values: truncated or corrupted"
            )
        unpacked = bitpack.unpack(headers, 4 if narrow else 8, blocks)
        self._width = (unpacked & (_NARROW if narrow else MAX_WIDTH)).long()
        self._signed = (unpacked >> (3 if narrow else 4)).bool()
        planes = self._width + self._signed
        self._first = offsets.long().repeat_interleave(CHUNK // BLOCK) + _exclusive(planes.view(-1, CHUNK // BLOCK))
        if int(planes.sum()) != words.numel():
            raise PayloadError(
                f"blocks payload: headers promise {int(planes.sum())} words, {words.numel()} are there: "
                "truncated or corrupted"
            )
        self._words = words

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Magnitudes (int32) and signs (bool) of elements [start, stop); ``start`` is a multiple of a block."""
        assert start % BLOCK == 0, "slabs start on a block"
        rows = slice(start // BLOCK, -(-stop // BLOCK))
        width, signed, first = self._width[rows], self._signed[rows], self._first[rows]
        codes = torch.zeros((width.numel(), BLOCK), dtype=torch.int32, device=width.device)
        for plane in range(int(width.amax()) if width.numel() else 0):
            chosen = (width > plane).nonzero().squeeze(1)
            codes[chosen] |= _scatter_bits(self._words[first[chosen] + plane]) << plane
        negative = torch.zeros_like(codes, dtype=torch.bool)
        chosen = signed.nonzero().squeeze(1)
        negative[chosen] = _scatter_bits(self._words[first[chosen] + width[chosen]]).bool()
        count = stop - start
        return codes.flatten()[:count], negative.flatten()[:count]


def _bit_length(value: Tensor) -> Tensor:
    """Bits needed to write each non-negative integer below 2**24 (exact: such integers are exact in float32)."""
    return torch.frexp(value.float()).exponent.long()


def _exclusive(rows: Tensor) -> Tensor:
    return (rows.cumsum(1) - rows).flatten()


def _lanes(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device)


def _gather_bits(bits: Tensor) -> Tensor:
    """Rows of 32 zeros and ones (int32) into one word a row."""
    return (bits << _lanes(bits.device)).sum(1, dtype=torch.int32)


def _scatter_bits(words: Tensor) -> Tensor:
    return (words.unsqueeze(1) >> _lanes(words.device)) & 1
