"""Memory through which the chunks of an encoder find their places, and what the launches of a graph share.

The first two words of a workspace are counters, which every launch leaves as it finds them: zero. The others, one for
each block of a grid that looks back, carry the epoch of the launch that wrote them, so nobody has to clear them: no two
launches that use the same words have the same epoch. A launch that was captured has the same one in every replay, so a
graph has workspaces of its own, made inside of it: the op that fills them with zeros is captured, too. After it no word
has the epoch of a launch of this replay that is yet to come, which is all that a launch relies on.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from lowtide.kernels._aside import Aside

SLOTS, _SLOT_NBYTES = 256, 8192  # where chunks that outgrow their stages go on
_COUNTERS = 2
_LAST_EPOCH = (1 << 30) - 1
_STRIDE = 0x9E3779B1  # odd, so that 2**32 replays have different numbers; far apart, by the golden ratio

_Stream = tuple[torch.device, int]


class Workspace:
    """Of one stream, so that no two launches use it at a time."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(1 << 16, dtype=torch.int64, device=device)
        self._spill = torch.empty(SLOTS * _SLOT_NBYTES, dtype=torch.uint8, device=device)
        self._epoch = 0
        self._addresses = self._words.data_ptr(), self._spill.data_ptr()

    def next(self, grid: int) -> tuple[int, int, int]:
        """The addresses of the words and of the slots, and the epoch, for ``grid`` blocks that look back."""
        if grid + _COUNTERS > self._words.numel() or self._epoch == _LAST_EPOCH:
            self._words = torch.zeros(max(2 * grid, self._words.numel()), dtype=torch.int64, device=self._words.device)
            self._epoch = 0
            self._addresses = self._words.data_ptr(), self._spill.data_ptr()
        self._epoch += 1
        return *self._addresses, self._epoch


class Workspaces:
    """One for each stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: dict[_Stream, Workspace] = {}

    def next(self, device: torch.device, stream: int, grid: int) -> tuple[int, int, int]:
        """As ``Workspace.next``, for a launch on ``stream``."""
        with self._lock:
            space = self._spaces.get((device, stream))
            if space is None:
                space = self._spaces[(device, stream)] = Workspace(device)
            return space.next(grid)


class Cell:
    """A number on the device, for the dither: another one in each replay. It outlives the graphs that read it."""

    def __init__(self, device: torch.device) -> None:
        self.number = torch.zeros(1, dtype=torch.int64, device=device)  # the kernels read its lower half

    def advance(self) -> None:
        self.number.add_(_STRIDE)


class Reserve:
    """Words for what the payloads of a graph have no room for, whichever they are."""

    def __init__(self, device: torch.device, words: int) -> None:
        self._words = torch.empty(words, dtype=torch.int32, device=device)
        self.taken = torch.zeros(1, dtype=torch.int64, device=device)
        self.numbers = (self._words.data_ptr(), self.taken.data_ptr(), words)


class Replay(Workspaces):
    """What all encoders of a graph are given; their payloads hand it on to the decoders.

    ``aside``: where kernels run beside the step, if they do. ``begin`` makes room in common for payloads that outgrow
    their own.
    """

    def __init__(self, cell: Cell, aside: Aside | None = None) -> None:
        super().__init__()
        self._cell = cell
        self.aside = aside
        self._reserve: Reserve | None = None
        # Addresses of the words and of the counter of those that are taken, and how many there are.
        self.reserve = (0, 0, 0)

    def begin(self, words: int) -> None:
        """At the beginning of a replay, and of the capture: nothing of the reserve is taken."""
        if not words:
            return
        if self._reserve is None:
            self._reserve = Reserve(self._cell.number.device, words)
            self.reserve = self._reserve.numbers
        self._reserve.taken.zero_()

    @property
    def number(self) -> Tensor:
        return self._cell.number

    @property
    def number_at(self) -> int:
        return self.number.data_ptr()


EAGER = Workspaces()
