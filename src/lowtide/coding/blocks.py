"""The coder ``blocks``: a bit width for every 32 codes, then bit planes; blocks of zeros cost their header only.

Format. Codes are magnitudes in 0 .. 2047 with an optional sign. 1024 codes are a chunk, which decodes on its own, and
32 of them a block: element 128 j + 4 b + k of the chunk (k < 4) is number n = 4 j + k of block b, so that a GPU lane
that loads four neighbours at a time owns a whole block. Number n stands at bit 4 * (n % 8) + n // 8 of the block's
words, where a few masks and shifts bring it from words of eight nibbles. A block whose largest magnitude needs m bits
has the narrowest width w >= m of 0, 1, 2, 3, 4, 5, 7, 11 and stores w words, one for each bit of its codes, and one
more for the signs if any code is negative. Its header is four bits, the index of w plus 8 * signed; two headers make a
byte, the even block's in the low half.

A chunk is a run of words: the planes of its blocks, then its escapes in order of position. An escape is the position in
the chunk and the bits of the value: one word (position << 16 | bits) for values of 16 bits, else the position and then
one word for every 32 bits of the value. A chunk that would not be smaller than its raw values is those values instead,
and its first header is 8, which no other chunk has. ``offsets`` holds the first word of every chunk and the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowtide.coding import bitpack, exact
from lowtide.errors import PayloadError

BLOCK = 32
BLOCKS = 32  # a chunk
CHUNK = BLOCKS * BLOCK
WIDTHS = (0, 1, 2, 3, 4, 5, 7, 11)
MAX_CODE = (1 << WIDTHS[-1]) - 1
HEADER_NBYTES = BLOCKS // 2  # a chunk
_CLASS_OF_LENGTH = tuple(next(c for c, width in enumerate(WIDTHS) if width >= length) for length in range(12))
_SIGNED = 8
_SIGN_BIT = 30  # of a code in a register, above every magnitude
_RAW = 8


@dataclass(frozen=True, slots=True)
class Stream:
    """Some whole chunks: their headers, their lengths in words, their words."""

    headers: Tensor
    counts: Tensor
    words: Tensor


def write(codes: Tensor, negative: Tensor, lost: Tensor, values: Tensor) -> Stream:
    """Chunks of magnitudes (int32) with signs; elements that are ``lost`` carry code 0 and their value as an escape.

    Only codes other than 0 may be negative.
    """
    count = values.numel()
    codes, negative, lost, values = (_fill(part) for part in (codes, negative, lost, values))
    chunks = codes.numel() // CHUNK
    rows = _to_blocks(codes | negative.to(torch.int32) << _SIGN_BIT)
    lanes, signs = rows & (1 << _SIGN_BIT) - 1, rows >> _SIGN_BIT
    klass = _table(_CLASS_OF_LENGTH, codes.device)[_bit_length(lanes.amax(1))]
    signed = signs.amax(1) > 0
    width = _table(WIDTHS, codes.device)[klass]
    planes = width + signed
    in_chunk = planes.view(chunks, BLOCKS)
    escaped = lost.view(chunks, CHUNK).sum(1)
    counts = in_chunk.sum(1) + escaped * exact.escape_words(values.dtype)
    as_raw = exact.raw_counts(values.dtype, count, CHUNK, codes.device)
    raw = counts >= as_raw
    counts = torch.where(raw, as_raw, counts)
    base = counts.cumsum(0) - counts
    words = torch.empty(int(counts.sum()), dtype=torch.int32, device=codes.device)
    coded = ~raw.repeat_interleave(BLOCKS)
    first = (base.unsqueeze(1) + in_chunk.cumsum(1) - in_chunk).flatten()
    for plane in range(int(width.amax()) if chunks else 0):
        chosen = (coded & (width > plane)).nonzero().squeeze(1)
        words[first[chosen] + plane] = _gather_plane(lanes, chosen, plane)
    chosen = (coded & signed).nonzero().squeeze(1)
    words[first[chosen] + width[chosen]] = _gather_plane(signs, chosen, 0)
    exact.write_escapes(words, base + in_chunk.sum(1), lost & ~raw.repeat_interleave(CHUNK), values, CHUNK)
    exact.write_raw(words, base, counts, raw, values, CHUNK)
    headers = (klass + signed * _SIGNED).to(torch.uint8).view(chunks, BLOCKS)
    headers[raw] = torch.zeros(BLOCKS, dtype=torch.uint8, device=codes.device)
    headers[raw, 0] = _RAW
    return Stream(bitpack.pack(headers.flatten(), 4), counts, words)


def join(streams: list[Stream]) -> dict[str, Tensor]:
    """The payload parts of consecutive streams."""
    counts = torch.cat([stream.counts for stream in streams])
    words = torch.cat([stream.words for stream in streams])
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return {
        "headers": torch.cat([stream.headers for stream in streams]),
        "offsets": offsets.to(torch.int32 if words.numel() < 1 << 31 else torch.int64),
        "words": words,
    }


class Reader:
    """Random access to the chunks of a payload; its constructor refuses parts that contradict each other.

    ``words`` may be longer than what the chunks use: a GPU's buffer is made before its size is known.
    """

    def __init__(self, headers: Tensor, offsets: Tensor, words: Tensor, *, dtype: torch.dtype, count: int) -> None:
        chunks = -(-count // CHUNK)
        if headers.numel() != chunks * HEADER_NBYTES or offsets.numel() != chunks + 1:
            raise PayloadError(
                f"blocks payload: {headers.numel()} header bytes and {offsets.numel()} chunk offsets do not describe "
                f"{count} values: truncated or corrupted"
            )
        unpacked = bitpack.unpack(headers, 4, chunks * BLOCKS).long()
        self._raw = unpacked.view(chunks, BLOCKS)[:, 0] == _RAW
        self._signed = (unpacked >= _SIGNED) & ~self._raw.repeat_interleave(BLOCKS)
        self._width = _table(WIDTHS, headers.device)[unpacked & (_SIGNED - 1)]
        planes = (self._width + self._signed).view(chunks, BLOCKS)
        self._base = offsets[:-1].long()
        self._first = (self._base.unsqueeze(1) + planes.cumsum(1) - planes).flatten()
        self._escapes_at = self._base + planes.sum(1)
        spare = offsets[1:].long() - self._escapes_at
        self._escaped = torch.where(self._raw, 0, spare // exact.escape_words(dtype))
        as_raw = exact.raw_counts(dtype, count, CHUNK, words.device)
        fits = torch.where(self._raw, spare == as_raw, spare == self._escaped * exact.escape_words(dtype))
        fits &= self._escaped.clamp(0, CHUNK) == self._escaped
        if not bool(fits.all()) or int(offsets[0]) != 0 or int(offsets[-1]) > words.numel():
            raise PayloadError(
                f"blocks payload: headers, offsets and {words.numel()} words contradict each other: "
                "truncated or corrupted"
            )
        self._words, self._dtype = words, dtype

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Magnitudes (int32) and signs (bool) of elements [start, stop); ``start`` is a multiple of a chunk."""
        assert start % CHUNK == 0, "slabs start on a chunk"
        rows = slice(start // BLOCK, -(-stop // CHUNK) * BLOCKS)
        width, signed, first = self._width[rows], self._signed[rows], self._first[rows]
        codes = torch.zeros((width.numel(), BLOCK), dtype=torch.int32, device=width.device)
        for plane in range(int(width.amax()) if width.numel() else 0):
            self._read_plane(codes, width > plane, first + plane, plane)
        self._read_plane(codes, signed, first + width, _SIGN_BIT)
        codes = _from_blocks(codes)[: stop - start]
        return codes & (1 << _SIGN_BIT) - 1, codes >> _SIGN_BIT > 0

    def _read_plane(self, codes: Tensor, chosen: Tensor, at: Tensor, bit: int) -> None:
        """One bit of every code of the chosen blocks, whose words are at ``at``; of all blocks if that is quicker."""
        if 2 * int(chosen.sum()) > chosen.numel():
            words = self._words[(at * chosen).clamp_(max=self._words.numel() - 1)] * chosen
            codes |= _scatter_bits(words) << bit
        else:
            rows = chosen.nonzero().squeeze(1)
            codes[rows] |= _scatter_bits(self._words[at[rows]]) << bit

    def write_exact(self, flat: Tensor) -> None:
        """Put escapes and raw chunks into the decoded values."""
        exact.read_escapes(self._words, self._escapes_at, self._escaped, flat, CHUNK)
        exact.read_raw(self._words, self._base, self._raw, flat, CHUNK)


def _fill(part: Tensor) -> Tensor:
    """Zeros up to a whole chunk."""
    missing = -part.numel() % CHUNK
    return torch.cat([part, part.new_zeros(missing)]) if missing else part


def _to_blocks(part: Tensor) -> Tensor:
    """Elements in memory order as rows, a block each."""
    return part.view(-1, 8, BLOCKS, 4).transpose(1, 2).reshape(-1, BLOCK)


def _from_blocks(rows: Tensor) -> Tensor:
    return rows.view(-1, BLOCKS, 8, 4).transpose(1, 2).flatten()


@cache
def _table(entries: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(entries, device=device)


def _bit_length(value: Tensor) -> Tensor:
    """Bits needed to write each non-negative integer below 2**24 (exact: such integers are exact in float32)."""
    return torch.frexp(value.float()).exponent.long()


@cache
def _places(device: torch.device) -> Tensor:
    """The bit at which each element of a block stands."""
    number = torch.arange(BLOCK, dtype=torch.int32, device=device)
    return 4 * (number % 8) + number // 8


def _gather_plane(rows: Tensor, chosen: Tensor, plane: int) -> Tensor:
    """One bit of every code of the chosen rows; of all rows first if that is quicker."""
    if 2 * chosen.numel() > rows.shape[0]:
        return _gather_bits((rows >> plane) & 1)[chosen]
    return _gather_bits((rows[chosen] >> plane) & 1)


def _gather_bits(bits: Tensor) -> Tensor:
    """Rows of 32 zeros and ones (int32) into one word a row."""
    return (bits << _places(bits.device)).sum(1, dtype=torch.int32)


def _scatter_bits(words: Tensor) -> Tensor:
    return (words.unsqueeze(1) >> _places(words.device)) & 1
