"""The format of the coder ``rans`` in plain Python, one symbol at a time, from its description and not from its code.

Only reading is defined: where escapes stand in their lists, and what follows the last value, is left to the writer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.records import Encoded

ZERO = 4096  # stands for "exactly zero" among the codes
_START = 1 << 15  # what an encoder's states are before its first symbol


@dataclass(frozen=True)
class Content:
    """Codes by position, "exactly zero" as 4096; and by position the bits of what is stored exactly, which has none."""

    codes: dict[int, int]
    escaped_codes: set[int]
    escapes: dict[int, int]
    raw: dict[int, int]

    @property
    def exact(self) -> dict[int, int]:
        return self.escapes | self.raw


def content(encoded: Encoded) -> Content:
    """All that an ``sz`` payload holds, in memory order."""
    parts = {name: encoded.tensors[name].tolist() for name in ("heads", "words", "freqs")}
    return read(parts, encoded.meta["alphabet"], count=encoded.spec.numel, nbits=8 * encoded.spec.dtype.itemsize)


def read(parts: Mapping[str, list[int]], alphabet: Mapping[str, Any], *, count: int, nbits: int) -> Content:
    """``nbits`` is the size of a value."""
    found = Content({}, set(), {}, {})
    words = [word % (1 << 32) for word in parts["words"]]
    size = alphabet["rows"] * 128
    after = 0
    for chunk in range(-(-count // size)):
        base, length, escapes = parts["heads"][3 * chunk : 3 * chunk + 3]
        assert base == after, "a chunk begins where the one before it ends"
        start, stop = chunk * size, min((chunk + 1) * size, count)
        if length < 0:
            assert (length, escapes) == (-1, 0)
            found.raw.update({start + at: bits for at, bits in enumerate(_values(words[base:], stop - start, nbits))})
            after = base + -(-(stop - start) * nbits // 32)
            continue
        here = iter(words[base:])
        states = [next(here) for _ in range(32)]
        pairs = [next(here) for _ in range((length + 1) // 2)]
        stream = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)][:length]
        codes = _decode(states, stream, parts["freqs"], alphabet)
        for _ in range(escapes % 65536):
            word = next(here)
            code = word & 0xFFFF
            codes[word >> 16] = code - 65536 if code >> 15 else code
            found.escaped_codes.add(start + (word >> 16))
        for _ in range(escapes >> 16):
            word = next(here)
            position = word >> 16 if nbits == 16 else word
            bits = word & 0xFFFF if nbits == 16 else sum(next(here) << 32 * part for part in range(nbits // 32))
            found.escapes[start + position] = bits
        found.codes.update({start + at: code for at, code in enumerate(codes) if start + at < stop})
        after = base + 32 + len(pairs) + escapes % 65536 + (escapes >> 16) * (1 if nbits == 16 else 1 + nbits // 32)
    assert max([*found.escapes, *found.escaped_codes], default=0) < count
    for position in found.escapes:
        del found.codes[position]
    return found


def _decode(states: list[int], stream: list[int], freqs: list[int], alphabet: Mapping[str, Any]) -> list[int]:
    """The codes of a whole chunk."""
    owners = [symbol for symbol, share in enumerate(freqs) for _ in range(share)]
    assert len(owners) == 4096
    first = [sum(freqs[:symbol]) for symbol in range(len(freqs))]
    lanes: list[list[int]] = [[] for _ in range(32)]
    for _ in range(alphabet["rows"] * 4 // alphabet["values"]):
        needy = []
        for lane in range(32):
            slot = states[lane] % 4096
            symbol = owners[slot]
            states[lane] = freqs[symbol] * (states[lane] // 4096) + slot - first[symbol]
            if states[lane] < _START:
                needy.append(lane)
            for _ in range(alphabet["values"]):
                lanes[lane].append(symbol % alphabet["size"])
                symbol //= alphabet["size"]
        for lane in reversed(needy):
            states[lane] = states[lane] << 16 | stream.pop()
    assert not stream and states == [_START] * 32, "what the encoder began with is left"
    reserved = int(alphabet["zero"])
    digits = [0] * (alphabet["rows"] * 128)
    for lane, mine in enumerate(lanes):
        for number, digit in enumerate(mine):
            digits[number // 4 * 128 + lane * 4 + number % 4] = digit
    if alphabet.get("predicted", False):
        assert not reserved and 0 not in freqs
        for at in range(len(digits)):
            digits[at] = (digits[at] + (digits[at - 1] if at % 128 else alphabet["fill"])) % alphabet["size"]
    return [ZERO if reserved and digit == 0 else digit - reserved + alphabet["low"] for digit in digits]


def _values(words: list[int], count: int, nbits: int) -> list[int]:
    row = b"".join(word.to_bytes(4, "little") for word in words[: -(-count * nbits // 32)])
    return [int.from_bytes(row[at * nbits // 8 : (at + 1) * nbits // 8], "little") for at in range(count)]
