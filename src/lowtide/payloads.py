"""Payloads: encoded tensors in a store's keeping, and those of which the device has yet to say how long they became."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from lowtide.codecs import Codec
from lowtide.kernels._tickets import Ticket
from lowtide.ledger import Lease, Ledger
from lowtide.records import Encoded
from lowtide.sites import Memo
from lowtide.stores import Held, Store
from lowtide.witness import Witness

# Bytes of tensors kept while their encoders have not reported: so many, and where memory is not scarce this share of
# what plain training holds.
MOST_PENDING, PENDING_SHARE = 1 << 28, 3 / 64


class Payload:
    """One encoded tensor in a store's keeping, with its lease in the ledger; shared by every save of that tensor."""

    __slots__ = ("__weakref__", "_held", "_lease", "_ledger", "_witness", "codec", "keeps_zeros", "pending")

    def __init__(self, codec: Codec, held: Held, ledger: Ledger, witness: Witness | None) -> None:
        self.codec = codec
        self.keeps_zeros = getattr(codec, "keep_zeros", False)
        self.pending: Pending | None = None
        self._ledger = ledger
        self._witness = witness
        self.hold(held)

    def hold(self, held: Held) -> None:
        self._held = held
        self._lease = Lease(self._ledger, "held", held.nbytes)

    def decode(self, site: str) -> Tensor:
        tensor = self.codec.decode(self._fetch())
        if self._witness is not None:
            self._witness.examine(tensor, site)
        return tensor

    def nonzero(self) -> Tensor:
        tensor: Tensor = self.codec.nonzero(self._fetch())  # type: ignore[attr-defined]
        return tensor

    def _fetch(self) -> Encoded:
        pending = self.pending
        if pending is not None:
            pending.settle()
            pending.waiting.let_go()  # what was saved before it has reported too
        return self._held.fetch()


class Pending:
    """A payload whose encoder has yet to say how it went; until then its tensor is kept, to be encoded again [15]."""

    __slots__ = ("_encoded", "_memo", "_payload", "_plan", "_raw", "_store", "_ticket", "device", "nbytes", "waiting")

    def __init__(
        self,
        payload: Payload,
        encoded: Encoded,
        raw: Tensor,
        memo: Memo | None,
        ticket: Ticket,
        store: Store,
        waiting: Waiting,
    ) -> None:
        self._payload = weakref.ref(payload)
        self._encoded: Encoded | None = encoded
        self._raw: Tensor | None = raw
        self._memo, self._ticket, self._store = memo, ticket, store
        self._plan = memo.plan if memo is not None else None
        self.nbytes, self.device = raw.nbytes, raw.device
        self.waiting = waiting
        payload.pending = self

    @property
    def is_known(self) -> bool:
        return self._raw is None or self._ticket.status != -1

    def settle(self) -> None:
        """Take note of what the device said and let the tensor go; waits for it if it has not said so yet."""
        raw, encoded = self._raw, self._encoded
        if raw is None or encoded is None:
            return
        status = self._ticket.wait()
        self._raw = self._encoded = None
        if self._memo is not None:
            self._memo.rate = status / max(raw.numel(), 1)
        payload = self._payload()
        if payload is None:
            return
        payload.pending = None
        settled = payload.codec.settle(encoded, raw, status, self._plan)  # type: ignore[attr-defined]
        if settled is not encoded:
            payload.hold(self._store.put(settled))


class Waiting:
    """The payloads that have not reported, oldest first. Their tensors are let go in that order [15]."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()  # forward adds to it, backward, in a thread of its own, takes from it
        self._queue: deque[Pending] = deque()
        self._nbytes = 0
        self._most = 0.0  # bytes that may be kept without looking for room again
        self._saves = 0

    def add(self, pending: Pending) -> None:
        """Keep the tensor until its encoder has reported; wait for the oldest if too much is kept."""
        with self._lock:
            self._queue.append(pending)
            self._nbytes += pending.nbytes
            self._take_known()
            most: float = MOST_PENDING
            if self._nbytes > most:
                most = max(most, self._extend(pending.device))
            while len(self._queue) > 1 and self._nbytes > most:
                self._take_oldest()

    def _extend(self, device: torch.device) -> float:
        """Bytes that may be kept where there is memory to spare; looked up at every fourth save or so."""
        self._saves += 1
        if self._nbytes > self._most or self._saves % 4 == 0:
            room = spare(device)
            self._ledger.is_scarce = room is None
            usual = self._ledger.raw_usual * PENDING_SHARE
            self._most = 0.0 if room is None else max(usual, self._nbytes + room // 2 if room else 0)
        return self._most

    def let_go(self) -> None:
        """Let go of the tensors whose encoders have reported; does not wait."""
        if self._queue:
            with self._lock:
                self._take_known()

    def _take_known(self) -> None:
        while self._queue and self._queue[0].is_known:
            self._take_oldest()

    def _take_oldest(self) -> None:
        oldest = self._queue.popleft()
        self._nbytes -= oldest.nbytes
        oldest.settle()


def spare(device: torch.device) -> int | None:
    """Bytes by which the memory in use on a GPU is below its highest so far: kept there, tensors raise no peak.

    None where half of what this process may use is in use: memory then matters more than time.
    """
    if device.type != "cuda":
        return 0
    try:
        in_use = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    except (RuntimeError, KeyError):  # an allocator of the user's own does not count
        return 0
    if in_use["current"] > _limit(device) / 2:
        return None
    return max(int(in_use["peak"] * 0.95) - int(in_use["current"]), 0)


def _limit(device: torch.device) -> float:
    share: float = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory
