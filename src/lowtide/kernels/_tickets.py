"""Numbers that the device tells the host when it gets to them: words of pinned memory, -1 until they are written.

A kernel that cannot know beforehand how much it will write, or whether its input fits its format, ends by storing the
answer in its ticket's word. Reading it costs the host a load, never a wait.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowtide.errors import LowtideError

_WORDS = 4096
_PATIENCE = 1 << 16  # looks at a word, some seconds in all, before the device itself is asked
_BRISK = 1 << 11  # of them, in the first milliseconds, that only yield: a sleep, of whatever length, ends 50 us late

# To whatever else can run now: time.sleep(0) is a sleep.
_yield: Callable[[], Any] = getattr(os, "sched_yield", partial(time.sleep, 0))


class Ticket:
    """One word; ``word`` is its tensor, for a kernel to write. Goes back to its ring when it is dropped."""

    __slots__ = ("_at", "_cell", "_ring", "_values", "word")

    def __init__(self, ring: Ring, cell: int) -> None:
        self._ring, self._cell = ring, cell
        self._values, self._at = ring.values[cell // _WORDS], cell % _WORDS
        self.word: Tensor = ring.words[cell]
        self._values[self._at] = -1

    def __del__(self) -> None:
        # A kernel may still be on its way to write here: only a word that has been written is used again.
        if self._values[self._at] != -1:
            self._ring.free.append(self._cell)
        else:
            self._ring.late.append(self._cell)

    @property
    def status(self) -> int:
        """What the device wrote, or -1."""
        return self._values[self._at]

    def reset(self) -> None:
        """Use the word again; the last kernel that was to write it must have done so."""
        self._values[self._at] = -1

    def wait(self) -> int:
        """What the device wrote, once it has: yields the processor while it waits."""
        for turn in range(_PATIENCE):
            if self._values[self._at] != -1:
                return self.status
            if turn < _BRISK:
                _yield()
            else:
                time.sleep(2e-5)
        torch.cuda.synchronize()  # raises what has gone wrong on the device
        if self._values[self._at] == -1:
            raise LowtideError("an encoder has ended without saying how much room it needed")
        return self.status


class Ring:
    """All the words of a process."""

    def __init__(self, words: int = _WORDS) -> None:
        self._lock = threading.Lock()
        self._buffers: list[Tensor] = []
        self.words: list[Tensor] = []
        # The words as the host reads them: a plain load of memory, with no tensor in between.
        self.values: list[ctypes.Array[ctypes.c_longlong]] = []
        self.free: list[int] = []
        self.late: list[int] = []
        self._grow(words)

    def take(self) -> Ticket:
        with self._lock:
            if not self.free:
                self._reclaim()
            if not self.free:
                self._grow(_WORDS)
            return Ticket(self, self.free.pop())

    def reserve(self, words: int) -> None:
        with self._lock:
            while len(self.free) < words:
                self._grow(_WORDS)

    def _reclaim(self) -> None:
        late, self.late = self.late, []
        for cell in late:
            written = self.values[cell // _WORDS][cell % _WORDS] != -1
            (self.free if written else self.late).append(cell)

    def _grow(self, words: int) -> None:
        buffer = torch.full((words,), -1, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        first = len(self.words)
        self._buffers.append(buffer)
        self.words.extend(buffer.unfold(0, 1, 1).unbind(0))
        self.values.append((ctypes.c_longlong * words).from_address(buffer.data_ptr()))
        self.free.extend(range(first, first + words))


_RINGS: dict[str, Ring] = {}


def take() -> Ticket:
    """A word that is free."""
    return _ring().take()


def reserve(words: int) -> None:
    """Have so many words free, for a time when no memory can be pinned."""
    _ring().reserve(words)


def _ring() -> Ring:
    ring = _RINGS.get("")
    return ring if ring is not None else _RINGS.setdefault("", Ring())
