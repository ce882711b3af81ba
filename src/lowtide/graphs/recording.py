"""Payloads inside of a captured graph: room of a fixed size for each, a reserve for all, and whether both sufficed.

Nothing here waits or asks the device while a graph is captured. Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lowtide.codecs import Codec
from lowtide.errors import GraphError
from lowtide.graphs.beside import Ahead, Ask, Listener
from lowtide.graphs.rooms import OWN, Room, Rooms
from lowtide.graphs.tables import Tables
from lowtide.kernels import _tickets
from lowtide.kernels._aside import Aside
from lowtide.kernels._tickets import Ticket
from lowtide.kernels._workspaces import Cell, Replay
from lowtide.payloads import Payload
from lowtide.records import Bound, Encoded
from lowtide.sites import Memo
from lowtide.stores import Store
from lowtide.stores.device import Device

_CAPTURED = ("bitmask", "cast", "division", "groups", "identity", "norm_groups", "sample_groups", "shape", "sz",
             "window_index")  # fmt: skip
_WASTEFUL = 0.98  # of the room that a graph has; if another one would do with less, it is worth its capture
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
    numel: int = 1
    memo: Memo | None = None  # where sizes vary
    codec: Any = None
    room: Room | None = None  # of its site, if it lies in one piece
    chunk: int = 0  # words of the largest part of it that can lie in the reserve, if there are any

    def words_for(self, rate: float) -> int:
        words: int = self.codec.room(rate * self.numel, slack=0.0)
        return words

    @property
    def wanted(self) -> int:
        """The words that it would have in another graph."""
        assert self.memo is not None, "of a payload whose size varies"
        rate = self.memo.rate
        return self.words_for(self.room.make(rate) if self.room is not None else rate * (1 + OWN))


class Demand(NamedTuple):
    """What the payloads of a rehearsal ask of a reserve: how many words they have, and one largest chunk of each."""

    words: int
    chunks: int


class Recording:
    """What Lowtide has to know of one graph, from its capture to its last replay.

    With ``is_capturing`` False it belongs to a rehearsal: a step like any other, with the graph's own kernels, so that
    nothing has to be compiled or loaded while a graph is captured.
    """

    def __init__(
        self,
        cell: Cell,
        rooms: Rooms,
        *,
        is_capturing: bool,
        tables: Tables | None = None,
        demand: Demand | None = None,
        aside: Aside | None = None,
        order: Sequence[Ask] = (),
    ) -> None:
        """``tables`` are those of the graph; a rehearsal uses what sites have. ``demand`` is that of the rehearsal.

        With ``aside`` encoders and decoders run beside the step, and payloads are decoded ahead in this ``order``.
        """
        self.replay = Replay(cell, aside)
        self.is_capturing = is_capturing
        self._listener = None if is_capturing else Listener()
        self._ahead = Ahead(order, aside) if aside is not None else None
        self.has_bounds = False  # what is baked into the graph gets old
        self._rooms = rooms
        demand = demand if demand is not None else Demand(0, 0)
        self._reserved = rooms.reserve.words(demand.words)  # words
        # Which chunk is the first without a place is a race: the largest one of each payload comes on top.
        self._room_in_common = self._reserved + demand.chunks if self._reserved else 0
        self._rehearsed: list[tuple[Memo, int, int]] = []  # sites, values and chunks of payloads that a reserve serves
        self._gauges: list[_Gauge] = []
        self._tables = tables
        if is_capturing:
            _tickets.reserve(_MOST_TICKETS)

    @property
    def order(self) -> list[Ask]:
        """In which payloads have been asked for."""
        return self._listener.asked if self._listener is not None else []

    def begin(self) -> None:
        """The step begins; belongs to the capture, so every replay begins so."""
        self.replay.begin(self._room_in_common)

    def enlist(self, payload: Payload) -> None:
        """The next payload of the step."""
        decoder = self._ahead or self._listener
        if decoder is not None:
            decoder.enlist(payload)

    def rehearse(self, x: Tensor, codec: Any, memo: Memo) -> None:
        """The next payload of a rehearsal, if its size varies."""
        chunk = _chunk(codec, memo.plan, x)
        if chunk:
            self._rehearsed.append((memo, x.numel(), chunk))

    @property
    def demand(self) -> Demand:
        """Of a rehearsal, now that all encoders have reported."""
        words = sum(memo.rate * numel for memo, numel, _ in self._rehearsed)
        return Demand(int(words), sum(chunk for _, _, chunk in self._rehearsed))

    def finish(self) -> None:
        """The step has ended; belongs to the capture."""
        if self._ahead is not None:
            self._ahead.finish()

    def check(self, codec: Codec, store: Store, site: str) -> None:
        """Refuse what cannot be captured, before it breaks the capture."""
        if not getattr(codec, "replays", False):
            raise GraphError(
                f"{site} is held by the codec {codec.name!r}, which cannot be captured in a CUDA graph: it waits for "
                "the device, or its dither would be the same in every replay. Those that can: "
                f"{', '.join(_CAPTURED)}, where kernels for GPUs do the work"
            )
        if not isinstance(store, Device):
            raise GraphError(f"{site} is held by the store {type(store).__name__}; in a CUDA graph use store='device'")

    def encode(self, x: Tensor, codec: Any, site: str, seed: int) -> Encoded:
        """A payload of known size. Where the device tests whether it is one, the room is for no misfits."""
        options: dict[str, Any] = {"seed": seed}
        if getattr(codec, "takes_replay", False):
            options["replay"] = self.replay
        if getattr(codec, "ticketed", False):
            options["ticket"] = self._ticket(_Gauge(site, 0, _tickets.take()))
        encoded: Encoded = codec.encode(x, **options)
        return encoded

    def encode_bounded(
        self, x: Tensor, codec: Any, site: str, seed: int, memo: Memo, bound: Bound, plan: Any
    ) -> Encoded:
        """A payload with the room of its site."""
        assert self._tables is not None, "a graph has tables"
        chunk = _chunk(codec, plan, x) if self._reserved else 0
        room = None if chunk else self._rooms.of(site)
        rate = memo.rate * (1 + OWN) if room is None else room.make(memo.rate)
        words = codec.room(rate * x.numel(), slack=0.0)
        ticket = self._ticket(_Gauge(site, words, _tickets.take(), max(x.numel(), 1), memo, codec, room, chunk))
        plan = self._tables.plan(memo, plan)
        self.has_bounds = True
        encoded: Encoded = codec.encode(
            x, bound, seed=seed, plan=plan, capacity=words, ticket=ticket, replay=self.replay
        )
        return encoded

    def bound(self, memo: Memo) -> Bound | None:
        """The bound of a tensor that is coded together with another one."""
        assert self._tables is not None, "a graph has tables"
        return self._tables.bound(memo)

    def is_wasteful(self) -> bool:
        """Whether payloads have much more room than those of another graph would have."""
        sized = self._sized()
        wanted = sum(gauge.wanted for gauge in sized)
        wanted += self._rooms.reserve.words(sum(gauge.wanted for gauge in sized if gauge.chunk))
        return wanted < _WASTEFUL * (sum(gauge.words for gauge in sized) + self._reserved)

    def renew(self, memos: Sequence[Memo]) -> bool:
        """Go on with what sites have learnt since the capture; False where that takes another graph.

        ``memos`` are all of the session. No replay is under way.
        """
        assert self._tables is not None, "a graph has tables"
        short = 0  # of the reserve, half of which is still what payloads may grow by
        for gauge in self._sized():
            assert gauge.memo is not None
            if gauge.room is None:
                short += max(gauge.words_for(gauge.memo.rate) - gauge.words, 0)
            elif gauge.words_for(gauge.room.least(gauge.memo.rate)) > gauge.words:
                return False
        return 2 * short <= self._reserved and self._tables.renew(memos)

    def _sized(self) -> list[_Gauge]:
        return [gauge for gauge in self._gauges if gauge.memo is not None]

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
        found, away = [], []
        short: dict[Room, float] = {}  # several payloads may share a room
        taken = chunks = volume = 0  # of those with a reserve
        for gauge in self._gauges:
            needed, room = gauge.ticket.wait(), gauge.room
            if room is not None:
                room.note(needed / gauge.numel)
            if gauge.chunk:
                volume += gauge.words
            if needed <= gauge.words:
                continue
            overflow = Overflow(gauge.site, needed, gauge.words)
            if gauge.chunk:
                taken, chunks = taken + needed - gauge.words, chunks + gauge.chunk
                away.append(overflow)
                continue
            found.append(overflow)
            if room is not None:
                short[room] = max(short.get(room, 0.0), needed / gauge.words - 1)
        for room, share in short.items():
            room.widen(share)
        if taken:
            self._rooms.reserve.note(taken / volume)
            if taken + chunks > self._room_in_common:
                self._rooms.reserve.widen()
                found += away
        return found


def _chunk(codec: Any, plan: Any, x: Tensor) -> int:
    """Words of the largest part of a payload that can lie elsewhere than the rest; 0 if it lies in one piece."""
    words: int = codec.chunk(plan, x.dtype) if hasattr(codec, "chunk") else 0
    return words
