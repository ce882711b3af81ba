"""Memory over one training step, op by op: where it goes up, where it comes down, where the peak is.

Follows the storages that ops make, from the op that makes one to the moment it is freed. That works on any device and
on fake tensors, so the same meter serves a demonstration on a CPU and a plan that allocates nothing. What an op needs
only while it runs (a workspace of cuDNN) is not seen; neither is what the allocator adds.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lowtide.records import ROOT

MOST_SAMPLES = 256


@dataclass(frozen=True, slots=True)
class Sample:
    """Bytes that are there after an op. ``index`` counts ops; ``place`` is the module whose op, or gradient, ran."""

    index: int
    phase: str
    place: str
    allocated: int


class Timeline(TorchDispatchMode):
    """While it is on, every op leaves a sample. Tensors that were there before are not counted."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self.allocated = 0
        self.peak = Sample(0, "forward", "", 0)
        self._model = model
        self._alive: set[int] = set()
        self._stack: list[str] = []
        self._places: dict[int, str] = {}  # by sequence number of the autograd node that the forward op made
        self._is_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self._alive:
                self._alive.add(storage._cdata)
                weakref.finalize(storage, self._alive.discard, storage._cdata).atexit = False
                self.hold(storage, storage.nbytes())
        self._sample()
        return result

    @property
    def place(self) -> str | None:
        """The path of the module that is running, None outside of the model."""
        return self._stack[-1] if self._stack else None

    def hold(self, owner: Any, nbytes: int) -> None:
        """Count bytes until ``owner`` dies."""
        self.allocated += nbytes
        weakref.finalize(owner, self._free, nbytes).atexit = False

    def _free(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def _sample(self) -> None:
        if self._is_backward:
            node = torch._C._current_autograd_node()
            place = self._places.get(node._sequence_nr(), "") if node is not None else ""
        else:
            place = self.place or ""
            self._places[torch.autograd._get_sequence_nr() - 1] = place
        phase = "backward" if self._is_backward else "forward"
        sample = Sample(len(self.samples), phase, place, self.allocated)
        if sample.allocated > self.peak.allocated:
            self.peak = sample
        self.samples.append(sample)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Everything inside is backward."""
        self._is_backward = True
        try:
            yield
        finally:
            self._is_backward = False

    @contextmanager
    def following(self) -> Iterator[Timeline]:
        """On, and told which module is running."""
        handles = []
        for path, module in self._model.named_modules():
            enter, leave = self._enter(path or ROOT), self._leave
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            with self:
                yield self
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._stack.append(path)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def thinned(self) -> list[Sample]:
        """Few enough samples to draw: of each stretch the first and the largest, so that no peak is lost."""
        size = max(1, -(-2 * len(self.samples) // MOST_SAMPLES))
        kept: list[Sample] = []
        for start in range(0, len(self.samples), size):
            stretch = self.samples[start : start + size]
            largest = max(stretch, key=lambda sample: sample.allocated)
            kept += [stretch[0], *([largest] if largest is not stretch[0] else [])]
        return [*kept, *self.samples[-1:]]


def _tensors(nest: Any) -> Iterator[Tensor]:
    for item in tree_iter(nest):
        if isinstance(item, Tensor) and item.layout is torch.strided and not item.is_nested:
            yield item
