"""One training step as it would run: which tensors autograd saves, what backward reads of each, and the peak.

The step is taken on whatever tensors it is given, real or fake. The first time, saves are kept as they are, and the
graph tells op and field of each. Once a method's payloads are known the step can be taken again with these in place of
the tensors: a payload is a number of bytes, and what backward gets is a new tensor of the right shape.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.app.timeline import Sample, Timeline
from lowtide.capture import graph, identity, needs
from lowtide.coding import layout
from lowtide.records import ROOT, Kind, Need, Site, TensorSpec
from lowtide.session import MIN_SIZE

OWNED, RECAST, LEFT, NAMED = "owned", "recast", "left", "named"
_STRENGTH = tuple(kind.value for kind in (Kind.EXACT, Kind.VALUES, Kind.WINDOW, Kind.MASK, Kind.METADATA))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int64)


@dataclass(frozen=True, slots=True)
class Save:
    """One tensor that autograd saves.

    ``fate``: ``named`` if Lowtide decides about it by its op; ``recast`` if Lowtide makes it again from a parameter;
    ``left`` if no codec takes it; ``owned`` if somebody else holds it anyway. What the loss saves outside of the model
    counts as recorded (``Session.recording``), as commands do it.
    ``entry`` is the same for all saves of one tensor. ``nbytes`` are those of the storage at the save that needs most
    of it, and 0 at the others of that storage, so that they can be added up.
    """

    site: str
    path: str
    need: str
    fate: str
    reason: str
    numel: int
    itemsize: int
    entry: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Trace:
    """What a step did. ``held`` and ``peak`` are bytes above ``static``, which are there between steps."""

    batch: int
    static: int
    saves: tuple[Save, ...]
    held: int
    peak: int
    peak_at: Sample
    samples: tuple[Sample, ...]

    @property
    def needed(self) -> int:
        """Bytes at the peak, all together."""
        return self.static + self.peak

    @property
    def counted(self) -> Iterator[Save]:
        """The saves that cost something in plain training."""
        return (save for save in self.saves if save.fate != OWNED)


class Step:
    """A model, a batch and a loss, to be run through once."""

    def __init__(
        self, model: nn.Module, inputs: Tensor, target: Tensor, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ) -> None:
        self._model, self._inputs, self._target, self._loss = model, inputs, target, loss
        state = [*model.parameters(), *model.buffers(), inputs, target]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in state}
        self._owned, self._static = frozenset(storages), sum(storages.values())
        self._timeline = Timeline(model)
        self._walker = graph.Walker()
        self._saved: list[_Saved] = []
        self._before: Sequence[Save] = ()
        self._rates: Mapping[str, float] | None = None
        self._payloads: weakref.WeakValueDictionary[int, _Payload] = weakref.WeakValueDictionary()
        self._waiting: Tensor | None = None

    def plain(self) -> Trace:
        """As autograd does it."""
        return self._take()

    def with_payloads(self, before: Trace, rates: Mapping[str, float]) -> Trace:
        """With payloads at the sites that ``rates`` names, of so many bytes a value; ``before`` is the plain step."""
        self._before, self._rates = before.saves, rates
        return replace(self._take(), saves=before.saves)

    def _take(self) -> Trace:
        timeline = self._timeline
        with timeline.following():
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                loss = self._loss(self._model, self._inputs, self._target)
            self._waiting = None
            held = timeline.allocated
            saves = self._describe(loss) if self._rates is None else ()
            self._saved.clear()
            with timeline.backward():
                loss.backward()
        self._model.zero_grad(set_to_none=True)
        peak = timeline.peak
        return Trace(len(self._inputs), self._static, saves, held, peak.allocated, peak, tuple(timeline.thinned()))

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor, self._timeline.place)
        number = saved.number = len(self._saved)
        self._saved.append(saved)
        rate = self._rate(number)
        if rate is None:
            saved.kept = tensor.detach()
        else:
            save = self._before[number]
            saved.payload = self._payloads.setdefault(save.entry, _Payload())
            self._timeline.hold(saved.payload, round(rate * save.numel))
            self._waiting = tensor.detach()  # until its op is known, which is one save later
        return saved

    def _rate(self, number: int) -> float | None:
        """Bytes a value; None keeps the tensor."""
        if self._rates is None:
            return None
        save = self._before[number]
        if save.fate == RECAST:
            return 0.0
        rate = self._rates.get(save.site) if save.fate == NAMED else None
        return None if rate is None else min(rate, float(save.itemsize))

    def _describe(self, loss: Tensor) -> tuple[Save, ...]:
        for node in self._walker.visit([loss.grad_fn], building=False):
            fields = {field: data for field, data in graph.saved_by(node) if isinstance(data, _Saved)}
            op = needs.op_of(type(node).__name__)
            for field, saved in fields.items():
                saved.need = needs.of(op, node, field, saved.spec.dtype, fields)
                saved.op, saved.field = needs.snake(op), field
        return _name(self._saved, self._owned)


class _Saved:
    """What the graph holds in place of a tensor."""

    def __init__(self, tensor: Tensor, path: str | None) -> None:
        self.number, self.path = 0, path
        self.spec, self.is_leaf = TensorSpec.of(tensor), tensor.grad_fn is None
        self.left = identity.parameter_kind(tensor)
        self.storage, self.storage_nbytes = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        dense = layout.is_dense(self.spec.shape, self.spec.stride)
        geometry = self.spec.numel if dense else (self.spec.shape, self.spec.stride)
        self.entry = (self.storage, tensor.storage_offset(), geometry, self.spec.dtype, tensor._version)
        self.kept: Tensor | None = None
        self.payload: _Payload | None = None
        self.op, self.field = "unknown", "saved"
        self.need: Need | None = None


class _Payload:
    """Stands for a tensor while it waits; the timeline counts its bytes for as long as it lives."""

    __slots__ = ("__weakref__",)


def _unpack(saved: _Saved) -> Tensor:
    if saved.kept is not None:
        return saved.kept
    spec = saved.spec
    if layout.is_dense(spec.shape, spec.stride):
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)


def _name(saved: Sequence[_Saved], owned: frozenset[int]) -> tuple[Save, ...]:
    """Sites by name, in the order of saving, and each storage's bytes at the save that needs most of it."""
    calls: Counter[tuple[str, str, str]] = Counter()
    entries: dict[Any, int] = {}
    named: list[Save] = []
    for item in saved:
        key = ("" if item.path in (None, ROOT) else str(item.path), item.op, item.field)
        fate, reason = _fate(item, owned)
        site = Site(*key, calls[key])
        calls[key] += fate == NAMED
        need = item.need.kind.value if item.need is not None else Kind.EXACT.value
        entry = entries.setdefault(item.entry, len(entries))
        named.append(Save(site.name, key[0], need, fate, reason, item.spec.numel, item.spec.dtype.itemsize, entry, 0))
    first: dict[int, int] = {}
    for number, item in enumerate(saved):
        if named[number].fate == OWNED:
            continue
        best = first.setdefault(item.storage, number)
        if _STRENGTH.index(named[number].need) < _STRENGTH.index(named[best].need):
            first[item.storage] = number
    for storage, number in first.items():
        named[number] = replace(named[number], nbytes=next(s.storage_nbytes for s in saved if s.storage == storage))
    return tuple(named)


def _fate(item: _Saved, owned: frozenset[int]) -> tuple[str, str]:
    if item.storage in owned or (item.left is not None and item.left.owned):
        return OWNED, "held by somebody else"
    if item.left is not None:
        return (RECAST if item.left.parameter is not None else LEFT), item.left.reason
    if item.spec.dtype not in _DTYPES:
        return LEFT, identity.DTYPE.reason
    if item.spec.nbytes < MIN_SIZE:
        return LEFT, identity.SMALL.reason
    if any(stride == 0 and size > 1 for size, stride in zip(item.spec.shape, item.spec.stride, strict=True)):
        return LEFT, identity.EXPANDED.reason
    return (NAMED, item.need.why) if item.need is not None else (LEFT, "its op was not found in the graph")
