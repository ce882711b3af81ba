"""The second stream of a graph, on a GPU that is a stand-in: who waits for whom, and how long tensors are held."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from lowtide.errors import GraphError
from lowtide.kernels._aside import Stream

DEVICE = torch.device("cuda", 0)


class FakeStream:
    """Takes down whom it waits for."""

    def __init__(self, name: str, number: int, log: list[str]) -> None:
        self.name, self.cuda_stream, self._log = name, number, log

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    step = FakeStream("step", 1, log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("aside", 7, log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: step)
    return log


def test_one_piece_of_work_at_a_time(log):
    stream = Stream(DEVICE)
    assert stream.begin() == 7 and log == ["aside waits for step"]
    stream.hold(torch.zeros(1))
    log.clear()
    assert stream.begin() == 7 and log == ["step waits for aside", "aside waits for step"]
    log.clear()
    stream.join()
    assert log == [], "there is nothing to wait for"


def test_tensors_are_held_until_the_step_has_waited(log):
    stream, x, y = Stream(DEVICE), torch.zeros(1), torch.zeros(1)
    held = [weakref.ref(x), weakref.ref(y)]
    stream.begin()
    stream.hold(x, y)
    del x, y
    gc.collect()
    assert all(tensor() is not None for tensor in held)
    stream.join()
    assert all(tensor() is None for tensor in held)


def test_a_tensor_that_is_changed_while_it_is_read_is_an_error(log):
    stream, x = Stream(DEVICE), torch.zeros(1)
    stream.begin()
    stream.hold(x)
    x.add_(1)
    with pytest.raises(GraphError, match=r"changed in place right after it had been saved.*use beside=False"):
        stream.join()
    assert log[-1] == "step waits for aside"
    stream.join()  # told once


def test_nobody_waits_for_a_capture_that_has_failed(log):
    stream, x = Stream(DEVICE), torch.zeros(1)
    stream.begin()
    stream.hold(x)
    log.clear()
    stream.forget()
    x.add_(1)
    assert stream.begin() == 7 and log == ["aside waits for step"]
