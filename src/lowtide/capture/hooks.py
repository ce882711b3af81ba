"""The hooks: entering and leaving modules, packing and unpacking saved tensors.

Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.capture import graph, identity, needs
from lowtide.capture.handles import Alias, Deduplicator, Entry, Handle, Recast
from lowtide.errors import LowtideWarning, PayloadError
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Site, TensorSpec

Settle = Callable[[Entry, list[Handle]], None]
Leave = Callable[[Handle, identity.Left, int], None]

_UNREACHED = Need(Kind.EXACT, "its op was not found in the graph (checkpoint boundary, or a view changed in place)")


class Scope:
    """One stretch of recording: a forward of the attached model, or a ``compress`` block."""

    def __init__(self) -> None:
        self.walker = graph.Walker()
        self.unresolved: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.calls: Counter[tuple[str, str, str]] = Counter()
        self.inputs: set[int] = set()
        self.buffers: set[int] | None = None
        self.packed = 0
        self.context: saved_tensors_hooks | None = None


class _Local(threading.local):
    """Per thread: the modules being run, innermost last, and the scope they record into."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, str, FrameType]] = []
        self.scope: Scope | None = None
        self.block: Scope | None = None


class Capture:
    """Records saves while the model runs and hands each to ``settle`` once its op is known."""

    def __init__(
        self, model: nn.Module | None, ledger: Ledger, settle: Settle, leave: Leave, *, min_size: int, recast: bool
    ) -> None:
        self._model = weakref.ref(model) if model is not None else lambda: None
        self._dedup = Deduplicator(ledger)
        self._settle, self._leave = settle, leave
        self._ledger = ledger
        self._min_size, self._recast = min_size, recast
        self._local = _Local()
        self._warned: set[str] = set()
        self.on_forward: Callable[[Scope], None] = lambda scope: None

    # -- modules ---------------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, path: str, inputs: Any, frame: FrameType) -> None:
        """A module is about to run; the outermost one opens a scope [2]."""
        local = self._local
        self._drop_dead_frames(frame)
        if not local.stack and local.block is None and not self._open_for(inputs):
            return
        if local.scope is None and local.block is not None:
            local.scope = local.block
            local.scope.inputs |= identity.storages(inputs)
        local.stack.append((module, path, frame))

    def exit(self, module: nn.Module, output: Any) -> None:
        """A module has run, or raised; the outermost one closes its scope."""
        local = self._local
        if not any(entry[0] is module for entry in local.stack):
            return
        while local.stack.pop()[0] is not module:
            pass
        if local.stack or local.scope is None:
            return
        scope, local.scope = local.scope, None
        if output is not None:
            self._resolve(scope, [tensor.grad_fn for tensor in identity.tensors_in(output)], building=False)
        if scope is not local.block:
            self._close(scope)
        if output is not None:
            self.on_forward(scope)

    def begin_block(self) -> None:
        """Open a scope that lasts until ``end_block``, whatever runs inside."""
        self._warn_nested(torch._C._autograd._top_saved_tensors_default_hooks(False))
        scope = self._local.block = Scope()
        self._push(scope)

    def end_block(self) -> None:
        scope, self._local.block = self._local.block, None
        self._local.scope = None
        self._local.stack.clear()
        if scope is not None:
            self._close(scope)

    def _open_for(self, inputs: Any) -> bool:
        """Open a scope unless this run must be left alone [9]."""
        if not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward
            return False
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._warn(
                "func", "a torch.func transform is active, which forbids saved-tensor hooks: nothing is compressed"
            )
            return False
        other = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if other is not None and getattr(other[0], "__module__", None) == "torch.utils.checkpoint":
            return False
        self._warn_nested(other)
        scope = Scope()
        scope.inputs = identity.storages(inputs)
        self._local.scope = scope
        self._push(scope)
        return True

    def _push(self, scope: Scope) -> None:
        scope.context = saved_tensors_hooks(self._pack, _unpack)
        scope.context.__enter__()

    def _close(self, scope: Scope) -> None:
        context, scope.context = scope.context, None
        if context is not None:
            context.__exit__(None, None, None)
        for handle in list(scope.unresolved):
            self._name(scope, handle, "unknown", "saved", _UNREACHED)
        scope.unresolved.clear()

    def _drop_dead_frames(self, frame: FrameType | None) -> None:
        """Unwind modules that were left without their exit hook, as KeyboardInterrupt does [10]."""
        local = self._local
        if not local.stack:
            return
        alive: FrameType | None = frame
        innermost = local.stack[-1][2]
        while alive is not None and alive is not innermost:
            alive = alive.f_back
        if alive is not None:
            return
        running = set()
        while frame is not None:
            running.add(frame)
            frame = frame.f_back
        while local.stack and local.stack[-1][2] not in running:
            local.stack.pop()
        if not local.stack and local.scope is not None:
            scope, local.scope = local.scope, None
            if scope is not local.block:
                self._close(scope)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Handle:
        local = self._local
        self._drop_dead_frames(sys._getframe(1))
        scope = local.scope or local.block
        module, path, _ = local.stack[-1] if local.stack else (None, "", None)
        handle = Handle(
            _spec(tensor), path, type(module).__name__ if module is not None else "", tensor.grad_fn is None
        )
        if scope is None:  # an interrupted forward left the hooks on; they are gone by now
            handle.kept = Alias(tensor.detach(), tensor._version, None)
            return handle
        scope.packed += 1
        left = self._left_alone(tensor, scope, module)
        if left is None:
            self._wait(handle, tensor, scope)
        else:
            self._pass_through(handle, tensor, left)
        if tensor.grad_fn is not None and scope.unresolved:
            self._resolve(scope, [tensor.grad_fn], building=True)
        return handle

    def _wait(self, handle: Handle, tensor: Tensor, scope: Scope) -> None:
        """Hold the tensor, without its graph, until its op is known; saves of the same tensor wait together."""
        entry = handle.entry = self._dedup.entry(tensor, tensor._version)
        if entry.raw is None:
            entry.raw = tensor.detach()
        entry.waiting.append(weakref.ref(handle))
        scope.unresolved.add(handle)

    def _left_alone(self, tensor: Tensor, scope: Scope, module: nn.Module | None) -> identity.Left | None:
        """What is passed through as it is, in the order of the cheapest test first [3]."""
        left = identity.parameter_kind(tensor) or identity.unfit(tensor, self._min_size)
        if left is not None:
            return left
        if torch._C._current_graph_task_id() != -1:
            return identity.BACKWARD
        if tensor.grad_fn is None:
            storage = tensor.untyped_storage()._cdata
            if storage in scope.inputs:
                return identity.MODEL_INPUT
            if scope.buffers is None:
                model = self._model()
                scope.buffers = identity.storages(list(model.buffers())) if model is not None else set()
            if storage in scope.buffers:
                return identity.BUFFER
            if identity.is_frozen_cast(tensor, module):
                return identity.FROZEN_CAST
        return None

    def _pass_through(self, handle: Handle, tensor: Tensor, left: identity.Left) -> None:
        if left.parameter is not None and self._recast and Recast.fits(left.parameter, tensor):
            handle.kept = Recast(left.parameter, tensor)
            return
        lease, added, owned = None, 0, left.owned and left.parameter is None
        if not owned and type(tensor) is Tensor and tensor.layout is torch.strided:
            record = self._dedup.record(tensor)
            lease, added = record.keep(self._ledger)
            handle.entry = Entry(record, tensor._version)
        handle.kept = Alias(tensor.detach(), tensor._version, lease)
        if not owned:
            self._leave(handle, left, added)

    def _resolve(self, scope: Scope, roots: list[Any], *, building: bool) -> None:
        """Name the pending saves of every node that has become reachable [5]."""
        for node in scope.walker.visit(roots, building=building):
            fields = graph.handles_of(node, Handle)
            for field, handle in fields.items():
                if handle in scope.unresolved:
                    op = needs.op_of(type(node).__name__)
                    self._name(scope, handle, needs.snake(op), field, needs.of(op, node, field, fields))
                    scope.unresolved.discard(handle)

    def _name(self, scope: Scope, handle: Handle, op: str, field: str, need: Need) -> None:
        key = (handle.call_path, op, field)
        handle.site = Site(*key, call=scope.calls[key], module=handle.module)
        handle.need = need
        scope.calls[key] += 1
        entry = handle.entry
        if entry is None:
            return
        handles = [other for other in (ref() for ref in entry.waiting) if other is not None]
        if handles and all(other.need is not None for other in handles):
            self._settle(entry, entry.take_waiting())

    def _warn_nested(self, other: Any) -> None:
        if other is not None:
            self._warn(
                "nested",
                "other saved-tensor hooks (save_on_cpu, another Lowtide session, ...) are active here. Only the "
                "innermost hooks apply, so until they end Lowtide's replace them",
            )

    def _warn(self, topic: str, text: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(text, LowtideWarning, stacklevel=4)


def _unpack(handle: Handle) -> Tensor:
    """Give backward its tensor. May run several times, in any order, on any thread; frees nothing [6]."""
    tensor = handle.restore()
    spec = handle.spec
    if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.device != spec.device:
        raise PayloadError(
            f"{handle.name}: decoded a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
            f"saved was {spec.dtype}, {spec.shape} on {spec.device}"
        )
    return tensor


def _spec(tensor: Tensor) -> TensorSpec:
    """Sparse and other layouts have no strides; they are passed through, so only their shape is noted."""
    if tensor.layout is torch.strided:
        return TensorSpec.of(tensor)
    return TensorSpec(tuple(tensor.shape), (), tensor.dtype, tensor.device)
