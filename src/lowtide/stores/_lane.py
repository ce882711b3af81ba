"""The payloads of one device that may live on the host: which of them are on the device now, and which come next.

A payload stays where it was made until ``keep`` bytes of newer ones are there; then it is copied out. The last ones of
forward, which backward asks for first, never cross.

Backward asks for payloads more or less in the reverse order in which they were put. Whenever it asks for one, those put
before it are sent for, as many as there is room for. That is a guess and nothing more: any payload may be asked for at
any time, any number of times, on any thread and stream, or never.
"""

from __future__ import annotations

import threading
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
    """What there is of a payload: buffers on the device (``flight``), copies on the host, or both; neither: it is dead.

    ``encoded`` is the payload as it lies on the device, None while it is not there or has not been asked for.
    """

    __slots__ = ("buffers", "copies", "encoded", "flight", "mould", "nbytes", "order", "place")

    def __init__(self, order: int, place: int, encoded: Encoded, buffers: Sequence[Tensor], flight: Flight) -> None:
        self.order, self.place = order, place
        self.encoded: Encoded | None = encoded
        self.buffers: Sequence[Tensor] = buffers
        self.flight: Flight | None = flight
        self.copies: Any = None
        self.mould: Mould | None = None
        nbytes = 0
        for buffer in buffers:
            nbytes += buffer.nbytes
        self.nbytes: int = nbytes


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
        self._cargoes: list[Cargo] = []  # in the order of putting, each at its place; what is dead goes now and then
        self._limit = 256
        self._count = 0
        self._newest = -1  # when the current pass of backward began
        self._frontier = 0  # all from this place on have been sent for in this pass
        self._has_jumped = False  # the last one asked for was not among them: a skip connection, or another pass

    @property
    def nbytes_here(self) -> int:
        return self._here_nbytes

    def put(self, encoded: Encoded, buffers: Sequence[Tensor]) -> OnHost:
        """Take a payload in, and begin to copy out what has to make room for it."""
        with self._lock:
            if len(self._cargoes) >= self._limit:
                self._forget_dead()
            order = self._count
            cargo = Cargo(order, len(self._cargoes), encoded, buffers, self.link.stay(buffers))
            nbytes = cargo.nbytes
            item = OnHost(self, cargo, encoded.nbytes - nbytes)
            self._cargoes.append(cargo)
            self._count = order + 1
            self._unsent[order] = cargo
            self._unsent_nbytes += nbytes
            self._here_nbytes += nbytes
            while self._unsent_nbytes > self._keep and self._unsent:
                self._send_oldest()
            while self._here_nbytes > self._bound and len(self._unsent) + len(self._unused) + len(self._used) > 1:
                guests = self._used or self._unused
                if not guests:
                    break
                self._evict(guests.popitem(last=False)[1])
            return item

    def fetch(self, cargo: Cargo) -> Encoded:
        """The payload, on the device."""
        with self._lock:
            order, flight = cargo.order, cargo.flight
            if order > self._newest or (flight is None and (cargo.place >= self._frontier or self._has_jumped)):
                self._begin_pass(cargo)
            self._has_jumped = flight is None
            if flight is None:
                self._make_room(cargo.nbytes, besides=cargo)
                flight = self._bring(cargo)
            if cargo.copies is not None:
                if self._unused.pop(order, None) is not None:
                    self._used[order] = cargo
                else:
                    self._used.move_to_end(order)
            buffers, encoded = flight.use(), cargo.encoded
            if encoded is None:
                assert cargo.mould is not None, "what has left can be put together"
                encoded = cargo.encoded = cargo.mould(buffers)
            if self._frontier:
                self._send_for_next(cargo)
            return encoded

    def drop(self, cargo: Cargo) -> None:
        """The payload is dead: let go of all there is."""
        with self._lock:
            flight, cargo.flight = cargo.flight, None
            if flight is not None:
                self._here_nbytes -= cargo.nbytes
                if cargo.copies is None:
                    self._unsent_nbytes -= cargo.nbytes
                    self._unsent.pop(cargo.order, None)
                elif self._used.pop(cargo.order, None) is None:
                    self._unused.pop(cargo.order, None)
                flight.end()
            cargo.encoded = cargo.copies = cargo.mould = None
            cargo.buffers = ()
            if self._cargoes and self._cargoes[-1] is cargo:  # as a rule, in backward
                self._cargoes.pop()
                if self._frontier > cargo.place:
                    self._frontier = cargo.place

    def _evict(self, cargo: Cargo) -> None:
        """Let go of what is on the device of a payload with copies, which has just been taken off its list."""
        flight, cargo.flight = cargo.flight, None
        if flight is None:  # it has died meanwhile, by garbage collection
            return
        self._here_nbytes -= cargo.nbytes
        if cargo.mould is None and cargo.encoded is not None:
            cargo.mould = mould_of(cargo.encoded, cargo.buffers)
        cargo.encoded, cargo.buffers = None, ()
        flight.end()

    def _send_oldest(self) -> None:
        order, cargo = self._unsent.popitem(last=False)
        flight, buffers = cargo.flight, cargo.buffers  # held here: the payload may die meanwhile, by garbage collection
        if flight is None:
            return
        try:
            copies = self.link.send(flight)
        except BaseException:
            if cargo.flight is not None:
                self._unsent[order] = cargo
                self._unsent.move_to_end(order, last=False)
            raise
        del buffers
        if cargo.flight is None:
            flight.end()
            return
        cargo.copies = copies
        self._unsent_nbytes -= cargo.nbytes
        self._unused[order] = cargo

    def _begin_pass(self, cargo: Cargo) -> None:
        """Backward starts, or starts again, at this payload: what lies well above it is not needed soon."""
        self._newest = self._count - 1
        self._frontier = cargo.place + 1
        for shelf in (self._unused, self._used):
            for order in [order for order in list(shelf) if order > cargo.order + _SIBLINGS]:
                above = shelf.pop(order, None)
                if above is not None:
                    self._evict(above)

    def _send_for_next(self, asked: Cargo) -> None:
        """Bring the payloads below the frontier, in descending order, while there is room."""
        while self._frontier:
            cargo = self._cargoes[self._frontier - 1]
            if cargo.flight is None and cargo.copies is not None:
                if not self._make_room(cargo.nbytes, besides=asked):
                    return
                try:
                    self._bring(cargo)
                except torch.OutOfMemoryError:
                    return  # it is too early for this one: it will come when it is asked for
            self._frontier -= 1

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
        while self._here_nbytes + nbytes > self._bound:
            if not self._used:
                return False
            order, cargo = self._used.popitem(last=False)
            if cargo is besides:  # the one used last: there is no other
                self._used[order] = cargo
                return False
            self._evict(cargo)
        return True

    def _forget_dead(self) -> None:
        """Now and then: the limit is doubled each time, so that a payload costs the same however many there are."""
        below, alive = self._frontier, list[Cargo]()
        for cargo in self._cargoes:
            if cargo.flight is not None or cargo.copies is not None:
                cargo.place = len(alive)
                alive.append(cargo)
            else:
                below -= cargo.place < self._frontier
        self._cargoes, self._frontier = alive, below
        self._limit = 2 * len(alive) + 256
