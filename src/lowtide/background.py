"""Work that takes long: done by threads behind a training step, and done once."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Background:
    """Threads that do what they are given, first come, first served; they start when there is something to do.

    An executor of the standard library does all that is queued before the interpreter may end. Here only what has begun
    is waited for: a thread that is stopped inside of a compiler or of CUDA may take the process down with it.
    """

    def __init__(self, name: str, threads: int = 1) -> None:
        self._name, self._count = name, threads
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock, self._is_closed = threading.Lock(), False
        _ALL.append(self)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: the interpreter ends, nothing is begun any more")
            self._threads = [thread for thread in self._threads if thread.is_alive()]  # none is, in a forked process
            while len(self._threads) < self._count:
                self._threads.append(threading.Thread(target=self._run, name=self._name, daemon=True))
                self._threads[-1].start()
            self._tasks.put((future, call))
        return future

    def close(self) -> None:
        """Drop what has not begun; what has goes on."""
        with self._lock:
            self._is_closed = True
            with suppress(Empty):
                while task := self._tasks.get_nowait():
                    task[0].cancel()
            for _ in self._threads:
                self._tasks.put(None)

    def join(self) -> None:
        """Wait for what has begun, once this is closed."""
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while True:
            task = self._tasks.get()
            if task is None:
                return
            future, call = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del task, future, call  # it may be long until the next one


_ALL: list[Background] = []


@atexit.register
def _leave() -> None:
    for background in _ALL:  # all before any is waited for: one may wait for what another has queued
        background.close()
    for background in _ALL:
        background.join()


class Once(Generic[T]):
    """A function that is called once for each key; whoever asks meanwhile waits. Errors are not kept."""

    def __init__(self, work: Callable[..., T]) -> None:
        self._work = work
        self._locks: dict[tuple[Any, ...], threading.Lock] = {}
        self._results: dict[tuple[Any, ...], T] = {}

    def __call__(self, *key: Any) -> T:
        if key not in self._results:
            with self._locks.setdefault(key, threading.Lock()):
                self._do(key)
        return self._results[key]

    def unless_begun(self, *key: Any) -> None:
        """The same, but where another thread is at it, this one is free for something else."""
        lock = self._locks.setdefault(key, threading.Lock())
        if lock.acquire(blocking=False):
            try:
                self._do(key)
            finally:
                lock.release()

    def _do(self, key: tuple[Any, ...]) -> None:
        if key not in self._results:
            self._results[key] = self._work(*key)
