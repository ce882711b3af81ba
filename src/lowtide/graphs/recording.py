"""Payloads inside of a captured graph: room of a fixed size for each, and whether it sufficed.

Nothing here waits or asks the device while a graph is captured. Numbers in brackets are the rules of docs/dataflow.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lowtide.codecs import Codec
from lowtide.errors import GraphError
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
    site: str
    room: int
    ticket: Ticket


class Recording:
    """What Lowtide has to know of one graph, from its capture to its last replay.

    With ``is_capturing`` False it belongs to a rehearsal: a step like any other, with the graph's own kernels, so that
    nothing has to be compiled or loaded while a graph is captured.
    """

    def __init__(self, cell: Cell, slack: float, *, is_capturing: bool) -> None:
        self.replay = Replay(cell)
        self.is_capturing = is_capturing
        self.has_bounds = False  # what is baked into the graph gets old
        self._slack = slack
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
        encoded = codec.encode(x, seed=seed, ticket=self._ticket(site, 0))
        return encoded

    def encode_bounded(
        self, x: Tensor, codec: Any, site: str, seed: int, memo: Memo, bound: Bound, plan: Any
    ) -> Encoded:
        """A payload with room for what the last one of its site took, and the slack."""
        room = codec.room(memo.rate * (1 + self._slack) * x.numel())
        self._plans.append(memo.plan)
        self.has_bounds = True
        encoded: Encoded = codec.encode(
            x, bound, seed=seed, plan=plan, capacity=room, ticket=self._ticket(site, room), replay=self.replay
        )
        return encoded

    def _ticket(self, site: str, room: int) -> Tensor:
        ticket = _tickets.take()
        self._gauges.append(_Gauge(site, room, ticket))
        return ticket.word

    def begin_replay(self) -> None:
        """Forget what the last replay said, which must have been looked at."""
        for gauge in self._gauges:
            gauge.ticket.reset()

    def look(self) -> Overflow | None:
        """The first payload of the replay that did not fit; waits until the last one has been encoded."""
        found = None
        for gauge in self._gauges:
            needed = gauge.ticket.wait()
            if needed > gauge.room and found is None:
                found = Overflow(gauge.site, needed, gauge.room)
        return found
