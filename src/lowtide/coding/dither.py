"""Counter-based dither: element i of stream ``seed`` always gets the same offset, on every device, with no RNG state.

One 32-bit hash serves four neighbouring elements, a byte each. The offset is u = (byte + 0.5) / 256 - 0.5, an odd
multiple of 1/512 in (-1/2, 1/2): never zero, symmetric about zero, exact in every float type that computes with it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


def mix64(*words: int, state: int = 0) -> int:
    """A 64-bit hash of integers (splitmix64 over each): seeds for sites, steps and calls.

    ``mix64(b, state=mix64(a))`` is ``mix64(a, b)``.
    """
    for word in words:
        state = (state ^ (word & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK64
        state ^= state >> 31
    return state


def keys(seed: int) -> tuple[int, int]:
    """The two 32-bit keys of a stream, as signed integers; neighbouring seeds have unrelated keys."""
    low, high = (mixed := mix64(seed)) & _MASK32, mixed >> 32
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def bytes_at(seed: int, index: Tensor) -> Tensor:
    """The dither byte (int32, 0 .. 255) of each element of stream ``seed``."""
    return (_hash(seed, (index >> 2).to(torch.int32)) >> ((index & 3) << 3).to(torch.int32)) & 0xFF


def bytes_between(seed: int, start: int, stop: int, device: torch.device) -> Tensor:
    """The same for elements [start, stop), a hash for four of them."""
    words = _hash(seed, torch.arange(start // 4, -(-stop // 4), device=device).to(torch.int32))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=device)
    return ((words.unsqueeze(1) >> shifts) & 0xFF).flatten()[start % 4 : start % 4 + stop - start]


def fractions_between(seed: int, start: int, stop: int, device: torch.device, number: Tensor | None = None) -> Tensor:
    """A multiple of 2**-24 in [0, 1) for each element, a hash of its own; ``number`` (int64) shifts the stream."""
    index = torch.arange(start, stop, device=device)
    word = _hash(seed, (index if number is None else index + number).to(torch.int32))
    return _shift_right(word, 8).float().mul_(2.0**-24)


def _hash(seed: int, word: Tensor) -> Tensor:
    low, high = keys(seed)
    word = word + low
    word = word ^ _shift_right(word, 16)
    word = word * _signed32(0x7FEB352D)
    word = word ^ high
    word = word ^ _shift_right(word, 15)
    word = word * _signed32(0x846CA68B)
    return word ^ _shift_right(word, 16)


def offsets(seed: int, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same as offsets in (-1/2, 1/2), for elements [start, stop)."""
    byte = bytes_between(seed, start, stop, device)
    return (byte.to(dtype) - 127.5) * (1.0 / 256.0)


def _signed32(value: int) -> int:
    value &= _MASK32
    return value - (1 << 32) if value >> 31 else value


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Logical shift of int32 (torch shifts arithmetically)."""
    return (word >> bits) & ((1 << (32 - bits)) - 1)
