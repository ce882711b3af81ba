"""Two processes with gloo between them that carry out functions: the same function on both ranks, results by rank."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
_START_S, _CALL_S = 120, 60  # an import of torch on a busy machine; a test


class Ranks:
    """They live until they are closed, since most of a process's time here would be its import of torch.

    ``call(function, ...)`` sends a function of a module (pickled by its name) to all, and returns what each gave back.
    Warnings are errors in them, as they are here. Where one raises, the others may be waiting for it in a collective
    that never ends: all are ended, and the next call starts new ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._starts = folder, 0
        self._processes: list[Any] = []
        self._lines: list[Connection] = []

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        try:
            if not self._processes:
                self._start()
            for line in self._lines:
                line.send((function, args, kwargs))
            return self._collect(_CALL_S, function.__name__)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for line in self._lines:
            line.close()
        self._processes, self._lines = [], []

    def _start(self) -> None:
        self._starts += 1
        context = mp.get_context("spawn")
        store = f"file://{self._folder}/store-{self._starts}"
        for rank in range(RANKS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._lines.append(ours)
        self._collect(_START_S, "the start")

    def _collect(self, limit_s: float, what: str) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < RANKS:
            waiting = [line for rank, line in enumerate(self._lines) if rank not in found]
            ready = wait(waiting, timeout=limit_s)
            if not ready:
                raise TimeoutError(f"{what}: nothing from ranks {sorted(set(range(RANKS)) - set(found))}")
            for line in ready:
                rank = next(rank for rank, other in enumerate(self._lines) if other is line)
                is_good, found[rank] = line.recv()
                if not is_good:
                    raise AssertionError(f"{what}, rank {rank}:\n{found[rank]}")
        return [found[rank] for rank in range(RANKS)]


def _serve(rank: int, store: str, line: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=_CALL_S))
    line.send((True, None))
    with contextlib.suppress(EOFError):
        while True:
            function, args, kwargs = line.recv()
            line.send(_carry_out(function, args, kwargs))


def _carry_out(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    try:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return True, function(*args, **kwargs)
    except Exception:
        return False, traceback.format_exc()


def gather(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensor as it is on each rank."""
    found = [torch.empty_like(value) for _ in range(RANKS)]
    dist.all_gather(found, value.contiguous())
    return found
