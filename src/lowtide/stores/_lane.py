"""The payloads of one device that live on the host: which of them are on the device now, and which come next.

Backward asks for payloads more or less in the reverse order in which they were put. Whenever it asks for one, those put
before it are sent for, as many as there is room for. That is a guess and nothing more: any payload may be asked for at
any time, any number of times, on any thread and stream, or never.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.records import Encoded
from lowtide.stores._link import Flight, Link

_SIBLINGS = 8  # an op reads what it saved in any order: some that were put after the one asked for may be next


class OnHost:
    """A payload whose large buffers are on the host; ``nbytes`` counts the others. Dropping it frees all of it."""

    __slots__ = ("__weakref__", "_lane", "_payload", "_views", "copies", "nbytes", "nbytes_away", "order", "sent")

    def __init__(self, lane: Lane, order: int, payload: Encoded, buffers: Mapping[int, Tensor]) -> None:
        """``buffers`` are the storages that go to the host, as rows of bytes, by the storage's identity."""
        self._lane, self.order = lane, order
        places = {cdata: place for place, cdata in enumerate(buffers)}
        self._views: dict[str, _View] = {}
        parts: dict[str, Tensor] = {}
        for name, part in payload.tensors.items():
            place = places.get(part.untyped_storage()._cdata)
            if place is not None:
                self._views[name] = _View.of(part, place)
            # An empty tensor stands for a part that is away, so that all come back in their order.
            parts[name] = part if place is None else _ABSENT
        self._payload = Encoded(payload.codec, payload.version, payload.spec, payload.meta, parts)
        self.nbytes = self._payload.nbytes
        self.nbytes_away = sum(buffer.numel() for buffer in buffers.values())
        self.copies: Sequence[Tensor]
        self.sent: Flight
        self.copies, self.sent = lane.link.send(list(buffers.values()))

    def fetch(self) -> Encoded:
        buffers, payload = self._lane.fetch(self), self._payload
        parts = {**payload.tensors, **{name: view.on(buffers) for name, view in self._views.items()}}
        return Encoded(payload.codec, payload.version, payload.spec, payload.meta, parts)

    def __del__(self) -> None:
        self._lane.drop(self.order)


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
        part = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return part.set_(buffer.untyped_storage(), self.offset, self.shape, self.stride)


class Lane:
    """``bound`` is how many bytes of payloads may be on the device at a time, on their way out or back."""

    def __init__(self, link: Link, bound: int) -> None:
        self.link, self._bound = link, bound
        self._lock = threading.RLock()  # also taken when a payload dies, which may be while this thread has it
        self._here: dict[int, _Here] = {}  # by order of putting; those needed least recently first
        self._here_nbytes = 0
        self._orders: list[int] = []  # ascending, and the payloads that have them
        self._payloads: list[weakref.ref[OnHost]] = []
        self._limit = 256
        self._count = 0
        self._newest = -1  # when the current pass of backward began
        self._frontier = 0  # all from here on have been sent for in this pass
        self._has_jumped = False  # the last one asked for was not among them: a skip connection, or another pass

    @property
    def nbytes_here(self) -> int:
        return self._here_nbytes

    def put(self, payload: Encoded, buffers: Mapping[int, Tensor]) -> OnHost:
        """Begin to copy the buffers to the host."""
        with self._lock:
            item = OnHost(self, self._count, payload, buffers)
            self._remember(item)
            self._here[item.order] = _Here(item.sent, item.nbytes_away)
            self._here_nbytes += item.nbytes_away
            for order in list(self._here):
                if self._here_nbytes <= self._bound or len(self._here) == 1:
                    break
                self.drop(order)
            return item

    def fetch(self, item: OnHost) -> Sequence[Tensor]:
        """The buffers that are away, on the device again."""
        with self._lock:
            here = self._here.get(item.order)
            if item.order > self._newest or (here is None and (item.order >= self._frontier or self._has_jumped)):
                self._begin_pass(item.order)
            self._has_jumped = here is None
            if here is None:
                self._make_room(item.nbytes_away, keep=item.order)
                here = self._bring(item)
            here.is_used = True
            self._here[item.order] = self._here.pop(item.order)
            buffers = here.flight.use()
            self._send_for_next(item.order)
            return buffers

    def drop(self, order: int) -> None:
        """Let go of what of a payload is on the device."""
        with self._lock:
            here = self._here.pop(order, None)
            if here is not None:
                self._here_nbytes -= here.nbytes
                here.flight.end()

    def _begin_pass(self, order: int) -> None:
        """Backward starts, or starts again, at ``order``: what lies well above it is not needed soon."""
        self._newest = self._count - 1
        self._frontier = order + 1
        for other in list(self._here):
            if other > order + _SIBLINGS:
                self.drop(other)

    def _send_for_next(self, order: int) -> None:
        """Bring the payloads below the frontier, in descending order, while there is room."""
        at = bisect_left(self._orders, self._frontier) - 1
        while at >= 0:
            item = self._payloads[at]()
            if item is not None and item.order not in self._here:
                if not self._make_room(item.nbytes_away, keep=order):
                    return
                try:
                    self._bring(item)
                except torch.OutOfMemoryError:
                    return  # it is too early for this one: it will come when it is asked for
            self._frontier = self._orders[at]
            at -= 1

    def _bring(self, item: OnHost) -> _Here:
        here = _Here(self.link.bring(item.copies, item.sent), item.nbytes_away)
        self._here[item.order] = here
        self._here_nbytes += here.nbytes
        return here

    def _make_room(self, nbytes: int, *, keep: int) -> bool:
        """Drop what has been used already, except for ``keep``, until ``nbytes`` more fit; whether they do."""
        for order, here in list(self._here.items()):
            if self._here_nbytes + nbytes <= self._bound:
                break
            if here.is_used and order != keep:
                self.drop(order)
        return self._here_nbytes + nbytes <= self._bound

    def _remember(self, item: OnHost) -> None:
        if len(self._orders) >= self._limit:  # doubled each time, so that a payload costs the same however many
            alive = [(order, ref) for order, ref in zip(self._orders, self._payloads, strict=True) if ref() is not None]
            self._orders, self._payloads = [order for order, _ in alive], [ref for _, ref in alive]
            self._limit = 2 * len(alive) + 256
        self._orders.append(item.order)
        self._payloads.append(weakref.ref(item))
        self._count += 1


class _Here:
    """Buffers of a payload that are on the device."""

    __slots__ = ("flight", "is_used", "nbytes")

    def __init__(self, flight: Flight, nbytes: int) -> None:
        self.flight, self.nbytes, self.is_used = flight, nbytes, False
