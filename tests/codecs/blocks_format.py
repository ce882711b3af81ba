"""The format of the coder ``blocks`` in plain Python, one code at a time, from its description and not from its code.

Here a code is a signed integer and a value the unsigned integer of its bits; ``nbits`` is the size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.records import Encoded

WIDTHS = (0, 1, 2, 3, 4, 5, 7, 11)
# Element 128 j + 4 b + k of a chunk is number 4 j + k of block b, and stands at bit PLACES[4 j + k] of its words.
BLOCKS = [[128 * j + 4 * b + k for j in range(8) for k in range(4)] for b in range(32)]
PLACES = [4 * (number % 8) + number // 8 for number in range(32)]
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Parts:
    """Header bytes, chunk offsets, words (as signed 32-bit integers)."""

    headers: list[int]
    offsets: list[int]
    words: list[int]


@dataclass(frozen=True)
class Content:
    """The codes of chunks that are not raw, and by position the bits of what is stored exactly."""

    codes: list[int]
    escapes: dict[int, int]
    raw: dict[int, int]


@dataclass(frozen=True)
class _Chunk:
    index: int
    headers: list[int]
    words: list[int]

    @property
    def is_raw(self) -> bool:
        return self.headers[0] == 8

    @property
    def planes(self) -> int:
        return 0 if self.is_raw else sum(WIDTHS[header % 8] + header // 8 for header in self.headers)


def bits_of(values: Tensor) -> list[int]:
    """The bits of each value as an unsigned integer."""
    same_size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.itemsize]
    return [number % (1 << 8 * values.itemsize) for number in values.contiguous().view(same_size).tolist()]


def element_at(block: int, number: int) -> int:
    """Where in its chunk an element of a block stands."""
    return BLOCKS[block][number]


def write(codes: list[int], lost: list[bool], bits: list[int], *, nbits: int) -> Parts:
    """The payload; codes are 0 where ``lost``, and the bits there are the escapes."""
    headers: list[int] = []
    offsets, words = [0], []
    for start in range(0, len(codes), 1024):
        stop = start + 1024
        nibbles, chunk = _planes(codes[start:stop])
        for position, (is_lost, value) in enumerate(zip(lost[start:stop], bits[start:stop], strict=True)):
            chunk += _escape(position, value, nbits) if is_lost else []
        raw = _raw(bits[start:stop], nbits)
        if len(chunk) >= len(raw):
            nibbles, chunk = [8] + [0] * 31, raw
        headers += [even | odd << 4 for even, odd in zip(nibbles[::2], nibbles[1::2], strict=True)]
        words += chunk
        offsets.append(len(words))
    return Parts(headers, offsets, [word - (1 << 32) if word >> 31 else word for word in words])


def read(parts: Parts, *, count: int, nbits: int) -> Content:
    """The inverse of ``write``."""
    codes: list[int] = []
    for chunk in _chunks(parts):
        words = iter(chunk.words)
        here = [0] * 1024
        for block, header in enumerate([0] * 32 if chunk.is_raw else chunk.headers):
            planes = [next(words) for _ in range(WIDTHS[header % 8])]
            signs = next(words) if header >= 8 else 0
            for at, place in zip(BLOCKS[block], PLACES, strict=True):
                size = sum((plane >> place & 1) << power for power, plane in enumerate(planes))
                here[at] = -size if signs >> place & 1 else size
        codes += here
    return Content(codes[:count], *_exact(parts, count, nbits))


def parts_of(encoded: Encoded) -> Parts:
    """The parts of an ``sz`` payload."""
    return Parts(*(encoded.tensors[name].tolist() for name in ("headers", "offsets", "words")))


def content(encoded: Encoded) -> Content:
    """All that an ``sz`` payload holds, in memory order."""
    return read(parts_of(encoded), count=encoded.spec.numel, nbits=8 * encoded.spec.dtype.itemsize)


def escapes(encoded: Encoded) -> dict[int, int]:
    """The escapes of an ``sz`` payload: position in memory order and bits."""
    return _exact(parts_of(encoded), encoded.spec.numel, 8 * encoded.spec.dtype.itemsize)[0]


def raw_chunks(encoded: Encoded) -> list[int]:
    """Which chunks of an ``sz`` payload are raw."""
    return [chunk.index for chunk in _chunks(parts_of(encoded)) if chunk.is_raw]


def _planes(codes: list[int]) -> tuple[list[int], list[int]]:
    """The 32 headers of a chunk and the words of its blocks; a short chunk is filled with zeros."""
    codes = codes + [0] * (1024 - len(codes))
    headers, words = [], []
    for elements in BLOCKS:
        block = [codes[at] for at in elements]
        needed = max(abs(code) for code in block).bit_length()
        width = min(width for width in WIDTHS if width >= needed)
        signed = any(code < 0 for code in block)
        headers.append(WIDTHS.index(width) + 8 * signed)
        words += [_gather([abs(code) >> plane & 1 for code in block]) for plane in range(width)]
        words += [_gather([int(code < 0) for code in block])] if signed else []
    return headers, words


def _gather(bits: list[int]) -> int:
    return sum(bit << place for bit, place in zip(bits, PLACES, strict=True))


def _escape(position: int, value: int, nbits: int) -> list[int]:
    return [position << 16 | value] if nbits == 16 else [position, *_raw([value], nbits)]


def _raw(bits: list[int], nbits: int) -> list[int]:
    """Values in a row, cut into words, the lowest bits first; the end of the last word is zero."""
    row = b"".join(value.to_bytes(nbits // 8, "little") for value in bits)
    return [int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4)]


def _chunks(parts: Parts) -> Iterator[_Chunk]:
    for index, (start, stop) in enumerate(zip(parts.offsets, parts.offsets[1:], strict=False)):
        headers = [nibble for byte in parts.headers[16 * index : 16 * index + 16] for nibble in (byte & 15, byte >> 4)]
        yield _Chunk(index, headers, [word & _WORD for word in parts.words[start:stop]])


def _exact(parts: Parts, count: int, nbits: int) -> tuple[dict[int, int], dict[int, int]]:
    escaped: dict[int, int] = {}
    raw: dict[int, int] = {}
    for chunk in _chunks(parts):
        start, rest = 1024 * chunk.index, chunk.words[chunk.planes :]
        if chunk.is_raw:
            row = sum(word << 32 * place for place, word in enumerate(rest))
            here = min(1024, count - start)
            raw |= {start + at: row >> nbits * at & ((1 << nbits) - 1) for at in range(here)}
        elif nbits == 16:
            escaped |= {start + (word >> 16): word & 0xFFFF for word in rest}
        else:
            size = 1 + nbits // 32
            for at in range(0, len(rest), size):
                value = sum(word << 32 * place for place, word in enumerate(rest[at + 1 : at + size]))
                escaped[start + rest[at]] = value
    return escaped, raw
