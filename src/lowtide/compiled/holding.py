"""What the ops of a compiled graph do when they run: encode tensors that were named when it was traced, and decode."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide import gates
from lowtide.capture import identity, makers, pairs
from lowtide.capture.formulas import Formula
from lowtide.capture.handles import Alias, Deduplicator, Entry, Handle, Passed, extent_of
from lowtide.errors import PayloadError
from lowtide.ledger import Lease, Ledger
from lowtide.pipeline import Pipeline
from lowtide.records import Need, Site, TensorSpec

BY_COMPILER = "handed from forward to backward by the compiler"
_keys = itertools.count()
_groups: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Save:
    """A tensor that one op saves: what is known of it when a graph is traced."""

    site: Site
    need: Need

    def moved(self, root: str, other: str) -> Save:
        """The same in the module ``other``, where ``root`` was."""
        inner = self.site.path.removeprefix(root).removeprefix(".")
        path = ".".join(part for part in (other, inner) if part)
        return Save(dataclasses.replace(self.site, path=path), self.need)


@dataclass(frozen=True, slots=True)
class Exact:
    """A tensor that the compiler itself hands from forward to backward, as it is."""

    name: str
    module: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Origin:
    """What the ops that made a tensor have saved: enough to make it again, or to share a payload with it.

    ``formula`` is None where it may share one, with the input of a batch norm. ``sources`` are numbers among the
    group's saves, ``beside`` the places of other tensors among those that are no saves.
    """

    formula: Formula | None
    sources: tuple[int, ...]
    beside: tuple[int, ...]


@dataclass(slots=True)
class Desk:
    """Where the saves of all compiled graphs of a session go."""

    pipeline: Pipeline
    min_size: int
    recasts: bool
    remakes: bool
    joins: bool
    records: Deduplicator = field(init=False)
    moved: tuple[str, str] | None = None  # the graph at work was traced in the one module and runs in the other

    def __post_init__(self) -> None:
        self.records = Deduplicator(self.ledger)

    @property
    def ledger(self) -> Ledger:
        return self.pipeline.ledger

    def count(self, items: Sequence[Exact]) -> list[Counted]:
        """Take note of tensors that the compiler keeps; they are counted for as long as what this gives is held."""
        for item in items:
            name, nbytes = f"{item.name} ({BY_COMPILER})", item.nbytes
            self.ledger.record(name, item.module, "exact", "kept", BY_COMPILER, "", nbytes, nbytes)
        return [Counted(self.ledger, item.nbytes) for item in items]


class Group:
    """Saves that a graph holds together: of one tensor, whatever their shapes, and of those that were made of it.

    ``origins``: by the number of a save.
    """

    def __init__(self, desk: Desk, saves: Sequence[Save], origins: Mapping[int, Origin]) -> None:
        self._desk, self._saves, self._origins = desk, tuple(saves), origins
        self._elsewhere: dict[tuple[str, str], tuple[Save, ...]] = {}
        self.key = str(next(_keys))
        _groups[self.key] = self

    def hold(self, tensors: Sequence[Tensor]) -> Holder:
        """Hold one tensor for each save, the first ones; what of them shares memory is stored once."""
        desk = self._desk
        saves = self._saves if desk.moved is None else self._saves_in(desk.moved)
        settled: list[_Settled] = []
        handles: list[Handle] = []
        for number, save in enumerate(saves):
            tensor, site = tensors[number].detach(), save.site
            handle = Handle(TensorSpec.of(tensor), site.path, site.module, is_leaf=False)
            handle.site, handle.need = site, save.need
            item = next((item for item in settled if item.covers(tensor, handle.spec)), None)
            if item is None:
                item = _Settled(Entry(desk.records.record(tensor), tensor._version), tensor, [])
                item.entry.raw, item.entry.spec = tensor, handle.spec
                settled.append(item)
            if number in self._origins and item.entry.maker is None:
                item.entry.maker = self._maker(number, tensor, handles, tensors[len(saves) :])
            handle.entry = item.entry
            item.handles.append(handle)
            handles.append(handle)
        for item in settled:
            self._settle(item)
        desk.pipeline.settle_rest()
        for item in settled:
            item.copy_kept()
        return Holder(handles)

    def _saves_in(self, moved: tuple[str, str]) -> tuple[Save, ...]:
        """The same saves in another module, which has its own."""
        found = self._elsewhere.get(moved)
        if found is None:
            found = self._elsewhere[moved] = tuple(save.moved(*moved) for save in self._saves)
        return found

    def _maker(self, number: int, tensor: Tensor, handles: list[Handle], beside: Sequence[Tensor]) -> Any:
        """What the tensor was made of, in the words of an eager capture."""
        origin = self._origins[number]
        sources, others = [handles[source] for source in origin.sources], [beside[place] for place in origin.beside]
        # Detached first: below autograd a detached tensor counts its versions anew, and the graph's own are checked.
        parts = [Passed(other.detach(), sources[0].call_path) for other in others]
        if origin.formula is None:
            mean, inverse_std, weight, _ = parts
            return pairs.Pair(sources[0], mean, inverse_std, weight, others[3])
        return makers.make(origin.formula, sources, parts, tensor)

    def _settle(self, item: _Settled) -> None:
        entry, pipeline = item.entry, self._desk.pipeline
        if item.tensor.nbytes >= self._desk.min_size:
            pipeline.settle(entry, item.handles)
            return
        lease, added = entry.record.keep()
        for handle in item.handles:
            handle.kept = Alias(item.tensor, entry.version, lease)
            pipeline.note(handle, entry, "kept", identity.SMALL.reason, "", added)
            added = 0
        entry.raw = None


class _Settled(NamedTuple):
    """A tensor of a group and all saves of it."""

    entry: Entry
    tensor: Tensor
    handles: list[Handle]

    def covers(self, tensor: Tensor, spec: TensorSpec) -> bool:
        """Whether ``tensor`` is the same stretch of memory, whatever its shape."""
        own, known = self.tensor, self.entry.spec
        return (
            known is not None
            and tensor.data_ptr() == own.data_ptr()
            and tensor.untyped_storage()._cdata == own.untyped_storage()._cdata
            and extent_of(spec) == extent_of(known)
        )

    def copy_kept(self) -> None:
        """The compiler takes the tensor for its own and may write to it again: what is kept as it is, is copied."""
        kept = [(handle, handle.kept) for handle in self.handles if isinstance(handle.kept, Alias)]
        copy = self.tensor.clone() if kept else self.tensor
        for handle, alias in kept:
            shape, stride = handle.spec.shape, handle.spec.stride
            handle.kept = alias.moved(copy if copy.shape == shape else copy.as_strided(shape, stride, 0))


class Counted(Lease):
    """A lease of bytes that plain training would hold as well."""

    __slots__ = ()

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        super().__init__(ledger, nbytes)
        ledger.add_raw(nbytes)

    def __del__(self) -> None:
        self._ledger.raw -= self.nbytes
        super().__del__()


class Holder(bytearray):
    """What a token stands for. The token's memory is this object's own, so that one lives as long as the other."""

    NBYTES = 1

    def __init__(self, handles: list[Handle]) -> None:
        super().__init__(self.NBYTES)
        self._handles = handles

    __hash__ = object.__hash__  # type: ignore[assignment]  # one is like no other, whatever its bytes

    def token(self) -> Tensor:
        token = torch.frombuffer(self, dtype=torch.uint8)
        _holders[token.data_ptr()] = self
        return token

    def restore(self, index: int) -> Tensor:
        """May be asked any number of times, in any order, on any thread, as an unpack hook."""
        handle = self._handles[index]
        tensor = handle.restore()
        if getattr(handle.kept, "is_lent", False):
            return tensor.clone()  # the compiler takes it for its own and may write to it
        return tensor.make() if isinstance(tensor, gates.Gate) else tensor

    def gate(self, index: int, gradient: Tensor) -> Tensor:
        """ReLU's backward, of its result: the gradient where that was positive, laid out as the gradient is."""
        result = self._handles[index].restore()
        if isinstance(result, gates.Gate):
            if gates.fits(gradient, result):
                return result.let_through(gradient)
            result = result.make()
        passed = torch.empty_like(gradient)
        torch.ops.aten.threshold_backward.grad_input(gradient, result, 0, grad_input=passed)
        return passed


def group_of(key: str) -> Group:
    group = _groups.get(key)
    assert group is not None, "whoever can run a compiled graph holds its groups"
    return group


def holder_of(token: Tensor) -> Holder:
    holder = _holders.get(token.data_ptr())
    if holder is None:
        raise PayloadError(
            "a compiled graph's token was copied between forward and backward, so what it stands for cannot be found. "
            "Saved-tensor hooks that copy (save_on_cpu, for instance) cannot be used around a model that Lowtide holds"
        )
    return holder
