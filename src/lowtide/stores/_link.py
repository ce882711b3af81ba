"""Copies between a device and pinned host memory that run beside the device's own work.

Three things can go wrong with a copy on a stream of its own, and an event prevents each. It may start before its source
is written: the copying stream waits for the stream at work. Its source or its target may be let go and handed out again
while it runs: ``Flight.end`` makes the stream that the memory belongs to wait first. Its target may be read before it
is written: ``Flight.use`` makes the stream that reads wait. The host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Flight(Protocol):
    """Buffers on the device that a copy reads or writes."""

    def use(self) -> Sequence[Tensor]:
        """The buffers, for work that is queued from now on."""
        ...

    def end(self) -> None:
        """Let the buffers go: their memory is used again only after the copy."""
        ...


class Link(Protocol):
    """The way between one device and the host. What crosses it are buffers: rows of bytes."""

    def send(self, buffers: Sequence[Tensor]) -> tuple[Sequence[Tensor], Flight]:
        """Begin to copy to the host; the copies, and the flight that holds the originals."""
        ...

    def bring(self, copies: Sequence[Tensor], sent: Flight) -> Flight:
        """Begin to copy back what ``sent`` took to the host; the flight holds the new buffers."""
        ...


class CudaFlight:
    """``stream`` is the one that the buffers' memory belongs to, ``done`` is recorded behind the copy."""

    __slots__ = ("_arrives", "_buffers", "_stream", "done")

    def __init__(self, buffers: Sequence[Tensor], stream: torch.cuda.Stream, done: torch.cuda.Event, arrives: bool):
        self._buffers, self._stream, self._arrives = buffers, stream, arrives
        self.done = done

    def use(self) -> Sequence[Tensor]:
        stream = torch.cuda.current_stream(self._stream.device)
        is_foreign = stream != self._stream
        if self._arrives or is_foreign:
            stream.wait_event(self.done)
        if is_foreign:
            for buffer in self._buffers:
                buffer.record_stream(stream)
        return self._buffers

    def end(self) -> None:
        if not self.done.query():
            self._stream.wait_event(self.done)
        self._buffers = ()


@dataclass(slots=True)
class CudaLink:
    """Two streams, one for each direction: the two ways of the link are independent."""

    device: torch.device
    _out: torch.cuda.Stream
    _back: torch.cuda.Stream

    @classmethod
    def to(cls, device: torch.device) -> CudaLink:
        return cls(device, torch.cuda.Stream(device), torch.cuda.Stream(device))

    def send(self, buffers: Sequence[Tensor]) -> tuple[Sequence[Tensor], CudaFlight]:
        stream = torch.cuda.current_stream(self.device)
        copies = [torch.empty(buffer.numel(), dtype=torch.uint8, pin_memory=True) for buffer in buffers]
        self._out.wait_stream(stream)
        return copies, CudaFlight(buffers, stream, _copy(buffers, copies, self._out), arrives=False)

    def bring(self, copies: Sequence[Tensor], sent: Flight) -> CudaFlight:
        assert isinstance(sent, CudaFlight), "what a link brings back, it has sent"
        stream = torch.cuda.current_stream(self.device)
        buffers = [torch.empty(copy.numel(), dtype=torch.uint8, device=self.device) for copy in copies]
        self._back.wait_stream(stream)  # which may still be at work on what this memory held before
        self._back.wait_event(sent.done)
        return CudaFlight(buffers, stream, _copy(copies, buffers, self._back), arrives=True)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Torch notes by itself which stream reads or writes pinned memory, and does not hand it out again before."""
    with torch.cuda.stream(stream):
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        return stream.record_event()
