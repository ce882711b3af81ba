"""What the graph owns instead of a saved tensor, and how copies of one tensor find each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from lowtide.coding import layout
from lowtide.errors import ModifiedError
from lowtide.ledger import Lease, Ledger
from lowtide.records import ROOT, Need, Site, TensorSpec


class Kept(Protocol):
    """The form in which a save waits for backward."""

    def restore(self, handle: Handle) -> Tensor: ...

    # Where errors are not alike, also ``variances()``: of each value's error, as multiples of that under the bound.


class Alias:
    """The tensor itself, detached; as in stock autograd, changing it in place before backward is an error."""

    __slots__ = ("_lease", "_tensor", "_version")

    def __init__(self, tensor: Tensor, version: int, lease: Lease | None) -> None:
        self._tensor, self._version, self._lease = tensor, version, lease

    def restore(self, handle: Handle) -> Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            raise _modified(tensor, self._version, handle.name)
        return tensor

    def moved(self, tensor: Tensor) -> Alias:
        """The same with ``tensor``, a copy, in place of the one that was saved."""
        return Alias(tensor, tensor._version, self._lease)


def _modified(tensor: Tensor, version: int, name: str) -> ModifiedError:
    return ModifiedError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"tensor of shape {tuple(tensor.shape)} saved at {name} is at version {tensor._version}; expected version "
        f"{version} instead. Hint: clone it before the change"
    )


class Passed:
    """A parameter or buffer, or a tensor too small to matter: the graph owns this instead of a handle, at little cost.

    ``record`` and ``lease`` keep count of a tensor that is nobody else's.
    """

    __slots__ = ("_lease", "_record", "_tensor", "_version", "call_path")

    def __init__(
        self, tensor: Tensor, path: str, record: StorageRecord | None = None, lease: Lease | None = None
    ) -> None:
        self._tensor, self._version, self.call_path = tensor.detach(), tensor._version, path
        self._record, self._lease = record, lease

    is_leaf = True

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.of(self._tensor)

    def restore(self) -> Tensor:
        tensor = self._tensor
        if tensor._version != self._version:
            raise _modified(tensor, self._version, self.call_path or ROOT)
        return tensor


class Recast:
    """A cast of a parameter, made again from the parameter when backward asks for it; the graph owns this instead."""

    __slots__ = ("_dtype", "_is_turned", "_parameter", "_version", "call_path")

    def __init__(self, parameter: Tensor, dtype: torch.dtype, path: str, *, is_turned: bool) -> None:
        self._parameter, self._version, self._dtype = parameter, parameter._version, dtype
        self._is_turned, self.call_path = is_turned, path

    @classmethod
    def of(cls, parameter: Tensor, cast: Tensor, path: str) -> Recast | None:
        """None where casting the parameter again, and transposing it again, does not give what was saved."""
        shape, stride = parameter.shape, parameter.stride()
        is_turned = cast.shape != shape or cast.stride() != stride
        if is_turned and (cast.shape != shape[::-1] or cast.stride() != stride[::-1]):
            return None
        if cast.storage_offset() or not layout.is_dense(shape, stride):
            return None
        return cls(parameter, cast.dtype, path, is_turned=is_turned)

    is_leaf = False

    @property
    def spec(self) -> TensorSpec:
        shape, stride = tuple(self._parameter.shape), self._parameter.stride()
        if self._is_turned:
            shape, stride = shape[::-1], stride[::-1]
        return TensorSpec(shape, stride, self._dtype, self._parameter.device)

    def restore(self) -> Tensor:
        parameter = self._parameter
        if parameter._version != self._version:
            raise ModifiedError(
                f"the parameter of shape {tuple(parameter.shape)} whose {self._dtype} cast was saved at "
                f"{self.call_path or ROOT} has changed since forward, so the cast cannot be made again. Run backward "
                "before the optimizer's step, or attach with recast=False to keep casts"
            )
        cast = parameter.detach().to(self._dtype)
        return cast.as_strided(cast.shape[::-1], cast.stride()[::-1], 0) if self._is_turned else cast


class StorageRecord:
    """One storage that saved tensors refer to. Holding it weakly keeps its address from being handed out again.

    It is a weak reference to the storage and a lease of its raw bytes in one: every save has one.
    """

    __slots__ = ("__weakref__", "_kept", "_ledger", "_reference", "entries", "nbytes", "unclaimed")

    def __init__(self, storage: UntypedStorage, ledger: Ledger) -> None:
        self._reference = storage._weak_ref()
        self._ledger = ledger
        nbytes = self.nbytes = self.unclaimed = storage.nbytes()  # unclaimed: not yet attributed to a site
        ledger.add_raw(nbytes)
        self._kept: weakref.ref[Lease] | None = None
        self.entries: dict[Any, weakref.ref[Entry]] = {}

    def __del__(self, free: Callable[..., Any] = UntypedStorage._free_weak_ref) -> None:
        free(self._reference)
        self._ledger.raw -= self.nbytes

    def claim(self) -> int:
        """The storage's bytes for the first site that asks, nothing for the others."""
        nbytes, self.unclaimed = self.unclaimed, 0
        return nbytes

    @property
    def is_kept(self) -> bool:
        """Whether some save holds the storage as it is, so that another costs nothing."""
        return self._kept is not None and self._kept() is not None

    def keep(self) -> tuple[Lease, int]:
        """A lease on the storage held as it is, shared by all who keep it, and the bytes that this call added."""
        lease = self._kept() if self._kept is not None else None
        if lease is not None:
            return lease, 0
        lease = Lease(self._ledger, self.nbytes)
        self._kept = weakref.ref(lease)
        return lease, self.nbytes


class Entry:
    """One tensor (a stretch of a storage at one version), however many ops saved it."""

    __slots__ = ("__weakref__", "_payloads", "maker", "raw", "record", "spec", "version", "waiting")

    def __init__(self, record: StorageRecord, version: int) -> None:
        self.record = record
        self.version = version
        self.raw: Tensor | None = None
        self.spec: TensorSpec | None = None  # of ``raw``; other saves of the same memory may have other shapes
        self.maker: Any = None  # what can make the tensor again, or its pair, until it is settled
        self.waiting: list[weakref.ref[Handle]] = []
        self._payloads: dict[Any, weakref.ref[Any]] = {}

    def take_named(self) -> list[Handle]:
        """The handles that wait and are still wanted, which then wait no longer; none while one has no name."""
        handles = []
        for ref in self.waiting:
            handle = ref()
            if handle is not None:
                if handle.need is None:
                    return []
                handles.append(handle)
        if handles:
            self.waiting = []
        return handles

    def payload(self, key: Any) -> Any | None:
        """The payload that a save of this tensor has under ``key``, if one lives."""
        ref = self._payloads.get(key)
        return ref() if ref is not None else None

    def share(self, key: Any, payload: Any) -> None:
        self._payloads[key] = weakref.ref(payload)


class Handle:
    """What a pack hook returns: owned by the graph, freed with it. It never holds a tensor that has a graph."""

    __slots__ = (
        "__weakref__", "call_path", "entry", "habit", "is_leaf", "kept", "module", "need", "number", "site", "spec"
    )  # fmt: skip

    def __init__(self, spec: TensorSpec, path: str, module: str, is_leaf: bool, number: int = 0) -> None:
        self.number = number  # in the order of saving, within a scope
        self.spec = spec
        self.call_path = path
        self.module = module
        self.is_leaf = is_leaf
        self.habit: Any = None
        self.entry: Entry | None = None
        self.kept: Kept | None = None
        self.site: Site | None = None
        self.need: Need | None = None

    @property
    def name(self) -> str:
        return self.site.name if self.site is not None else (self.call_path or ROOT)

    def restore(self) -> Tensor:
        """The tensor for backward; the pending raw tensor if its op is not known yet."""
        if self.kept is not None:
            return self.kept.restore(self)
        assert self.entry is not None and self.entry.raw is not None, "an unsettled entry holds its tensor"
        tensor = Alias(self.entry.raw, self.entry.version, None).restore(self)
        if not layout.is_dense(self.spec.shape, self.spec.stride):
            return tensor
        return tensor.as_strided(self.spec.shape, self.spec.stride, tensor.storage_offset())


class Deduplicator:
    """Finds the entry of a tensor that is saved again. Keys die with their records, so no address is ever mistaken."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._records: dict[int, weakref.ref[StorageRecord]] = {}
        self._limit = 1024

    def record(self, tensor: Tensor) -> StorageRecord:
        return self.record_of(tensor.untyped_storage())

    def record_of(self, storage: UntypedStorage) -> StorageRecord:
        ref = self._records.get(storage._cdata)
        record = ref() if ref is not None else None
        return record if record is not None else self._add(storage)

    def _add(self, storage: UntypedStorage) -> StorageRecord:
        if len(self._records) >= self._limit:  # doubled each time, so that a record costs the same however many
            self._records = {cdata: ref for cdata, ref in list(self._records.items()) if ref() is not None}
            self._limit = 2 * len(self._records) + 1024
        record = StorageRecord(storage, self._ledger)
        self._records[storage._cdata] = weakref.ref(record)
        return record

    def entry(self, tensor: Tensor, extent: Extent, version: int) -> Entry:
        """The entry for the memory that ``tensor`` covers: dense views of one stretch share it whatever their shape."""
        record = self.record_of(tensor.untyped_storage())
        key = (tensor.storage_offset(), extent, version)
        ref = record.entries.get(key)
        entry = ref() if ref is not None else None
        if entry is None:
            entry = Entry(record, version)
            record.entries[key] = weakref.ref(entry)
        return entry


Extent = tuple[Any, torch.dtype]


def extent_of(spec: TensorSpec) -> Extent:
    """What tells a tensor from others that begin at the same place: its size if it is dense, else its geometry."""
    shape, stride = spec.shape, spec.stride
    return (spec.numel if layout.is_dense(shape, stride) else (shape, stride)), spec.dtype
