"""Streams, events and memory of a GPU, simulated: whatever order the device may run things in, it may run them here.

Work is queued on streams and knows nothing but addresses. It runs some time later, in an order drawn at random among
those that events allow. Memory of the device that is let go is handed out again at once, as torch's allocator does for
the stream that it belongs to. So a wait that is missing shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("cuda", 0)


class Stream:
    """A queue of work; ``is_ready`` of the first says whether it may run."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self.before: list[Stream] = []
        self.raw = machine.add(self)

    def put(self, work: Callable[[], None], is_ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((is_ready, work))

    def __enter__(self) -> None:
        self.before.append(self.machine.current)
        self.machine.switch_to(self)

    def __exit__(self, *_: object) -> None:
        self.machine.switch_to(self.before.pop())

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.machine)
        event.record(other)
        event.wait(self)


class Event:
    """Stands for the place on a stream where it was recorded last."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._recorded = 0
        self._reached = {0}  # a set, because it may be recorded on one stream after the other
        machine.calls["events made"] += 1

    def record(self, stream: Stream) -> None:
        self._machine.calls["events recorded"] += 1
        self._recorded += 1
        recorded = self._recorded
        stream.put(lambda: self._reached.add(recorded))

    def wait(self, stream: Stream) -> None:
        self._machine.calls["events waited for"] += 1
        recorded = self._recorded
        stream.put(lambda: None, lambda: recorded in self._reached)

    def query(self) -> bool:
        self._machine.calls["events asked"] += 1
        self._machine.go_on()
        return self._recorded in self._reached


class Machine(TorchFunctionMode):
    """The device: its streams, some much slower than others, its memory, and what torch is asked for."""

    def __init__(self, seed: int = 0, nbytes: int = 1 << 16) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.streams: list[Stream] = []
        self.calls: Counter[str] = Counter()
        self.main = self.current = Stream(self)
        self._speeds: dict[int, float] = {}
        self._lag = self._random.choice((0.2, 0.9, 1.0))  # how likely the device does nothing more for now
        self._memory = (ctypes.c_char * nbytes)()
        self._free: dict[tuple[int, int], list[int]] = {}  # by size and stream: where
        self._lent: list[Tensor] = []
        self._end = 0

    def switch_to(self, stream: Stream) -> None:
        self.calls["streams set"] += 1
        self.current = stream

    def add(self, stream: Stream) -> int:
        self.streams.append(stream)
        return len(self.streams)

    def go_on(self, turns: int = 4) -> None:
        """Run some of what may run; everything, if ``turns`` is negative."""
        while turns:
            ready = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
            if not ready or (turns > 0 and self._random.random() < self._lag):
                break
            speeds = [self._speeds.setdefault(stream.raw, 10 ** self._random.uniform(-3, 0)) for stream in ready]
            self._random.choices(ready, speeds)[0].queue.popleft()[1]()
            turns -= 1

    def finish(self) -> None:
        self.go_on(-1)
        assert not any(stream.queue for stream in self.streams), "the device is stuck"

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the device: what was let go last, if it has the size and belongs to the stream at work."""
        size = numel * dtype.itemsize
        free = self._free.setdefault((size, self.current.raw), [])
        if free:
            start = free.pop()
        else:
            start, self._end = self._end, self._end + size
        room = (ctypes.c_char * size).from_buffer(self._memory, start)
        with torch._C.DisableTorchFunction():
            tensor = torch.frombuffer(room, dtype=dtype)
            weakref.finalize(tensor.untyped_storage(), free.append, start).atexit = False
        return tensor

    def write(self, tensor: Tensor, byte: int) -> None:
        at, size = _extent(tensor)
        self.current.put(lambda: ctypes.memset(at, byte, size) and None)
        self.go_on()

    def read(self, tensor: Tensor, into: list[bytes]) -> None:
        at, size = _extent(tensor)
        self.current.put(lambda: into.append(ctypes.string_at(at, size)))
        self.go_on()

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        """Its memory comes back when that stream is done with it: later than any test."""
        self.calls["record_stream"] += 1
        self._lent.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "copy_":
            self.calls["copies"] += 1
            target, source = args
            (to, _), (at, size) = _extent(target), _extent(source)
            self.current.put(lambda: ctypes.memmove(to, at, size) and None)
            self.go_on()
            return target
        if name == "empty" and kwargs.get("pin_memory"):
            self.calls["pinned rooms"] += 1
            return func(*args, dtype=kwargs["dtype"])
        if name == "empty" and kwargs.get("device") == DEVICE:
            self.calls["torch calls"] += 1
            return self.allocate(args[0], kwargs["dtype"])
        if name != "__get__":
            self.calls["torch calls"] += 1
        return func(*args, **kwargs)


def _extent(tensor: Tensor) -> tuple[int, int]:
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr(), tensor.nbytes


@contextmanager
def installed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Torch believes that the machine is its device."""

    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(machine))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(machine))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: machine.current)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: machine.lend(tensor, stream))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: machine.current.raw, raising=False)
    with machine:
        yield machine
