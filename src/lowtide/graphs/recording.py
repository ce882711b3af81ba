"""Payloads inside of a captured graph: room of a fixed size for each, and whether it sufficed.

Nothing here waits or asks the device while a graph is captured. Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.codecs import Codec
from lowtide.errors import GraphError
from lowtide.graphs.rooms import Room, Rooms
from lowtide.kernels import _tickets
from lowtide.kernels._tickets import Ticket
from lowtide.kernels._workspaces import Cell, Replay
from lowtide.records import Bound, Encoded
from lowtide.sites import Memo
from lowtide.stores import Store
from lowtide.stores.device import Device

_CAPTURED = "bitmask, identity, shape, window_index, and sz on NVIDIA GPUs"
_MOST_TICKETS = 4096  # payloads of a graph for which there is pinned memory before the capture begins


@dataclass(frozen=True, slots=True)
class Overflow:
    """A payload that did not fit: where, what it needed, what there was. Words; for indices, those out of place."""

    site: str
    needed: int
    room: int

    def __str__(self) -> str:
        return f"{self.site} needed {self.needed} words and had {self.room}"


@dataclass(frozen=True, slots=True)
class _Gauge:
    """A payload of the graph: the words that it has, and how to learn what it needs."""

    site: str
    words: int
    ticket: Ticket
    room: Room | None = None  # of its site, where sizes vary
    numel: int = 1


class Recording:
    """What Lowtide has to know of one graph, from its capture to its last replay.

    With ``is_capturing`` False it belongs to a rehearsal: a step like any other, with the graph's own kernels, so that
    nothing has to be compiled or loaded while a graph is captured.
    """

    def __init__(self, cell: Cell, rooms: Rooms, *, is_capturing: bool) -> None:
        self.replay = Replay(cell)
        self.is_capturing = is_capturing
        self.has_bounds = False  # what is baked into the graph gets old
        self._rooms = rooms
        self._gauges: list[_Gauge] = []
        self._plans: list[Any] = []  # their tables are read by every replay
        if is_capturing:
            _tickets.reserve(_MOST_TICKETS)

    def check(self, codec: Codec, store: Store, site: str) -> None:
        """Refuse what cannot be captured, before it breaks the capture."""
        if not getattr(codec, "replays", False):
            raise GraphError(
                f"{site} is held by the codec {codec.name!r}, which cannot be captured in a CUDA graph: it waits for "
                f"the device, or its dither would be the same in every replay. Those that can: {_CAPTURED}"
            )
        if not isinstance(store, Device):
            raise GraphError(f"{site} is held by the store {type(store).__name__}; in a CUDA graph use store='device'")

    def encode(self, x: Tensor, codec: Any, site: str, seed: int) -> Encoded:
        """A payload of known size. Where the device tests whether it is one, the room is for no misfits."""
        if not getattr(codec, "ticketed", False):
            encoded: Encoded = codec.encode(x, seed=seed)
            return encoded
        encoded = codec.encode(x, seed=seed, ticket=self._ticket(_Gauge(site, 0, _tickets.take())))
        return encoded

    def encode_bounded(
        self, x: Tensor, codec: Any, site: str, seed: int, memo: Memo, bound: Bound, plan: Any
    ) -> Encoded:
        """A payload with the room of its site."""
        room = self._rooms.of(site)
        words = codec.room(room.make(memo.rate) * x.numel(), slack=0.0)
        ticket = self._ticket(_Gauge(site, words, _tickets.take(), room, max(x.numel(), 1)))
        self._plans.append(memo.plan)
        self.has_bounds = True
        encoded: Encoded = codec.encode(
            x, bound, seed=seed, plan=plan, capacity=words, ticket=ticket, replay=self.replay
        )
        return encoded

    def _ticket(self, gauge: _Gauge) -> Tensor:
        self._gauges.append(gauge)
        return gauge.ticket.word

    def begin_replay(self) -> None:
        """Forget what the last replay said, which must have been looked at."""
        for gauge in self._gauges:
            gauge.ticket.reset()

    def look(self) -> list[Overflow]:
        """The payloads of the replay that did not fit; waits until the last one has been encoded.

        Rooms learn what their payloads needed, whether there was as much or not.
        """
        found = []
        short: dict[Room, float] = {}  # several payloads may share a room
        for gauge in self._gauges:
            needed, room = gauge.ticket.wait(), gauge.room
            if room is not None:
                room.note(needed / gauge.numel)
            if needed > gauge.words:
                found.append(Overflow(gauge.site, needed, gauge.words))
                if room is not None:
                    short[room] = max(short.get(room, 0.0), needed / gauge.words - 1)
        for room, share in short.items():
            room.widen(share)
        return found
