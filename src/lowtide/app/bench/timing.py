"""Milliseconds of work on a device: by CUDA events on a GPU, by the host's clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Action = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Times:
    """Repeated measurements of one action, in milliseconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def cells(self, name: str) -> dict[str, float]:
        """Median and spread, as columns."""
        return {name: self.median, f"{name}_min": min(self.samples), f"{name}_max": max(self.samples)}


def interleave(actions: Mapping[str, Action], device: torch.device, *, repeats: int, warm: int = 0) -> dict[str, Times]:
    """Time the actions in turn: a, b, c, a, b, c, ... after ``warm`` untimed turns.

    Nothing waits for the device between two actions, as in training: what an action costs the host counts only where
    the device runs out of work.
    """
    for _ in range(warm):
        for action in actions.values():
            action()
    spans: dict[str, list[Callable[[], float]]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            spans[name].append(_span(action, device))
    synchronize(device)
    return {name: Times(tuple(read() for read in reads)) for name, reads in spans.items()}


def time_host(action: Action, device: torch.device, *, repeats: int) -> Times:
    """What an action costs the host: the device is idle when it starts and nobody waits for it before it returns."""
    samples = []
    for _ in range(repeats):
        synchronize(device)
        begin = time.perf_counter()
        action()
        samples.append(1e3 * (time.perf_counter() - begin))
    synchronize(device)
    return Times(tuple(samples))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _span(action: Action, device: torch.device) -> Callable[[], float]:
    """Run the action; the milliseconds can be read once the device has got there."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        return lambda: begin.elapsed_time(end)
    start = time.perf_counter()
    action()
    elapsed = 1e3 * (time.perf_counter() - start)
    return lambda: elapsed
