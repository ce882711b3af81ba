"""A meter for the CPU: counts the bytes of live tensors op by op, and says that memory has run out beyond a cap."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Storages that ops have made since this mode was entered, each counted from its making to its death.

    What was there before is not counted. With ``cap``, the op that would exceed it raises as CUDA does.
    """

    def __init__(self, cap: int | None = None) -> None:
        super().__init__()
        self.cap, self.now, self.most = cap, 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        nbytes = storage.nbytes()
        if self.cap is not None and self.now + nbytes > self.cap:
            raise torch.OutOfMemoryError(f"{self.now} + {nbytes} bytes exceed the cap of {self.cap}")
        self._known.add(storage._cdata)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, storage._cdata, nbytes)

    def _forget(self, cdata: int, nbytes: int) -> None:
        self._known.discard(cdata)
        self.now -= nbytes


class LiveMeter:
    """A ``lowtide.growth.Meter``: ``limit`` is what the search is told, ``cap`` is where steps fail."""

    def __init__(self, limit: int, *, cap: int | None = None) -> None:
        self._limit, self.cap = limit, cap
        self.cleaned = 0

    def limit(self) -> int:
        return self._limit

    def peak(self, step: Callable[[], object]) -> int:
        with LiveMemory(self.cap) as memory:
            step()
        return memory.most

    def clean(self) -> None:
        self.cleaned += 1
