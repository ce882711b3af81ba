"""Captures on a GPU that is a stand-in: how they begin and end, whatever happens in between, and in whose memory."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lowtide.errors import GraphError
from lowtide.graphs import machine as machine_module
from lowtide.graphs.machine import Cuda, CudaGraph

DEVICE = torch.device("cuda", 0)


class Driver:
    """Takes down what is asked of torch. ``grows`` are the bytes that pools grow by, capture by capture."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.waits: list[tuple[Any, Any]] = []  # a stream, and the one that it waits for
        self.reserved, self.free, self.pools = 0, 1 << 40, 0
        self.grows: list[int] = []
        self.fails_to_end: str | None = None  # "in CUDA", or "in torch", which has come far enough to clean up itself

    def new_pool(self) -> tuple[int, int]:
        self.pools += 1
        return 0, self.pools

    def empty_cache(self) -> None:
        self.log.append("empty")


class FakeCudaGraph:
    driver: Driver

    def __init__(self) -> None:
        self.has_ended = False

    def register_generator_state(self, generator: str) -> None:
        warnings.warn("it is deprecated, and a no-op", DeprecationWarning, stacklevel=2)
        self.driver.log.append(("draws from", generator))

    def capture_begin(self, *, pool: tuple[int, int], capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.driver.log.append(("begin", pool, gc.isenabled()))
        self._pool = pool

    def capture_end(self) -> None:
        self.driver.log.append("end")
        self.has_ended = self.driver.fails_to_end != "in CUDA"
        if self.driver.fails_to_end is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.driver.reserved += self.driver.grows.pop(0)

    def pool(self) -> tuple[int, int]:
        if not self.has_ended:
            raise RuntimeError("pool() without a preceding successful capture")
        return self._pool


class FakeGenerator:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def clone_state(self) -> str:
        return "as new"

    def graphsafe_set_state(self, state: str) -> None:
        self._driver.log.append(("generator", state))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    stream = SimpleNamespace(wait_stream=lambda other: driver.waits.append((stream, other)))
    current = SimpleNamespace(wait_stream=lambda other: driver.waits.append((current, other)))
    stand_ins = {
        "CUDAGraph": FakeCudaGraph, "graph_pool_handle": driver.new_pool, "empty_cache": driver.empty_cache,
        "memory_reserved": lambda device: driver.reserved, "mem_get_info": lambda device: (driver.free, 0),
        "Stream": lambda device: stream, "current_stream": lambda device: current,
        "stream": lambda stream: contextlib.nullcontext(), "default_generators": [FakeGenerator(driver)],
    }  # fmt: skip
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(FakeCudaGraph, "driver", driver, raising=False)
    monkeypatch.setattr(machine_module, "in_use", lambda device: (0, float(1 << 40)))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(
            torch._C, name, lambda *args, name=name: driver.log.append((name.removeprefix("_cuda_"), *args)),
            raising=False,
        )  # fmt: skip
    return driver


def test_the_first_capture_makes_a_pool_and_the_next_one_takes_it_over(driver):
    machine, driver.grows = Cuda(DEVICE), [1000, 50]
    first, result = machine.capture(lambda: "loss", None)
    assert result == "loss" and first.nbytes == 1000
    assert driver.log == ["empty", ("begin", (0, 1), False), "end"]
    driver.log.clear()
    second, _ = machine.capture(lambda: None, first)
    assert driver.log == [("begin", (0, 1), False), "end"], "no memory is asked of the driver again"
    assert second.nbytes == 1050, "of the whole pool"


def test_a_graph_is_told_what_it_draws_from_before_its_capture_begins(driver):
    machine, driver.grows = Cuda(DEVICE), [0]
    assert machine.generator is torch.cuda.default_generators[0]
    machine.capture(lambda: driver.log.append("runs"), None, ["one", "two"])
    assert driver.log == [
        "empty",
        ("draws from", "one"),
        ("draws from", "two"),
        ("begin", (0, 1), False),
        "runs",
        "end",
    ]


def test_a_replay_comes_after_what_the_capture_has_set(driver):
    """Torch sets the seeds of a graph's generators on the stream of the capture, and again where it is replayed."""
    machine, driver.grows = Cuda(DEVICE), [0]
    machine.capture(lambda: driver.waits.append("capture"), None)
    (before, after), current = (driver.waits[0], driver.waits[2]), torch.cuda.current_stream(DEVICE)
    assert driver.waits[1] == "capture" and len(driver.waits) == 3
    assert before == (machine._stream, current) and after == (current, machine._stream)


def test_caches_are_emptied_where_the_pool_may_not_be_able_to_grow(driver):
    machine, driver.grows = Cuda(DEVICE), [1000, 0, 0]
    first, _ = machine.capture(lambda: None, None)
    driver.free = 249
    machine.capture(lambda: None, first)
    assert driver.log.count("empty") == 2
    driver.free, driver.reserved = 1 << 40, (1 << 40) - 100
    machine.capture(lambda: None, first)
    assert driver.log.count("empty") == 3, "the share of the device that this process may use counts as well"


def test_a_pool_that_has_grown_too_much_is_not_handed_on(driver):
    machine, driver.grows = Cuda(DEVICE), [1000, 200, 100]
    graph, _ = machine.capture(lambda: None, None)
    for is_good in (True, True, False):
        assert machine.can_hand_on(graph) is is_good
        if is_good:
            graph, _ = machine.capture(lambda: None, graph)
    assert machine.has_room_beside(graph)


def test_nor_is_one_beside_which_there_is_no_room(driver, monkeypatch: pytest.MonkeyPatch):
    machine, driver.grows = Cuda(DEVICE), [1000]
    graph, _ = machine.capture(lambda: None, None)
    monkeypatch.setattr(machine_module, "in_use", lambda device: (100, 2300.0))
    assert not machine.can_hand_on(graph)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_during_a_capture(driver, was_enabled):
    machine, driver.grows = Cuda(DEVICE), [0]
    (gc.enable if was_enabled else gc.disable)()
    try:
        assert machine.capture(gc.isenabled, None)[1] is False
        assert gc.isenabled() is was_enabled
        with pytest.raises(GraphError, match="could not be captured"):
            machine.capture(lambda: 1 / 0, None)
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_a_step_that_fails_ends_its_capture(driver):
    machine, driver.grows = Cuda(DEVICE), [0, 0]
    with pytest.raises(GraphError, match=r"could not be captured in a CUDA graph: division by zero. Inside of it"):
        machine.capture(lambda: 1 / 0, None)
    assert driver.log == ["empty", ("begin", (0, 1), False), "end"]

    def refuse() -> None:
        raise GraphError("no such codec")

    with pytest.raises(GraphError) as caught:
        machine.capture(refuse, None)
    assert str(caught.value) == "no such codec"


@pytest.mark.parametrize("where", ["in CUDA", "in torch"])
def test_a_capture_that_cannot_be_ended_is_given_up(driver, where):
    """CUDA refuses to end a capture in which something waited; torch's allocator and generator would stay in it."""
    machine, driver.fails_to_end = Cuda(DEVICE), where
    with pytest.raises(GraphError, match="division by zero"):
        machine.capture(lambda: 1 / 0, None)
    pool = [("endAllocateToPool", 0, (0, 1)), ("releasePool", 0, (0, 1))]
    let_go = [*pool, ("generator", "as new")] if where == "in CUDA" else []
    assert driver.log[3:] == let_go, "once, and not what torch does itself when the graph is gone"
    with pytest.raises(GraphError, match="previous error during capture"):
        machine.capture(lambda: None, None)


def test_a_pool_that_torch_has_let_go_of_is_no_error(driver, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    machine, driver.fails_to_end = Cuda(DEVICE), "in CUDA"
    with pytest.raises(GraphError, match="division by zero"):
        machine.capture(lambda: 1 / 0, None)
    assert ("releasePool", 0, (0, 1)) in driver.log


def test_an_error_does_not_keep_what_the_step_had(driver):
    """Tensors of the step have gradients that belong to the stream of the capture."""
    machine, driver.grows, there = Cuda(DEVICE), [0, 0], []

    def step(kind: type[Exception]) -> None:
        tensor = torch.ones(3)
        there.append(weakref.ref(tensor))

        def inner() -> None:  # as in the calls of modules: a frame keeps its function, and that what it encloses
            raise kind(f"no tensor of {tensor.numel()} values")

        inner()

    for kind in (ValueError, GraphError):
        with pytest.raises(GraphError, match="no tensor of 3 values") as caught:
            machine.capture(lambda kind=kind: step(kind), None)
        frames = [item.frame.f_locals for item in caught.traceback]
        assert not any(isinstance(value, CudaGraph) for names in frames for value in names.values()), "nor its memory"
        assert there[-1]() is None, "without the garbage collector"
        assert 'raise kind(f"no tensor' in caught.value.__notes__[0], "where it happened is told in words"
