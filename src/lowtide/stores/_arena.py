"""Pinned host memory, cut to measure and used again in the order of the device's copies.

Torch's own cache of pinned memory rounds sizes up to powers of two and hands memory out again only after the host has
seen that the device is done with it. A host that runs ahead of the device would find none and pin more, in the middle
of a step. Here memory that is given back can be had at once: with it comes the mark of the last copy that reads it, and
whoever writes to it next does so on a stream that waits for that mark.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.errors import LowtideWarning

_ALIGNED = 512  # bytes; every dtype may begin there
_LEAST, _MOST = 1 << 26, 1 << 30  # bytes that are pinned at a time: as much as there is already, between these


class Range(NamedTuple):
    """A stretch of a slab; what is written to it must come after the copies up to ``mark``."""

    start: int
    stop: int
    mark: int


class Block:
    """Memory that somebody has. It goes back when this is dropped; ``mark`` is that of the last copy that reads it."""

    __slots__ = ("_arena", "_range", "_slab", "mark", "memory")

    def __init__(self, arena: Arena, slab: int, found: Range, memory: Tensor) -> None:
        self._arena, self._slab, self._range = arena, slab, found
        self.memory, self.mark = memory, found.mark

    def __del__(self) -> None:
        # It may be dropped in the middle of ``take``, by the garbage collector: so it only leaves word.
        self._arena.returned.append((self._slab, self._range._replace(mark=self.mark)))


class Arena:
    """Slabs of pinned memory; pageable where no more can be pinned, which works but makes the host wait for copies."""

    def __init__(self) -> None:
        self.returned: deque[tuple[int, Range]] = deque()
        self._slabs: list[Tensor] = []
        self._free: list[list[Range]] = []  # of each slab, ascending, no two adjacent

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def take(self, nbytes: int) -> Block:
        """``nbytes`` of memory, as a row of bytes."""
        while self.returned:
            self._merge(*self.returned.popleft())
        size = max(-(-nbytes // _ALIGNED), 1) * _ALIGNED
        for number, free in enumerate(self._free):
            for place, found in enumerate(free):
                if found.stop - found.start >= size:
                    return self._cut(number, place, size, nbytes)
        self._grow(size)
        return self._cut(len(self._slabs) - 1, 0, size, nbytes)

    def _cut(self, number: int, place: int, size: int, nbytes: int) -> Block:
        free = self._free[number]
        start, stop, mark = free[place]
        if stop - start == size:
            del free[place]
        else:
            free[place] = Range(start + size, stop, mark)
        return Block(self, number, Range(start, start + size, mark), self._slabs[number].narrow(0, start, nbytes))

    def _merge(self, number: int, back: Range) -> None:
        free = self._free[number]
        place = bisect_left(free, back)
        if place < len(free) and free[place].start == back.stop:
            after = free.pop(place)
            back = Range(back.start, after.stop, max(back.mark, after.mark))
        if place and free[place - 1].stop == back.start:
            place -= 1
            before = free.pop(place)
            back = Range(before.start, back.stop, max(back.mark, before.mark))
        free.insert(place, back)

    def _grow(self, size: int) -> None:
        slab = _pin(max(size, min(max(self.nbytes, _LEAST), _MOST)), least=size)
        self._slabs.append(slab)
        self._free.append([Range(0, slab.numel(), 0)])


def _pin(nbytes: int, *, least: int) -> Tensor:
    """A power of two of pinned bytes, which is what torch would round to, or what can be had."""
    reason: RuntimeError | None = None
    for wanted in (nbytes, least):
        try:
            return torch.empty(1 << (wanted - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            reason = error
    message = str(reason).partition("\n")[0]
    warnings.warn(
        f"no more host memory can be pinned ({message}): payloads of the store 'host' go to pageable memory, and every "
        "copy makes the host wait. Compress more, or offload less",
        LowtideWarning,
        stacklevel=2,
    )
    return torch.empty(least, dtype=torch.uint8)
