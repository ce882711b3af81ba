"""Payloads taken apart into the buffers that go to the host and what stays, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lowtide.records import Encoded

Mould = Callable[[Sequence[Tensor]], Encoded]


class InOneBuffer(Protocol):
    """What ``Encoded.tensors`` may be besides a mapping, where all parts but small tables lie in one row.

    Such a payload is not cut into its parts on the way, and comes back with its ``hint``.
    """

    @property
    def buffer(self) -> Tensor: ...

    def refill(self, encoded: Encoded) -> Callable[[Tensor], Encoded]:
        """Makes ``encoded`` again of another row with the same contents; keeps nothing of this one."""
        ...


def large_buffers(encoded: Encoded, least: int) -> Sequence[Tensor]:
    """The storages to move, as rows, whole: as long as one part of a storage is on the device, all of it is."""
    one: Any = encoded.tensors
    if hasattr(one, "refill"):
        buffer: Tensor = one.buffer
        return (buffer,) if buffer.nbytes >= least else ()
    found: dict[int, Tensor] = {}
    for part in encoded.tensors.values():
        storage = part.untyped_storage()
        if storage.nbytes() >= least and part.device == encoded.spec.device and storage._cdata not in found:
            found[storage._cdata] = _whole(part)
    return tuple(found.values())


def _whole(part: Tensor) -> Tensor:
    storage = part.untyped_storage()
    if part.dim() == 1 and part.nbytes == storage.nbytes() and part.is_contiguous():
        return part
    return torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage)


def mould_of(encoded: Encoded, buffers: Sequence[Tensor]) -> Mould:
    """Makes the payload of other buffers with the same contents; keeps none of these."""
    one: Any = encoded.tensors
    if hasattr(one, "refill"):
        refill = one.refill(encoded)
        return lambda rows: refill(rows[0])
    return _Views(encoded, buffers)


class _Views:
    """What stays of a payload, and where in which buffer its other parts lie."""

    __slots__ = ("_parts", "_payload", "_views")

    def __init__(self, encoded: Encoded, buffers: Sequence[Tensor]) -> None:
        places = {buffer.untyped_storage()._cdata: place for place, buffer in enumerate(buffers)}
        self._views: dict[str, _View] = {}
        parts: dict[str, Tensor] = {}
        for name, part in encoded.tensors.items():
            place = places.get(part.untyped_storage()._cdata)
            if place is not None:
                self._views[name] = _View.of(part, place)
            # An empty tensor stands for a part that is away, so that all come back in their order.
            parts[name] = part if place is None else _ABSENT
        self._parts: Mapping[str, Tensor] = parts
        self._payload = (encoded.codec, encoded.version, encoded.spec, encoded.meta)

    def __call__(self, buffers: Sequence[Tensor]) -> Encoded:
        parts = {**self._parts, **{name: view.on(buffers) for name, view in self._views.items()}}
        return Encoded(*self._payload, parts)


_ABSENT = torch.empty(0)


class _View(NamedTuple):
    """Where in which buffer a part of a payload lies."""

    place: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, part: Tensor, place: int) -> _View:
        return cls(place, part.dtype, int(part.storage_offset()), tuple(part.shape), part.stride())

    def on(self, buffers: Sequence[Tensor]) -> Tensor:
        buffer = buffers[self.place]
        if buffer.dtype is self.dtype:
            return buffer.as_strided(self.shape, self.stride, self.offset)
        part = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return part.set_(buffer.untyped_storage(), self.offset, self.shape, self.stride)
