"""Spans of time: by events on a GPU, where the host runs ahead of the work, and by the host's clock elsewhere."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


class Clock:
    """Milliseconds between ``begin`` and ``end``, each time; both serve as hooks of a module too."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self._began: Any = None

    def begin(self, *_: Any) -> None:
        self._began = self._now()

    def end(self, *_: Any) -> None:
        self._spans.append((self._began, self._now()))

    def median_ms(self) -> float:
        return statistics.median(self._read())

    def total_ms(self) -> float:
        return sum(self._read())

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> list[float]:
        if self._on_gpu:
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in self._spans]
        return [1e3 * (end - begin) for begin, end in self._spans]
