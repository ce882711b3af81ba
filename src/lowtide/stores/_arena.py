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

import torch
from torch import Tensor

from lowtide.errors import LowtideWarning

_ALIGNED = 512  # bytes; every dtype may begin there
_LEAST, _MOST = 1 << 26, 1 << 30  # bytes that are pinned at a time: as much as there is already, between these


Range = tuple[int, int, int]  # start, stop and mark: what is written there must come after the copies up to the mark


class Block:
    """Memory that somebody has. It goes back when this is dropped; ``mark`` is that of the last copy that reads it."""

    __slots__ = ("_returned", "_slab", "_start", "_stop", "mark", "memory")

    def __init__(
        self, returned: deque[tuple[int, Range]], slab: int, start: int, stop: int, mark: int, memory: Tensor
    ) -> None:
        self._returned, self._slab, self._start, self._stop = returned, slab, start, stop
        self.mark, self.memory = mark, memory

    def __del__(self) -> None:
        # It may be dropped in the middle of ``take``, by the garbage collector: so it only leaves word.
        self._returned.append((self._slab, (self._start, self._stop, self.mark)))


class Arena:
    """Slabs of pinned memory; pageable where no more can be pinned, which works but makes the host wait for copies."""

    def __init__(self) -> None:
        self.returned: deque[tuple[int, Range]] = deque()
        self._slabs: list[Tensor] = []
        self._rows: list[dict[torch.dtype, Tensor]] = []  # each slab as a row of numbers of a dtype
        self._free: list[list[Range]] = []  # of each slab, ascending, no two adjacent

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def take(self, nbytes: int, dtype: torch.dtype = torch.uint8) -> Block:
        """``nbytes`` of memory, as a row of numbers."""
        returned = self.returned
        while returned:
            self._merge(*returned.popleft())
        size = -(-nbytes // _ALIGNED) * _ALIGNED or _ALIGNED
        for slab, free in enumerate(self._free):
            for place, (start, stop, mark) in enumerate(free):
                if stop - start > size:
                    free[place] = (start + size, stop, mark)
                    return self._block(slab, start, size, mark, nbytes, dtype)
                if stop - start == size:
                    del free[place]
                    return self._block(slab, start, size, mark, nbytes, dtype)
        self._grow(size)
        return self.take(nbytes, dtype)

    def _block(self, slab: int, start: int, size: int, mark: int, nbytes: int, dtype: torch.dtype) -> Block:
        row = self._rows[slab].get(dtype)
        if row is None:
            row = self._rows[slab][dtype] = self._slabs[slab].view(dtype)
        width = dtype.itemsize
        return Block(self.returned, slab, start, start + size, mark, row[start // width : (start + nbytes) // width])

    def _merge(self, slab: int, back: Range) -> None:
        free = self._free[slab]
        start, stop, mark = back
        place = bisect_left(free, back)
        if place < len(free) and free[place][0] == stop:
            _, stop, other = free.pop(place)
            mark = max(mark, other)
        if place and free[place - 1][1] == start:
            start, _, other = free[place - 1]
            free[place - 1] = (start, stop, max(mark, other))
        else:
            free.insert(place, (start, stop, mark))

    def _grow(self, size: int) -> None:
        slab = _pin(max(size, min(max(self.nbytes, _LEAST), _MOST)), least=size)
        self._slabs.append(slab)
        self._rows.append({})
        self._free.append([(0, slab.numel(), 0)])


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
