"""The device as a captured step needs it: a stream for what is not a replay, graphs, random numbers, memory.

A graph's pool is memory that torch's allocator hands out only while that graph, or one that shares its pool, is
captured. To give it back and ask the driver for it again takes time, so a graph takes over the pool of the one before
it. Torch's rules for that: a graph of the pool is still there when the capture begins; what must outlive the
capture is held as a tensor, since whatever is free in the pool may be used again; and the old graph, which would write
to it, is never replayed after that.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from lowtide.errors import GraphError
from lowtide.kernels._aside import Aside, Stream
from lowtide.payloads import in_use


class Graph(Protocol):
    """Work that has been captured; ``nbytes`` are those of its pool."""

    @property
    def nbytes(self) -> int: ...

    def replay(self) -> None: ...


class Machine(Protocol):
    """What ``Cuda`` does; another one stands in for it where there is no GPU."""

    def eager(self) -> contextlib.AbstractContextManager[None]: ...

    @property
    def generator(self) -> torch.Generator: ...

    def aside(self) -> Aside: ...

    def capture(
        self, body: Callable[[], Any], before: Graph | None, generators: Sequence[torch.Generator] = ()
    ) -> tuple[Graph, Any]: ...

    def random(self) -> int: ...

    def set_random(self, offset: int) -> None: ...

    def has_room_beside(self, graph: Graph) -> bool: ...

    def can_hand_on(self, graph: Graph) -> bool: ...

    def wait(self) -> None: ...


_SCATTERED = 1.25  # times its first size: a pool that has grown so much has gaps that no new tensor fits
_SPARE = 0.25  # of a pool, to be free on the device: what it may grow by while nothing else can be given back


class CudaGraph:
    """A graph and the bytes of its pool, which nobody else can use while it lives."""

    def __init__(self, device: torch.device, before: CudaGraph | None = None) -> None:
        """In the pool of ``before``, which must live until this one has been recorded."""
        self._graph = torch.cuda.CUDAGraph()
        self._device = device
        self._pool: Any = before._pool if before is not None else torch.cuda.graph_pool_handle()
        self.nbytes: int = before.nbytes if before is not None else 0
        self._first: int = before._first if before is not None else 0  # its bytes after the first capture

    @property
    def is_scattered(self) -> bool:
        return self.nbytes > _SCATTERED * self._first

    def replay(self) -> None:
        self._graph.replay()

    def record(self, body: Callable[[], Any], generators: Sequence[torch.Generator] = ()) -> Any:
        """On the current stream. Does without what ``torch.cuda.graph`` does before: to wait, and to empty caches."""
        reserved = torch.cuda.memory_reserved(self._device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later versions of torch find them by themselves, and say so
            for generator in generators:
                self._graph.register_generator_state(generator)
        with _no_collection():
            # Other threads (data loaders that pin memory) go on doing what only this one must not do.
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = body()
            finally:
                self._end()
        self.nbytes += max(torch.cuda.memory_reserved(self._device) - reserved, 0)
        self._first = self._first or self.nbytes
        return result

    def _end(self) -> None:
        """Whatever has happened: the stream and the allocator must not stay as they are within a capture."""
        try:
            self._graph.capture_end()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Where CUDA has given up a capture, torch leaves its allocator and its generator in it: let go of both."""
        with contextlib.suppress(RuntimeError):
            self._graph.pool()  # refused unless torch has come so far that it does all this itself
            return
        for let_go in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                let_go(self._device.index, self._pool)
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers to come, from a state outside of it


def _refusal(error: BaseException) -> GraphError:
    """What is raised instead of ``error``: it tells where that came from, but keeps nothing of it.

    A traceback has the functions that ran, and they have the step's tensors: nodes of autograd would stay that belong
    to the stream of the capture.
    """
    text = str(error)
    if not isinstance(error, GraphError):
        text = (
            f"the step could not be captured in a CUDA graph: {text}. Inside of it nothing may wait for the device (no "
            ".item(), .cpu(), print of a tensor), and only pinned memory of the host can be copied"
        )
    refusal = GraphError(text)
    refusal.add_note("".join(traceback.format_exception(error)))
    return refusal


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that is found during a capture may hold events, memory and graphs, which nobody may touch then."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Cuda:
    """One GPU. Eager steps run on the stream that captures, so that all that libraries keep for a stream is there."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._stream = torch.cuda.Stream(self._device)
        self._generator = torch.cuda.default_generators[self._device.index]

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def aside(self) -> Aside:
        """A stream for what runs beside the step in its graph."""
        return Stream(self._device)

    @property
    def generator(self) -> torch.Generator:
        return self._generator

    def capture(
        self, body: Callable[[], Any], before: Graph | None, generators: Sequence[torch.Generator] = ()
    ) -> tuple[CudaGraph, Any]:
        """The graph of what ``body`` launches, and what it returns; nothing of it has run.

        It takes over the pool of ``before``, which is not replayed any more, and may draw from ``generators`` beside
        the device's own.
        """
        assert before is None or isinstance(before, CudaGraph)
        if before is None or self._free() < _SPARE * before.nbytes:
            torch.cuda.empty_cache()  # as long as a graph is captured, torch gives nothing back
        graph, failed = CudaGraph(self._device, before), None

        def run() -> Any:
            nonlocal failed
            try:
                return body()
            except Exception as error:
                failed = _refusal(error)
                raise

        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                result = graph.record(run, generators)
            current.wait_stream(self._stream)  # seeds and offsets, which it has set, are set again by a replay
            return graph, result
        except Exception as error:
            failed = failed or _refusal(error)
        try:
            raise failed
        finally:
            del failed, graph, before  # the error has this frame in its traceback

    def random(self) -> int:
        """Where the generator stands, which a replay moves on as an eager step does."""
        return int(self._generator.get_offset())

    def set_random(self, offset: int) -> None:
        self._generator.set_offset(offset)

    def has_room_beside(self, graph: Graph) -> bool:
        """Whether an eager step can run while the graph's pool is there: it takes about as much once more."""
        assert isinstance(graph, CudaGraph)
        used, limit = in_use(self._device)
        return used + 2.25 * graph.nbytes < limit

    def _free(self) -> float:
        """Bytes that torch can still get from the driver."""
        _, limit = in_use(self._device)
        return min(torch.cuda.mem_get_info(self._device)[0], limit - torch.cuda.memory_reserved(self._device))

    def can_hand_on(self, graph: Graph) -> bool:
        """Whether to keep a graph that is not replayed any more until the next one can have its pool."""
        assert isinstance(graph, CudaGraph)
        return not graph.is_scattered and self.has_room_beside(graph)

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
