"""Pack and unpack: every save is screened, waits for its op to become known, and is then handed on to be settled.

Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.capture import graph, identity, makers, needs, pairs
from lowtide.capture.agreement import Agreement
from lowtide.capture.habits import Habit, Habits, Save, has_state, of_changed_view, site_of, state_of
from lowtide.capture.handles import Alias, Deduplicator, Entry, Extent, Handle, Passed, Recast, extent_of
from lowtide.capture.scopes import Region, Scope, Scopes
from lowtide.capture.sharding import Sharding
from lowtide.ledger import Ledger
from lowtide.records import ROOT, Kind, Need, TensorSpec

Settle = Callable[[Entry, list[Handle]], None]
Leave = Callable[[Handle, identity.Left, int], None]

_READY_SHARE = 1 / 128  # of what plain training holds: bytes of tensors that may wait to be settled together
_EARLY_SHARE = 1 / 16  # of what is still to come: about as much as its payloads will take, so that no peak is higher
_UNREACHED = Need(Kind.EXACT, "its op was not found in the graph (checkpoint boundary, or a view changed in place)")


class Capture:
    """Takes in saves while the model runs and hands each to ``settle`` once its op is known."""

    def __init__(
        self,
        model: nn.Module | None,
        ledger: Ledger,
        settle: Settle,
        leave: Leave,
        settle_rest: Callable[[], None],
        *,
        min_size: int,
        recast: bool,
        remake: bool = False,
        products: bool = False,
        joins: bool = False,
    ) -> None:
        self._has_model = model is not None
        modules = model.modules() if model is not None else ()
        self._buffer_owners = [module for module in modules if module._buffers]
        self._dedup = Deduplicator(ledger)
        self._settle, self._leave, self._settle_rest = settle, leave, settle_rest
        self._ledger = ledger
        self.min_size, self._recast, self._remake, self._joins = min_size, recast, remake, joins
        self.products = products
        self.on_named: Callable[[Any, Handle], None] | None = None  # while statistics are wanted
        self._habits = Habits()
        self._sharding = Sharding(model)
        self.agreement = Agreement()
        self._small: dict[str, str] = {}  # what small tensors are called, by module path
        self.scopes = Scopes(self._pack, _unpack, self._look, self._settle_all, self._flush)

    def _pack(self, tensor: Tensor) -> Any:
        scope, module, path = self.scopes.current()
        if scope is None:  # an interrupted forward had left the hooks on; they are gone by now
            handle = _handle(tensor, module, path)
            handle.kept = Alias(tensor.detach(), tensor._version, None)
            return handle
        if scope.region is not None and self.scopes.is_running(scope.region.module):
            return self._divert(tensor, scope, module, scope.region)
        scope.packed += 1
        if scope.is_new:
            scope.is_new = False
            self._habits.begin()
            self._sharding.look()
        if type(tensor) is nn.Parameter:
            return Passed(tensor, path)
        habits = self._habits
        if habits.is_trusted and self.on_named is None and module is not None:
            number = scope.saved_in.get(path, 0)
            habit = habits.latest.get((path, number))
            if habit is not None and habit.fits(module, tensor) and not _is_special(tensor, habit.is_leaf, scope):
                scope.saved_in[path] = number + 1
                return self._take_as_usual(tensor, scope, path, habit)
        if tensor.requires_grad:
            recast = self._recast_of(tensor, path) if self._recast else None
            return recast if recast is not None else self._take(tensor, scope, module, path)
        return self._shortcut(tensor, scope, module, path) or self._take(tensor, scope, module, path)

    def _take_as_usual(self, tensor: Tensor, scope: Scope, path: str, habit: Habit) -> Handle:
        """What ``_take`` does with a save that waits and is named at once."""
        handle = Handle(habit.spec, path, habit.module, habit.is_leaf, scope.packed)
        key, calls, site = habit.key, scope.calls, habit.site
        call = calls.get(key, 0)
        calls[key] = call + 1
        handle.site = site if call == site.call else habit.site_of(call)
        handle.need = habit.need
        entry = self._enter(handle, tensor, habit.extent)
        ready = scope.ready
        if not ready or ready[-1] is not entry:
            self._is_ready(scope, entry)
        if scope.unresolved and not habit.is_leaf and scope.may_resolve:
            self._resolve(scope, [tensor.grad_fn], building=True)
        if self._is_enough(scope):
            self._settle_ready(scope, entry)
        return handle

    def _take(self, tensor: Tensor, scope: Scope, module: nn.Module | None, path: str) -> Handle | Recast:
        handle = _handle(tensor, module, path, scope.packed)
        left = self._left_alone(tensor, scope, module)
        recast = self._recast_of_frozen(tensor, module, path) if left is identity.FROZEN_CAST else None
        if recast is not None:
            return recast
        if left is None:
            self._wait(handle, tensor, scope, module)
        else:
            self._pass_through(handle, tensor, left)
        if not handle.is_leaf and scope.may_resolve and (left is None or left.leads_on):
            self._resolve(scope, [tensor.grad_fn], building=True)
        if self._is_enough(scope) or module is None:
            self._settle_ready(scope, handle.entry)
        return handle

    def hold(self, tensor: Tensor, op: str, field: str, need: Need) -> Handle:
        """Take in a tensor that no op saves now and that will be asked for all the same, under a name of its own."""
        scope, module, path = self.scopes.current()
        assert scope is not None, "only while something is recorded"
        scope.packed += 1
        handle = _handle(tensor, module, path, scope.packed)
        left = self._left_alone(tensor, scope, module)
        if left is not None:
            self._pass_through(handle, tensor, left)
        else:
            self._enter(handle, tensor, extent_of(handle.spec))
            self._give_name(scope, handle, op, field, need)
        if not handle.is_leaf and scope.unresolved:  # what else has saved it settles together with this
            self._resolve(scope, [tensor.grad_fn], building=False)
        self._settle_ready(scope, None)
        if handle.entry is not None and (handles := handle.entry.take_named()):
            self._settle(handle.entry, handles)
        return handle

    def makes_again(self) -> tuple[bool, bool, bool]:
        """Whether casts of parameters and what ops made are made again in backward, and whether pairs share a payload.

        None of it where weights are sharded."""
        is_whole = not self._sharding.is_on
        return self._recast and is_whole, self._remake and is_whole, self._joins and is_whole

    def is_innermost(self) -> bool:
        """Whether what is saved now would come to us."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[0] == self._pack

    def _divert(self, tensor: Tensor, scope: Scope, module: nn.Module | None, region: Region) -> Any:
        """A save of a module that will be run again: nothing is held, what plain training would hold is counted."""
        scope.packed += 1
        left = self._left_alone(tensor, scope, module)
        part = identity.local_part(tensor)
        counts = part is not None and (left is None or left.leads_on)
        return region.pack(tensor, self._dedup.record(part) if part is not None and counts else None)

    def _shortcut(self, tensor: Tensor, scope: Scope, module: nn.Module | None, path: str) -> Passed | None:
        """Buffers and small statistics by a short way: with parameters, most saves of a net, if not most bytes [3]."""
        if not identity.is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        if cdata in (scope.buffers if scope.buffers is not None else self._buffers(scope)):
            return Passed(tensor, path)
        if identity.unfit(tensor, self.min_size) is not identity.SMALL:
            return None
        if cdata in scope.inputs or tensor._base is not None:
            return None
        record = self._dedup.record_of(storage)
        lease, added = record.keep()
        name = self._small.get(path) or self._small.setdefault(path, f"{path or ROOT} ({identity.SMALL.reason})")
        kind_of_module = type(module).__name__ if module is not None else ""
        self._ledger.record(name, kind_of_module, "exact", "kept", identity.SMALL.reason, "", record.claim(), added)
        return Passed(tensor, path, record, lease)

    def _wait(self, handle: Handle, tensor: Tensor, scope: Scope, module: nn.Module | None) -> None:
        """Hold the tensor, without its graph, until its op is known; saves of the same tensor wait together."""
        entry = self._enter(handle, tensor, extent_of(handle.spec))
        number = scope.saved_in.get(handle.call_path, 0)
        scope.saved_in[handle.call_path] = number + 1
        handle.habit = self._habits.key(module, handle.call_path, number, handle.spec, handle.is_leaf)
        known = self._habits.recall(handle.habit) if self._habits.is_trusted and self.on_named is None else None
        known = known or of_changed_view(module, tensor)
        if known is None:
            scope.wait_for(handle.number, weakref.ref(handle))
            return
        self._give_name(scope, handle, known.op, known.field, known.need)
        self._is_ready(scope, entry)
        if module is not None and handle.site is not None and not (handle.is_leaf and has_state(module)):
            habit = Habit(module, handle.spec, handle.is_leaf, handle.site, known.need)
            self._habits.latest[(handle.call_path, number)] = habit

    def _enter(self, handle: Handle, tensor: Tensor, extent: Extent) -> Entry:
        """The entry of the tensor's memory, which holds it, without its graph, until it is settled."""
        entry = handle.entry = self._dedup.entry(tensor, extent, tensor._version)
        entry.waiting.append(weakref.ref(handle))
        if entry.raw is None:
            entry.raw, entry.spec = tensor.detach(), handle.spec
        if self._remake and entry.maker is None:
            maker = makers.find(tensor, sharded=self._sharding.is_on, products=self.products)
            entry.maker = maker or (pairs.find(tensor) if self._joins else None)
        return entry

    def _is_ready(self, scope: Scope, entry: Entry) -> None:
        if not scope.ready or scope.ready[-1] is not entry:
            scope.ready.append(entry)
            scope.ready_nbytes += entry.record.nbytes

    def _is_enough(self, scope: Scope) -> bool:
        """Whether as much is ready to be settled as may wait."""
        ledger, nbytes = self._ledger, scope.ready_nbytes
        if ledger.is_scarce:
            return nbytes > 0
        usual = ledger.raw_usual
        return nbytes > usual * _READY_SHARE and nbytes > (usual - ledger.raw) * _EARLY_SHARE

    def _settle_ready(self, scope: Scope, current: Entry | None) -> None:
        """Settle what has been named, except for the tensor that is being saved: its next op may save it, too.

        Several at a time, because Python that runs many times in a row runs several times faster. What can be made of
        tensors that are yet to be settled comes after them, and waits for them if somebody is being saved.
        """
        ready, scope.ready, scope.ready_nbytes = scope.ready, [], 0
        later = []
        for entry in ready:
            if entry is current and not _is_awaited(entry):
                self._is_ready(scope, entry)
            elif _waits_for_sources(entry):
                later.append(entry)
            elif handles := entry.take_named():
                self._settle(entry, handles)
        for entry in later:
            if current is not None and _waits_for_sources(entry):
                self._is_ready(scope, entry)
            elif handles := entry.take_named():
                self._settle(entry, handles)

    def _left_alone(self, tensor: Tensor, scope: Scope, module: nn.Module | None) -> identity.Left | None:
        """What is passed through as it is, in the order of the cheapest test first [3]."""
        if type(tensor) is not Tensor:
            self.agreement.look(tensor)
        left = identity.parameter_kind(tensor)
        if left is None and tensor.grad_fn is None and identity.is_plain(tensor):
            left = self._held_by_others(tensor.untyped_storage()._cdata, scope)
        left = left or identity.unfit(tensor, self.min_size)
        if left is not None:
            return left
        if torch._C._current_graph_task_id() != -1:
            return identity.BACKWARD
        if module is None and self._has_model and tensor.grad_fn is None and tensor.is_floating_point():
            return identity.OUTSIDE
        return identity.FROZEN_CAST if identity.is_frozen_cast(tensor, module) else None

    def _held_by_others(self, storage: int, scope: Scope) -> identity.Left | None:
        if storage in scope.inputs:
            return identity.MODEL_INPUT
        return identity.BUFFER if storage in self._buffers(scope) else None

    def _buffers(self, scope: Scope) -> set[int]:
        """The storages of the model's buffers, as they are in this forward."""
        if scope.buffers is None:
            scope.buffers = {
                buffer.untyped_storage()._cdata
                for module in self._buffer_owners
                for buffer in module._buffers.values()
                if buffer is not None and identity.is_plain(buffer)
            }
        return scope.buffers

    def _pass_through(self, handle: Handle, tensor: Tensor, left: identity.Left) -> None:
        lease, added = None, 0
        part = None if left.owned else identity.local_part(tensor)
        if part is not None:
            record = self._dedup.record(part)
            lease, added = record.keep()
            handle.entry = Entry(record, tensor._version)
        handle.kept = Alias(tensor.detach(), tensor._version, lease)
        if not left.owned:
            self._leave(handle, left, added)

    def _recast_of(self, tensor: Tensor, path: str) -> Recast | None:
        parameter = identity.cast_parameter(tensor)
        return Recast.of(parameter, tensor, path) if parameter is not None else None

    def _recast_of_frozen(self, tensor: Tensor, module: nn.Module | None, path: str) -> Recast | None:
        if not self._recast or module is None or state_of(module) is None:
            return None
        weight = identity.frozen_weight(tensor, module)
        return Recast.of(weight, tensor, path) if weight is not None else None

    def _look(self, scope: Scope, output: Any) -> None:
        """Name the saves that an output leads to; they are settled later: the next op may save the same tensors."""
        if scope.unresolved:
            self._resolve(scope, [tensor.grad_fn for tensor in identity.tensors_in(output)], building=False)

    def _settle_all(self, scope: Scope) -> None:
        self._settle_ready(scope, None)
        self._settle_rest()

    def _flush(self, scope: Scope) -> None:
        """What no path in the graph led to is kept as it is."""
        for _, ref in sorted(scope.unresolved.items()):
            handle = ref()
            if handle is not None:
                self._name(scope, handle, "unknown", "saved", _UNREACHED)
        scope.unresolved.clear()
        self._settle_all(scope)

    def _resolve(self, scope: Scope, roots: list[Any], *, building: bool) -> None:
        """Name the pending saves of every node that has become reachable [5].

        Ends when no save is left whose node can be complete: all are named, but for the one that is being packed.
        """
        for node in scope.walker.visit(roots, building=building):
            for field, handle in graph.saved_by(node):
                if type(handle) is not Handle or not scope.waits_for(handle):
                    continue
                op = needs.op_of(type(node).__name__)
                save = Save(needs.snake(op), field, needs.of(op, node, field, handle.spec.dtype, _Fields(node)))
                if handle.habit is not None:
                    self._habits.learn(handle.habit, save)
                self._name(scope, handle, *save, node)
                scope.unresolved.pop(handle.number, None)
                left = scope.unresolved
                if not left or (building and len(left) == 1 and scope.packed in left):
                    return

    def _name(self, scope: Scope, handle: Handle, op: str, field: str, need: Need, node: Any = None) -> None:
        self._give_name(scope, handle, op, field, need)
        if self.on_named is not None and node is not None:
            self.on_named(node, handle)
        if handle.entry is not None:
            self._is_ready(scope, handle.entry)

    def _give_name(self, scope: Scope, handle: Handle, op: str, field: str, need: Need) -> None:
        key = (handle.call_path, op, field)
        call = scope.calls.get(key, 0)
        scope.calls[key] = call + 1
        handle.site = site_of(*key, call, handle.module)
        handle.need = need


class _Fields(Mapping[str, Handle | Passed | Recast]):
    """What a node saved through our hooks, by field, read from it when somebody asks."""

    __slots__ = ("_found", "_node")

    def __init__(self, node: Any) -> None:
        self._node = node
        self._found: dict[str, Handle | Passed | Recast] | None = None

    def _all(self) -> dict[str, Handle | Passed | Recast]:
        if self._found is None:
            saved = graph.saved_by(self._node)
            self._found = {field: data for field, data in saved if type(data) in (Handle, Passed, Recast)}
        return self._found

    def __getitem__(self, field: str) -> Handle | Passed | Recast:
        return self._all()[field]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def _unpack(handle: Handle | Passed | Recast) -> Tensor:
    """Give backward its tensor. May run several times, in any order, on any thread; frees nothing [6]."""
    return handle.restore()


def _is_awaited(entry: Entry) -> bool:
    """Whether another tensor waits for this one, which ReLU has saved, and the layer after it as well."""
    return isinstance(entry.maker, pairs.Pair) and len(entry.waiting) > 1


def _waits_for_sources(entry: Entry) -> bool:
    """Whether a tensor can be made of others that have not been settled."""
    maker = entry.maker
    return isinstance(maker, makers.Maker) and any(
        source.kept is None and source.entry is not None and source.entry.raw is not None for source in maker.sources
    )


def _is_special(tensor: Tensor, is_leaf: bool, scope: Scope) -> bool:
    """Whether the tensor is the model's input, or is saved during backward."""
    if torch._C._current_graph_task_id() != -1:
        return True
    return is_leaf and tensor.untyped_storage()._cdata in scope.inputs


def _handle(tensor: Tensor, module: nn.Module | None, path: str, number: int = 0) -> Handle:
    name = type(module).__name__ if module is not None else ""
    return Handle(_spec(tensor), path, name, tensor.grad_fn is None, number)


def _spec(tensor: Tensor) -> TensorSpec:
    """Sparse and nested tensors have no strides, or no sizes; they are passed through, so nothing of them is noted."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        return TensorSpec.of(tensor)
    return TensorSpec((), (), tensor.dtype, tensor.device)
