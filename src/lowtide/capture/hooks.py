"""Pack and unpack: every save is screened, waits for its op to become known, and is then handed on to be settled.

Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.capture import graph, identity, needs
from lowtide.capture.handles import Alias, Deduplicator, Entry, Handle, Passed, Recast
from lowtide.capture.scopes import Scope, Scopes
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Site, TensorSpec

Settle = Callable[[Entry, list[Handle]], None]
Leave = Callable[[Handle, identity.Left, int], None]

_site = lru_cache(maxsize=1 << 14)(Site)  # the same from step to step
_UNREACHED = Need(Kind.EXACT, "its op was not found in the graph (checkpoint boundary, or a view changed in place)")


class Capture:
    """Takes in saves while the model runs and hands each to ``settle`` once its op is known."""

    def __init__(
        self, model: nn.Module | None, ledger: Ledger, settle: Settle, leave: Leave, *, min_size: int, recast: bool
    ) -> None:
        modules = model.modules() if model is not None else ()
        self._buffer_owners = [module for module in modules if module._buffers]
        self._casts: dict[int, tuple[StorageWeakRef, int]] = {}
        self._casts_limit = 64
        self._dedup = Deduplicator(ledger)
        self._settle, self._leave = settle, leave
        self._ledger = ledger
        self._min_size, self._recast = min_size, recast
        self.on_named: Callable[[Any, Handle], None] | None = None  # while statistics are wanted
        self.scopes = Scopes(self._pack, _unpack, self._resolve_output, self._flush)

    def _pack(self, tensor: Tensor) -> Handle | Passed:
        scope, module, path = self.scopes.current(sys._getframe(1))
        if scope is not None and self._is_owned(tensor, scope):
            scope.packed += 1
            return Passed(tensor, path)
        handle = Handle(
            _spec(tensor), path, type(module).__name__ if module is not None else "", tensor.grad_fn is None
        )
        if scope is None:  # an interrupted forward had left the hooks on; they are gone by now
            handle.kept = Alias(tensor.detach(), tensor._version, None)
            return handle
        scope.packed += 1
        handle.number = scope.packed
        left = self._left_alone(tensor, scope, module)
        if left is None:
            self._wait(handle, tensor, scope)
        else:
            self._pass_through(handle, tensor, left)
        if not handle.is_leaf and scope.unresolved and (left is None or left.leads_on):
            self._resolve(scope, [tensor.grad_fn], building=True)
        return handle

    def _is_owned(self, tensor: Tensor, scope: Scope) -> bool:
        """Parameters and buffers by the shortest way: most of what a net saves, if not the most bytes [3]."""
        kind = type(tensor)
        if kind is not Tensor:
            return kind is nn.Parameter
        if tensor.requires_grad or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._buffers(scope)

    def _wait(self, handle: Handle, tensor: Tensor, scope: Scope) -> None:
        """Hold the tensor, without its graph, until its op is known; saves of the same tensor wait together."""
        entry = handle.entry = self._dedup.entry(tensor, handle.spec, tensor._version)
        if entry.raw is None:
            entry.raw = tensor.detach()
        ref = weakref.ref(handle)
        entry.waiting.append(ref)
        scope.wait_for(handle.number, ref)

    def _left_alone(self, tensor: Tensor, scope: Scope, module: nn.Module | None) -> identity.Left | None:
        """What is passed through as it is, in the order of the cheapest test first [3]."""
        left = identity.parameter_kind(tensor)
        if left is None and tensor.grad_fn is None and identity.is_plain(tensor):
            left = self._held_by_others(tensor.untyped_storage()._cdata, scope)
        left = left or identity.unfit(tensor, self._min_size)
        if left is not None:
            return left
        if torch._C._current_graph_task_id() != -1:
            return identity.BACKWARD
        return identity.FROZEN_CAST if identity.is_frozen_cast(tensor, module) else None

    def _held_by_others(self, storage: int, scope: Scope) -> identity.Left | None:
        if storage in scope.inputs:
            return identity.MODEL_INPUT
        return identity.BUFFER if storage in self._buffers(scope) else None

    def _buffers(self, scope: Scope) -> set[int]:
        """The storages of the model's buffers, as they are in this forward."""
        if scope.buffers is None:
            owned = (buffer for module in self._buffer_owners for buffer in module._buffers.values())
            plain = (buffer for buffer in owned if buffer is not None and identity.is_plain(buffer))
            scope.buffers = {buffer.untyped_storage()._cdata for buffer in plain}
        return scope.buffers

    def _pass_through(self, handle: Handle, tensor: Tensor, left: identity.Left) -> None:
        if left.parameter is not None and self._can_recast(left.parameter, tensor):
            handle.kept = Recast(left.parameter, tensor)
            return
        lease, added = None, 0
        if not left.owned and identity.is_plain(tensor):
            record = self._dedup.record(tensor)
            lease, added = record.keep(self._ledger)
            handle.entry = Entry(record, tensor._version)
        handle.kept = Alias(tensor.detach(), tensor._version, lease)
        if not left.owned:
            self._leave(handle, left, added)

    def _can_recast(self, parameter: Tensor, cast: Tensor) -> bool:
        """Autocast caches casts for as long as it is on; one made before the parameter's last change is stale."""
        if not self._recast or not Recast.fits(parameter, cast):
            return False
        storage = cast.untyped_storage()
        seen = self._casts.get(storage._cdata)
        if seen is None or seen[0].expired():
            if len(self._casts) >= self._casts_limit:  # doubled each time, so that a cast costs the same however many
                self._casts = {cdata: item for cdata, item in self._casts.items() if not item[0].expired()}
                self._casts_limit = 2 * len(self._casts) + 64
            seen = self._casts[storage._cdata] = (StorageWeakRef(storage), parameter._version)
        return seen[1] == parameter._version

    def _resolve_output(self, scope: Scope, output: Any) -> None:
        self._resolve(scope, [tensor.grad_fn for tensor in identity.tensors_in(output)], building=False)

    def _flush(self, scope: Scope) -> None:
        """What no path in the graph led to is kept as it is."""
        for _, ref in sorted(scope.unresolved.items()):
            handle = ref()
            if handle is not None:
                self._name(scope, handle, "unknown", "saved", _UNREACHED)
        scope.unresolved.clear()

    def _resolve(self, scope: Scope, roots: list[Any], *, building: bool) -> None:
        """Name the pending saves of every node that has become reachable [5].

        Ends when no save is left whose node can be complete: all are named, but for the one that is being packed.
        """
        for node in scope.walker.visit(roots, building=building):
            for field, handle in graph.saved_by(node):
                if type(handle) is not Handle or not scope.waits_for(handle):
                    continue
                op = needs.op_of(type(node).__name__)
                need = needs.of(op, node, field, handle.spec.dtype, _Fields(node))
                self._name(scope, handle, needs.snake(op), field, need, node)
                scope.unresolved.pop(handle.number, None)
                left = scope.unresolved
                if not left or (building and len(left) == 1 and scope.packed in left):
                    return

    def _name(self, scope: Scope, handle: Handle, op: str, field: str, need: Need, node: Any = None) -> None:
        key = (handle.call_path, op, field)
        call = scope.calls.get(key, 0)
        scope.calls[key] = call + 1
        handle.site = _site(*key, call, handle.module)
        handle.need = need
        if self.on_named is not None and node is not None:
            self.on_named(node, handle)
        entry = handle.entry
        if entry is None:
            return
        handles = entry.alive()
        if handles and all(other.need is not None for other in handles):
            entry.waiting = []
            self._settle(entry, handles)


class _Fields(Mapping[str, Handle | Passed]):
    """What a node saved through our hooks, by field, read from it when somebody asks."""

    __slots__ = ("_found", "_node")

    def __init__(self, node: Any) -> None:
        self._node = node
        self._found: dict[str, Handle | Passed] | None = None

    def _all(self) -> dict[str, Handle | Passed]:
        if self._found is None:
            saved = graph.saved_by(self._node)
            self._found = {field: data for field, data in saved if type(data) is Handle or type(data) is Passed}
        return self._found

    def __getitem__(self, field: str) -> Handle | Passed:
        return self._all()[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _unpack(handle: Handle | Passed) -> Tensor:
    """Give backward its tensor. May run several times, in any order, on any thread; frees nothing [6]."""
    return handle.restore()


def _spec(tensor: Tensor) -> TensorSpec:
    """Sparse and nested tensors have no strides, or no sizes; they are passed through, so nothing of them is noted."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return TensorSpec.of(tensor)
    return TensorSpec((), (), tensor.dtype, tensor.device)
