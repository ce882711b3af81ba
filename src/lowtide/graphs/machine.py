"""The device as a captured step needs it: a stream for what is not a replay, graphs, random numbers, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lowtide.errors import GraphError
from lowtide.payloads import in_use


class Graph(Protocol):
    """Work that has been captured; ``nbytes`` are those of its pool."""

    @property
    def nbytes(self) -> int: ...

    def replay(self) -> None: ...


class Machine(Protocol):
    """What ``Cuda`` does; another one stands in for it where there is no GPU."""

    def eager(self) -> contextlib.AbstractContextManager[None]: ...

    def capture(self, body: Callable[[], Any]) -> tuple[Graph, Any]: ...

    def random(self) -> int: ...

    def set_random(self, offset: int) -> None: ...

    def has_room_beside(self, graph: Graph) -> bool: ...

    def wait(self) -> None: ...


class CudaGraph:
    """A graph and the bytes of its pool, which nobody else can use while it lives."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self.nbytes = 0

    def replay(self) -> None:
        self._graph.replay()

    def record(self, body: Callable[[], Any], stream: torch.cuda.Stream) -> Any:
        # Other threads (data loaders that pin memory) go on doing what only this one must not do.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(stream.device)
            result = body()
        self.nbytes = max(torch.cuda.memory_reserved(stream.device) - before, 0)
        return result


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

    def capture(self, body: Callable[[], Any]) -> tuple[CudaGraph, Any]:
        """The graph of what ``body`` launches, and what it returns; nothing of it has run."""
        graph, cause = CudaGraph(), None

        def run() -> Any:
            nonlocal cause
            try:
                return body()
            except BaseException as error:
                cause = error
                raise

        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                return graph, graph.record(run, self._stream)
        except Exception as error:
            if isinstance(cause, GraphError):
                raise cause from None
            raise GraphError(
                f"the step could not be captured in a CUDA graph: {cause or error}. Inside of it nothing may wait for "
                "the device (no .item(), .cpu(), print of a tensor), and only pinned memory of the host can be copied"
            ) from (cause or error)

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

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
