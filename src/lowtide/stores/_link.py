"""Copies between a device and pinned host memory that run beside the device's own work.

Four things can go wrong with a copy on a stream of its own, and an event prevents each. It may start before its source
is written: the copying stream waits for the stream that writes it. Its source or its target on the device may be let go
and handed out again while it runs: ``Flight.end`` makes the stream that the memory belongs to wait first. Its target
may be read before it is written: ``Flight.use`` makes the stream that reads wait. Its target on the host may still be
read by an earlier copy: it waits for that one. The host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.stores._arena import Arena, Block

_EVENTS = 128  # of a way; more copies than that are rarely under way


class Flight(Protocol):
    """Buffers on the device, which a copy may be reading or writing."""

    def use(self) -> Sequence[Tensor]:
        """The buffers, for work that is queued from now on."""
        ...

    def end(self) -> None:
        """Let the buffers go: their memory is used again only after the copy."""
        ...


class Link(Protocol):
    """The way between one device and the host. What crosses it are buffers: rows of numbers."""

    def stay(self, buffers: Sequence[Tensor]) -> Flight:
        """Buffers that were made on the current stream and stay where they are, for now."""
        ...

    def send(self, flight: Flight) -> Any:
        """Begin to copy to the host what has stayed so far; the copies, which are gone when they are dropped."""
        ...

    def bring(self, copies: Any) -> Flight:
        """Begin to copy back; the flight holds new buffers, which belong to the current stream."""
        ...


class Way:
    """One direction: a stream of copies, each with a number, its mark.

    Events are used in turn. One that has been used again stands for a later copy of the same stream: who waits for it
    waits for the earlier one, too.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._events = [torch.cuda.Event() for _ in range(_EVENTS)]
        self._last = self._passed = 0

    def mark(self) -> int:
        """A number for the copies queued so far."""
        mark = self._last = self._last + 1
        self._events[mark % _EVENTS].record(self.stream)
        return mark

    def has_passed(self, mark: int) -> bool:
        if mark > self._passed and self._events[mark % _EVENTS].query():
            self._passed = mark
        return mark <= self._passed

    def hold_up(self, stream: torch.cuda.Stream, mark: int) -> None:
        """What is queued on ``stream`` from now on waits for the copies up to ``mark``."""
        if mark > self._passed:
            self._events[mark % _EVENTS].wait(stream)


class CudaFlight:
    """``stream`` is the one that the buffers' memory belongs to. It has yet to wait for the copy that ends at ``mark``
    of ``way``, if there is one, before the memory is let go; if it ``arrives``, also before it is read."""

    __slots__ = ("_link", "arrives", "buffers", "mark", "stream", "way")

    def __init__(self, link: CudaLink, buffers: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        self._link, self.buffers, self.stream = link, buffers, stream
        self.way: Way | None = None
        self.mark = 0
        self.arrives = False

    def use(self) -> Sequence[Tensor]:
        stream = self._link.current()
        if stream is not self.stream:
            self._lend_to(stream)
        elif self.arrives and self.way is not None:
            self.way.hold_up(stream, self.mark)
            self.way = None
        return self.buffers

    def _lend_to(self, stream: torch.cuda.Stream) -> None:
        """Another stream reads them: it waits for what has written them, and their memory for it."""
        stream.wait_stream(self.stream)
        if self.arrives and self.way is not None:
            self.way.hold_up(stream, self.mark)
        for buffer in self.buffers:
            buffer.record_stream(stream)

    def end(self) -> None:
        if self.way is not None and not self.way.has_passed(self.mark):
            self.way.hold_up(self.stream, self.mark)
        self.way = None
        self.buffers = ()


class CudaCopies:
    """Copies on the host: written by the copy ``sent``, their memory given back with the mark of the last that reads.

    The next copy to write there goes out behind ``sent`` in any case.
    """

    __slots__ = ("blocks", "rows", "sent")

    def __init__(self, blocks: Sequence[Block], rows: Sequence[Tensor], sent: int) -> None:
        self.blocks, self.rows, self.sent = blocks, rows, sent


class CudaLink:
    """Two ways, one for each direction: they are independent."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self.out, self.back = Way(device), Way(device)
        self.arena = Arena()
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._now = torch.cuda.Event()  # waited for as soon as it is recorded, so that one is enough

    def current(self) -> torch.cuda.Stream:
        """The stream at work: the same object for the same stream."""
        raw = torch._C._cuda_getCurrentRawStream(self._index)
        try:
            return self._streams[raw]
        except KeyError:
            return self._streams.setdefault(raw, torch.cuda.current_stream(self._index))

    def stay(self, buffers: Sequence[Tensor]) -> CudaFlight:
        return CudaFlight(self, buffers, self.current())

    def send(self, flight: Flight) -> CudaCopies:
        assert isinstance(flight, CudaFlight) and flight.way is None, "what has stayed so far"
        buffers = flight.buffers  # held here: the payload may die meanwhile
        blocks, rows, last = [], [], 0
        for buffer in buffers:
            block = self.arena.take(buffer.nbytes, buffer.dtype)
            blocks.append(block)
            rows.append(block.memory)
            if block.mark > last:
                last = block.mark
        out = self.out
        self._follow(out, flight.stream)
        self.back.hold_up(out.stream, last)
        mark = flight.mark = self._copy(out, buffers, rows)
        flight.way = out
        return CudaCopies(blocks, rows, mark)

    def bring(self, copies: CudaCopies) -> CudaFlight:
        stream, rows = self.current(), copies.rows
        buffers = [torch.empty(row.numel(), dtype=row.dtype, device=self.device) for row in rows]
        self._follow(self.back, stream)  # which may still be at work on what this memory held before
        self.out.hold_up(self.back.stream, copies.sent)
        flight = CudaFlight(self, buffers, stream)
        flight.mark = self._copy(self.back, rows, buffers)
        flight.way, flight.arrives = self.back, True
        for block in copies.blocks:
            block.mark = flight.mark
        return flight

    def _follow(self, way: Way, stream: torch.cuda.Stream) -> None:
        """What is queued on ``way`` from now on waits for what has been queued on ``stream``."""
        self._now.record(stream)
        self._now.wait(way.stream)

    @staticmethod
    def _copy(way: Way, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> int:
        with way.stream:  # and on its device; afterwards both are what they were
            for source, target in zip(sources, targets, strict=True):
                target.copy_(source, non_blocking=True)
        return way.mark()
