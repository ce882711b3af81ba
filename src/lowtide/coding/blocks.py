"""The coder ``blocks``: a bit width for every 32 codes, then bit planes; blocks of zeros cost their header only.

Format. Codes are magnitudes in 0 .. 2047 with an optional sign. 32 neighbouring codes are a block, 32 blocks a chunk,
and a chunk decodes on its own. A block whose largest magnitude needs b bits has the narrowest width w >= b of 0, 1, 2,
3, 4, 5, 7, 11 and stores w words: bit k of word p is bit p of code k. If any code of the block is negative, one more
word holds the signs. Its header is four bits, the index of w plus 8 * signed; two headers make a byte, the even block's
in the low half.

A chunk is a run of words: the planes of its blocks, then its escapes in order of position. An escape is the position in
the chunk and the bits of the value: one word (position << 16 | bits) for values of 16 bits, else the position and then
one word for every 32 bits of the value. A chunk that would not be smaller than its raw values is those values instead,
and its first header is 8, which no other chunk has. ``offsets`` holds the first word of every chunk and the total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.coding import bitpack
from lowtide.errors import PayloadError

BLOCK = 32
BLOCKS = 32  # a chunk
CHUNK = BLOCKS * BLOCK
WIDTHS = (0, 1, 2, 3, 4, 5, 7, 11)
MAX_CODE = (1 << WIDTHS[-1]) - 1
HEADER_NBYTES = BLOCKS // 2  # a chunk
_CLASS_OF_LENGTH = tuple(next(c for c, width in enumerate(WIDTHS) if width >= length) for length in range(12))
_SIGNED = 8
_RAW = 8


def raw_words(dtype: torch.dtype, count: int = CHUNK) -> int:
    """Words of a chunk that holds its ``count`` values as they are."""
    return -(-count * dtype.itemsize // 4)


def escape_words(dtype: torch.dtype) -> int:
    return 1 if dtype.itemsize == 2 else 1 + dtype.itemsize // 4


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
    lanes, signs = codes.view(-1, BLOCK), negative.view(-1, BLOCK)
    klass = _table(_CLASS_OF_LENGTH, codes.device)[_bit_length(lanes.amax(1))]
    signed = signs.any(1)
    width = _table(WIDTHS, codes.device)[klass]
    planes = width + signed
    in_chunk = planes.view(chunks, BLOCKS)
    escaped = lost.view(chunks, CHUNK).sum(1)
    counts = in_chunk.sum(1) + escaped * escape_words(values.dtype)
    as_raw = _raw_counts(values.dtype, count, codes.device)
    raw = counts >= as_raw
    counts = torch.where(raw, as_raw, counts)
    base = counts.cumsum(0) - counts
    words = torch.empty(int(counts.sum()), dtype=torch.int32, device=codes.device)
    coded = ~raw.repeat_interleave(BLOCKS)
    first = (base.unsqueeze(1) + in_chunk.cumsum(1) - in_chunk).flatten()
    for plane in range(int(width.amax()) if chunks else 0):
        chosen = (coded & (width > plane)).nonzero().squeeze(1)
        words[first[chosen] + plane] = _gather_bits((lanes[chosen] >> plane) & 1)
    chosen = (coded & signed).nonzero().squeeze(1)
    words[first[chosen] + width[chosen]] = _gather_bits(signs[chosen].to(torch.int32))
    _write_escapes(words, base + in_chunk.sum(1), lost & ~raw.repeat_interleave(CHUNK), values)
    _write_raw(words, base, counts, raw, values)
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
    """Random access to the chunks of a payload; its constructor refuses parts that contradict each other."""

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
        self._escaped = torch.where(self._raw, 0, spare // escape_words(dtype))
        as_raw = _raw_counts(dtype, count, words.device)
        fits = torch.where(self._raw, spare == as_raw, spare == self._escaped * escape_words(dtype))
        fits &= self._escaped.clamp(0, CHUNK) == self._escaped
        if not bool(fits.all()) or int(offsets[0]) != 0 or int(offsets[-1]) != words.numel():
            raise PayloadError(
                f"blocks payload: headers, offsets and {words.numel()} words contradict each other: "
                "truncated or corrupted"
            )
        self._words, self._dtype = words, dtype

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Magnitudes (int32) and signs (bool) of elements [start, stop); ``start`` is a multiple of a chunk."""
        assert start % CHUNK == 0, "slabs start on a chunk"
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

    def write_exact(self, flat: Tensor) -> None:
        """Put escapes and raw chunks into the decoded values."""
        chunk = torch.arange(self._escaped.numel(), device=flat.device).repeat_interleave(self._escaped)
        if chunk.numel():
            at = self._escapes_at[chunk] + _ranks(self._escaped) * escape_words(self._dtype)
            position, value = _read_escapes(self._words, at, self._dtype)
            if int(position.amax()) >= CHUNK or int((chunk * CHUNK + position).amax()) >= flat.numel():
                raise PayloadError("blocks payload: an escape lies outside its chunk: corrupted")
            flat.view(value.dtype)[chunk * CHUNK + position] = value
        for index in self._raw.nonzero().flatten().tolist():
            part = flat[index * CHUNK : (index + 1) * CHUNK]
            start = int(self._base[index])
            words = self._words[start : start + raw_words(self._dtype, part.numel())]
            part.copy_(words.clone().view(self._dtype)[: part.numel()])


def _fill(part: Tensor) -> Tensor:
    """Zeros up to a whole chunk."""
    missing = -part.numel() % CHUNK
    return torch.cat([part, part.new_zeros(missing)]) if missing else part


def _ranks(counts: Tensor) -> Tensor:
    """0, 1, 2, ... within each run of the given lengths."""
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.arange(starts.numel(), device=counts.device) - starts


def _write_escapes(words: Tensor, at: Tensor, lost: Tensor, values: Tensor) -> None:
    index = lost.nonzero().squeeze(1)
    if not index.numel():
        return
    chunk, position = index // CHUNK, (index % CHUNK).to(torch.int32)
    rank = _ranks(lost.view(-1, CHUNK).sum(1))
    at = at[chunk] + rank * escape_words(values.dtype)
    bits = values[index].view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    if values.dtype.itemsize == 2:
        words[at] = position << 16 | bits.to(torch.int32) & 0xFFFF
        return
    words[at] = position
    for word, part in enumerate(bits.view(index.numel(), -1).unbind(1)):
        words[at + 1 + word] = part


def _read_escapes(words: Tensor, at: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Positions, and the values as integers: writing floats by index may pass them through another float type."""
    if dtype.itemsize == 2:
        word = words[at]
        return (word >> 16).long() & 0xFFFF, (word & 0xFFFF).to(torch.int16)
    parts = [words[at + 1 + word] for word in range(dtype.itemsize // 4)]
    bits = torch.int64 if dtype.itemsize == 8 else torch.int32
    return words[at].long() & 0xFFFFFFFF, torch.stack(parts, 1).view(bits).flatten()


def _write_raw(words: Tensor, base: Tensor, counts: Tensor, raw: Tensor, values: Tensor) -> None:
    index = raw.nonzero().squeeze(1)
    if index.numel():
        span = torch.arange(raw_words(values.dtype), device=values.device)
        used = span < counts[index].unsqueeze(1)
        bits = values.view(-1, CHUNK)[index].contiguous().view(torch.int32)
        words[(base[index].unsqueeze(1) + span)[used]] = bits[used]


def _raw_counts(dtype: torch.dtype, count: int, device: torch.device) -> Tensor:
    """Words of every chunk if it were raw; the last chunk may be short."""
    chunks = -(-count // CHUNK)
    counts = torch.full((chunks,), raw_words(dtype), device=device)
    if chunks:
        counts[-1] = raw_words(dtype, count - (chunks - 1) * CHUNK)
    return counts


def _table(entries: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(entries, device=device)


def _bit_length(value: Tensor) -> Tensor:
    """Bits needed to write each non-negative integer below 2**24 (exact: such integers are exact in float32)."""
    return torch.frexp(value.float()).exponent.long()


def _lanes(device: torch.device) -> Tensor:
    return torch.arange(BLOCK, dtype=torch.int32, device=device)


def _gather_bits(bits: Tensor) -> Tensor:
    """Rows of 32 zeros and ones (int32) into one word a row."""
    return (bits << _lanes(bits.device)).sum(1, dtype=torch.int32)


def _scatter_bits(words: Tensor) -> Tensor:
    return (words.unsqueeze(1) >> _lanes(words.device)) & 1
