"""The payloads of one device that may live on the host: which of them are on the device now, and which come next.

A payload stays where it was made until ``keep`` bytes of newer ones are there; then it is copied out. The last ones of
forward, which backward asks for first, never cross.

Backward asks for payloads more or less in the reverse order in which they were put. Whenever it asks for one, those put
before it are sent for, as many as there is room for. That is a guess and nothing more: any payload may be asked for at
any time, any number of times, on any thread and stream, or never.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.records import Encoded
from lowtide.stores._crate import Mould, mould_of
from lowtide.stores._link import Flight, Link

_SIBLINGS = 8  # an op reads what it saved in any order: some that were put after the one asked for may be next


class OnHost:
    """A payload in a lane's keeping. ``nbytes`` counts what never leaves the device. Dropping it frees all of it."""

    __slots__ = ("_lane", "cargo", "nbytes")

    def __init__(self, lane: Lane, cargo: Cargo, nbytes: int) -> None:
        self._lane, self.cargo, self.nbytes = lane, cargo, nbytes

    def fetch(self) -> Encoded:
        return self._lane.fetch(self.cargo)

    def __del__(self) -> None:
        self._lane.drop(self.cargo)


class Cargo:
    """What there is of a payload: buffers on the device (``flight``), copies on the host, or both.

    ``encoded`` is the payload as it lies on the device, None while it is not there or has not been asked for.
    """

    __slots__ = ("__weakref__", "buffers", "copies", "encoded", "flight", "mould", "nbytes", "order")

    def __init__(self, order: int, encoded: Encoded, buffers: Sequence[Tensor], flight: Flight) -> None:
        self.order = order
        self.encoded: Encoded | None = encoded
        self.buffers: Sequence[Tensor] = buffers
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self.flight: Flight | None = flight
        self.copies: Any = None
        self.mould: Mould | None = None

    def leave(self) -> None:
        """Let go of what is on the device."""
        if self.mould is None and self.encoded is not None and self.copies is not None:
            self.mould = mould_of(self.encoded, self.buffers)
        self.encoded, self.buffers = None, ()
        flight, self.flight = self.flight, None
        if flight is not None:
            flight.end()


class Lane:
    """``bound`` is how many bytes of payloads may be on the device at a time; ``keep``, how many of them uncopied."""

    def __init__(self, link: Link, bound: int, keep: int = 0) -> None:
        self.link, self._bound, self._keep = link, bound, keep
        self._lock = threading.RLock()  # also taken when a payload dies, which may be while this thread has it
        # What is on the device, by order of putting: without a copy on the host, with one, and with one and used since.
        self._unsent: OrderedDict[int, Cargo] = OrderedDict()
        self._unused: OrderedDict[int, Cargo] = OrderedDict()
        self._used: OrderedDict[int, Cargo] = OrderedDict()
        self._unsent_nbytes = 0
        self._here_nbytes = 0
        self._orders: list[int] = []  # ascending, and the payloads that have them
        self._cargoes: list[weakref.ref[Cargo]] = []
        self._limit = 256
        self._count = 0
        self._newest = -1  # when the current pass of backward began
        self._frontier = 0  # all from here on have been sent for in this pass
        self._has_jumped = False  # the last one asked for was not among them: a skip connection, or another pass

    @property
    def nbytes_here(self) -> int:
        return self._here_nbytes

    def put(self, encoded: Encoded, buffers: Sequence[Tensor]) -> OnHost:
        """Take a payload in, and begin to copy out what has to make room for it."""
        with self._lock:
            cargo = Cargo(self._count, encoded, buffers, self.link.stay(buffers))
            item = OnHost(self, cargo, encoded.nbytes - cargo.nbytes)
            self._remember(cargo)
            self._unsent[cargo.order] = cargo
            self._unsent_nbytes += cargo.nbytes
            self._here_nbytes += cargo.nbytes
            while self._unsent_nbytes > self._keep and (oldest := list(self._unsent.values())[:1]):
                if oldest[0].flight is not None:  # garbage that was found meanwhile may have taken it out
                    self._send(oldest[0])
            while self._here_nbytes > self._bound and len(self._unsent) + len(self._unused) + len(self._used) > 1:
                guests = list((self._used or self._unused).values())[:1]
                if not guests:
                    break
                self._evict(guests[0])
            return item

    def fetch(self, cargo: Cargo) -> Encoded:
        """The payload, on the device."""
        with self._lock:
            order, flight = cargo.order, cargo.flight
            if order > self._newest or (flight is None and (order >= self._frontier or self._has_jumped)):
                self._begin_pass(order)
            self._has_jumped = flight is None
            if flight is None:
                self._make_room(cargo.nbytes, besides=cargo)
                flight = self._bring(cargo)
            if cargo.copies is not None:
                self._unused.pop(order, None)
                self._used[order] = cargo
                self._used.move_to_end(order)
            buffers, encoded = flight.use(), cargo.encoded
            if encoded is None:
                assert cargo.mould is not None, "what has left can be put together"
                encoded = cargo.encoded = cargo.mould(buffers)
            self._send_for_next(cargo)
            return encoded

    def drop(self, cargo: Cargo) -> None:
        """The payload is dead: let go of all there is."""
        with self._lock:
            if cargo.flight is not None:
                self._evict(cargo)
            cargo.copies = cargo.mould = None

    def _send(self, cargo: Cargo) -> None:
        flight, buffers = cargo.flight, cargo.buffers  # held here: the payload may die meanwhile, by garbage collection
        assert flight is not None, "what has not been sent is here"
        copies = self.link.send(flight)
        if cargo.flight is None:
            flight.end()
            return
        cargo.copies = copies
        del buffers, self._unsent[cargo.order]
        self._unsent_nbytes -= cargo.nbytes
        self._unused[cargo.order] = cargo

    def _evict(self, cargo: Cargo) -> None:
        if self._unsent.pop(cargo.order, None) is not None:
            self._unsent_nbytes -= cargo.nbytes
        self._unused.pop(cargo.order, None)
        self._used.pop(cargo.order, None)
        self._here_nbytes -= cargo.nbytes
        cargo.leave()

    def _begin_pass(self, order: int) -> None:
        """Backward starts, or starts again, at ``order``: what lies well above it is not needed soon."""
        self._newest = self._count - 1
        self._frontier = order + 1
        for cargo in [*self._unused.values(), *self._used.values()]:
            if cargo.order > order + _SIBLINGS and cargo.flight is not None:
                self._evict(cargo)

    def _send_for_next(self, asked: Cargo) -> None:
        """Bring the payloads below the frontier, in descending order, while there is room."""
        at = bisect_left(self._orders, self._frontier) - 1
        while at >= 0:
            cargo = self._cargoes[at]()
            if cargo is not None and cargo.flight is None and cargo.copies is not None:
                if not self._make_room(cargo.nbytes, besides=asked):
                    return
                try:
                    self._bring(cargo)
                except torch.OutOfMemoryError:
                    return  # it is too early for this one: it will come when it is asked for
            self._frontier = self._orders[at]
            at -= 1

    def _bring(self, cargo: Cargo) -> Flight:
        flight = self.link.bring(cargo.copies)
        if cargo.copies is None:  # it has died meanwhile
            flight.end()
        else:
            cargo.flight = flight
            self._unused[cargo.order] = cargo
            self._here_nbytes += cargo.nbytes
        return flight

    def _make_room(self, nbytes: int, *, besides: Cargo) -> bool:
        """Evict what has been used already, except for ``besides``, until ``nbytes`` more fit; whether they do."""
        if self._here_nbytes + nbytes > self._bound:
            for cargo in list(self._used.values()):
                if cargo is not besides and cargo.flight is not None:
                    self._evict(cargo)
                    if self._here_nbytes + nbytes <= self._bound:
                        break
        return self._here_nbytes + nbytes <= self._bound

    def _remember(self, cargo: Cargo) -> None:
        if len(self._orders) >= self._limit:  # doubled each time, so that a payload costs the same however many
            alive = [(order, ref) for order, ref in zip(self._orders, self._cargoes, strict=True) if ref() is not None]
            self._orders, self._cargoes = [order for order, _ in alive], [ref for _, ref in alive]
            self._limit = 2 * len(alive) + 256
        self._orders.append(cargo.order)
        self._cargoes.append(weakref.ref(cargo))
        self._count += 1
