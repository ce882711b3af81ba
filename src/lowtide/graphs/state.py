"""What a training step changes beside its outputs, so that a replay leaves it as an eager step would.

A graph always writes gradients to the same tensors. Here they are handed to the parameters after each replay, and added
to what was there before, as backward does. A step that has to be repeated is undone first: gradients and buffers are
put back as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from lowtide.errors import GraphError


class Gradients:
    """``.grad`` of parameters that a captured step computes."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list({id(item): item for item in parameters if item.requires_grad}.values())
        self._static: list[tuple[Tensor, Tensor]] = []  # a parameter, and where the graph leaves its gradient
        self._before: list[tuple[Tensor, Tensor | None]] = []
        self._resets = False  # the step sets gradients to zero or None itself

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Find out in an eager step whether it adds to the gradients that are there, or resets them first."""
        there = [item for item in self._parameters if item.grad is not None]
        if not there:
            yield
            return
        probe = min(there, key=lambda item: item.numel())
        before = probe.grad
        assert before is not None
        version, is_first = before._version, True

        def examine(parameter: Tensor) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self._resets = parameter.grad is not before or before._version != version + 1

        hook = probe.register_post_accumulate_grad_hook(examine)
        try:
            yield
        finally:
            hook.remove()

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """No parameter has a gradient at first, so backward makes new ones: from now on, those of the graph."""
        kept = [item.grad for item in self._parameters]
        for item in self._parameters:
            item.grad = None
        try:
            yield
            self._static = [(item, item.grad) for item in self._parameters if item.grad is not None]
        finally:
            for item, gradient in zip(self._parameters, kept, strict=True):
                item.grad = gradient

    def begin_replay(self) -> None:
        self._before = []
        for item, static in self._static:
            gradient = None if self._resets else item.grad
            self._before.append((item, gradient.clone() if gradient is static else gradient))

    def end_replay(self) -> None:
        for item, static in self._static:
            item.grad = static
        sums = [(item.grad, gradient) for item, gradient in self._before if gradient is not None]
        self._before = []
        if sums:
            new, old = zip(*sums, strict=True)
            torch._foreach_add_(new, old)

    def undo(self) -> None:
        """Gradients as they were before the replay."""
        for item, gradient in self._before:
            item.grad = gradient
        self._before = []

    def drop(self) -> None:
        self._static = []


class Buffers:
    """Buffers that a step changes in place, as the statistics of batch norms."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._changed: dict[str, Tensor] = {}
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []  # those that one launch can copy, and their copies

    @property
    def nbytes(self) -> int:
        """Of the copies."""
        return sum(copy.nbytes for _, copies in self._groups for copy in copies)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Find out in an eager step which ones do, by their values: batch norms do not count up versions.

        Those that are known to are not looked at again: each look waits for the device.
        """
        unknown = [item for item in self._model.named_buffers() if self._changed.get(item[0]) is not item[1]]
        before = {name: (buffer, buffer.clone()) for name, buffer in unknown}
        yield
        for name, (buffer, value) in before.items():
            if not torch.equal(buffer, value):
                self._changed[name] = buffer

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """A buffer that the step puts another tensor in place of would be that tensor for ever."""
        before = {name: id(buffer) for name, buffer in self._model.named_buffers()}
        yield
        for name, buffer in self._model.named_buffers():
            if before.get(name) != id(buffer):
                raise GraphError(
                    f"the step puts a new tensor in place of the buffer {name}; in a CUDA graph, change the old one"
                )

    def prepare(self) -> None:
        """Memory for copies, outside of the graph. Lists of mixed dtypes would be copied one by one."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for buffer in self._changed.values():
            alike.setdefault((buffer.device, buffer.dtype), []).append(buffer)
        self._groups = [(group, [torch.empty_like(buffer) for buffer in group]) for group in alike.values()]

    @property
    def are_covered(self) -> bool:
        """Whether there are copies of all that are known to change, as they are now."""
        covered = {id(buffer) for buffers, _ in self._groups for buffer in buffers}
        return all(id(buffer) in covered for buffer in self._changed.values())

    def save(self) -> None:
        """Part of the graph: what they were before the step."""
        for buffers, copies in self._groups:
            torch._foreach_copy_(copies, buffers)

    def undo(self) -> None:
        with torch.no_grad():
            for buffers, copies in self._groups:
                torch._foreach_copy_(buffers, copies)


class Addresses:
    """Where a model's tensors lay when its step was captured: a graph knows them by nothing else."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: list[int] = []

    def note(self) -> None:
        self._known = self._look()

    @property
    def are_the_same(self) -> bool:
        return self._look() == self._known

    def _look(self) -> list[int]:
        return [item.data_ptr() for item in (*self._model.parameters(), *self._model.buffers())]
