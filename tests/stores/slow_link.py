"""A device on the CPU whose copies happen as late as they may, so that what a race would do is done every time.

On a GPU a copy on a stream of its own runs at some time between its start and the moment somebody waits for it, and
knows nothing but addresses. Here it is run when somebody waits for it, or at a moment drawn at random; until then it
knows its buffers by weak references only. A source that was let go too early is gone when the copy looks for it, a
target that is read too early is full of rubbish.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class SlowFlight:
    """Buffers "on the device", which a copy may be reading or writing."""

    def __init__(self, link: SlowLink, buffers: Sequence[Tensor]) -> None:
        self._link, self.buffers = link, buffers
        self.way: Way | None = None
        self.place, self.arrives = 0, False

    def use(self) -> Sequence[Tensor]:
        assert len(self.buffers), "used after its end"
        if self.arrives and self.way is not None:
            self.way.run_until(self.place)
        return self.buffers

    def end(self) -> None:
        if self.way is not None:
            if self.way.is_late(self.place):
                self._link.stalls += 1
            self.way.run_until(self.place)
        self.buffers = ()


class SlowCopies:
    """Copies "on the host"; ``place`` is that of the copy that writes them."""

    def __init__(self, rows: Sequence[Tensor], way: Way, place: int) -> None:
        self.rows, self.way, self.place = rows, way, place


class Way:
    """Copies in one direction, in their order."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._started = 0

    def start(self, copy: Callable[[], None]) -> int:
        """Queue a copy; its place in the queue."""
        self._waiting.append(copy)
        self._started += 1
        return self._started

    def is_late(self, place: int) -> bool:
        return place > self._started - len(self._waiting)

    def run_until(self, place: int) -> None:
        while self.is_late(place):
            self._waiting.popleft()()

    def run_one(self) -> None:
        if self._waiting:
            self._waiting.popleft()()


class SlowLink:
    """Counts what crosses; ``races`` lists what would have been a race on a device."""

    def __init__(self, seed: int | None = None) -> None:
        self._out, self._back = Way(), Way()
        self._random = random.Random(seed) if seed is not None else None
        self.races: list[str] = []
        self.sent = self.brought = self.stalls = 0

    def stay(self, buffers: Sequence[Tensor]) -> SlowFlight:
        return SlowFlight(self, tuple(buffers))

    def send(self, flight: SlowFlight) -> SlowCopies:
        self._happen()
        rows = [_unwritten(buffer) for buffer in flight.buffers]
        self.sent += sum(buffer.nbytes for buffer in flight.buffers)
        flight.way, flight.place = self._out, self._start(self._out, flight.buffers, rows, None)
        return SlowCopies(rows, self._out, flight.place)

    def bring(self, copies: SlowCopies) -> SlowFlight:
        self._happen()
        flight = SlowFlight(self, [_unwritten(row) for row in copies.rows])
        self.brought += sum(buffer.nbytes for buffer in flight.buffers)
        flight.way, flight.place = self._back, self._start(self._back, copies.rows, flight.buffers, copies)
        flight.arrives = True
        return flight

    def _start(self, way: Way, sources: Sequence[Tensor], targets: Sequence[Tensor], after: SlowCopies | None) -> int:
        pairs = [(_ref(source), _ref(target)) for source, target in zip(sources, targets, strict=True)]
        # As torch's allocator of pinned memory does: copies on the host outlive what runs on them.
        pinned = list(targets if after is None else sources)

        def copy() -> None:
            if after is not None:
                after.way.run_until(after.place)
            for source, target in pairs:
                read, write = source(), target()
                if read is None or write is None:
                    self.races.append(f"{'source' if read is None else 'target'} of a copy was let go before it ran")
                else:
                    write.copy_(read)
            pinned.clear()

        return way.start(copy)

    def _happen(self) -> None:
        """Some copies may be through by now."""
        if self._random is not None:
            for way in (self._out, self._back):
                for _ in range(self._random.randrange(3)):
                    way.run_one()


def _unwritten(buffer: Tensor) -> Tensor:
    """Memory full of what nobody wrote."""
    return torch.full((buffer.nbytes,), 0xA5, dtype=torch.uint8).view(buffer.dtype)


def _ref(buffer: Tensor) -> Callable[[], Tensor | None]:
    """A way to a buffer that does not keep it, as an address does not."""
    storage = weakref.ref(buffer.untyped_storage())

    def find() -> Tensor | None:
        alive = storage()
        return torch.empty(0, dtype=torch.uint8).set_(alive) if alive is not None else None

    return find
