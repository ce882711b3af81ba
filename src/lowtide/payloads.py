"""Payloads: encoded tensors in a store's keeping, and those of which the device has yet to say how long they became."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from lowtide.codecs import Codec
from lowtide.kernels._fold import Folding
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._tickets import Ticket
from lowtide.ledger import Lease, Ledger
from lowtide.records import Encoded
from lowtide.sites import Memo
from lowtide.stores import Held, Store
from lowtide.witness import Witness

MOST_PENDING = 1 << 28  # bytes of tensors kept while their encoders have not reported, at least; see Waiting
_WATCHED = 1 << 25  # bytes of a tensor at whose decoding memory is looked at


class Decoder(Protocol):
    """Decodes payloads in their place."""

    def decode(self, payload: Payload, *, mask: bool) -> Tensor: ...

    def gate(self, payload: Payload, gradient: Tensor) -> Tensor: ...

    def unfold(self, payload: Payload, table: Tensor, dtype: torch.dtype, **options: Any) -> Unfolded | None: ...


Unfolded = tuple[Tensor, Tensor | None]


class Payload:
    """One encoded tensor in a store's keeping, with its lease in the ledger; shared by every save of that tensor.

    ``decoder``: who decodes it, if not the payload itself.
    """

    __slots__ = (
        "__weakref__", "_held", "_lease", "_ledger", "_waiting", "_witness", "codec", "decoder", "pending"
    )  # fmt: skip

    def __init__(
        self, codec: Codec, held: Held, ledger: Ledger, witness: Witness | None, waiting: Waiting | None = None
    ) -> None:
        self.codec = codec
        self.pending: Pending | None = None
        self.decoder: Decoder | None = None
        self._ledger = ledger
        self._witness, self._waiting = witness, waiting
        self._held = held
        self._lease = Lease(ledger, held.nbytes)

    def hold(self, held: Held) -> None:
        self._held = held
        self._lease = Lease(self._ledger, held.nbytes)

    def decode(self, site: str) -> Tensor:
        if self.decoder is not None:
            tensor = self.decoder.decode(self, mask=False)
        else:
            tensor = self.codec.decode(self.fetch())
        if self._waiting is not None:
            self._waiting.watch(tensor)
        if self._witness is not None:
            self._witness.examine(tensor, site)
        return tensor

    def nonzero(self) -> Tensor:
        if self.decoder is not None:
            return self.decoder.decode(self, mask=True)
        return self.restore(mask=True)

    def gate(self, gradient: Tensor) -> Tensor:
        """``gradient`` where the tensor is not zero, and zero elsewhere."""
        return self.decoder.gate(self, gradient) if self.decoder is not None else self.let_through(gradient)

    def let_through(self, gradient: Tensor) -> Tensor:
        """The same, done here and now."""
        gated: Tensor = self.codec.gate(self.fetch(), gradient)  # type: ignore[attr-defined]
        return gated

    def unfold(self, table: Tensor, dtype: torch.dtype, **options: Any) -> Unfolded | None:
        """One of the two tensors that were folded into this one, as ``SzCuda.unfold`` gives it; None where it has to be
        decoded first."""
        if self._witness is not None or not hasattr(self.codec, "unfold"):
            return None
        parts = (
            self.decoder.unfold(self, table, dtype, **options)
            if self.decoder is not None
            else self.take_apart(table, dtype, **options)
        )
        if parts is not None and self._waiting is not None:
            self._waiting.watch(parts[0])
        return parts

    def take_apart(self, table: Tensor, dtype: torch.dtype, **options: Any) -> Unfolded | None:
        """The same, done here and now."""
        parts: Unfolded | None = self.codec.unfold(self.fetch(), table, dtype, **options)  # type: ignore[attr-defined]
        return parts

    def restore(self, *, mask: bool) -> Tensor:
        """The tensor, or where it is not zero."""
        encoded = self.fetch()
        tensor: Tensor = self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)  # type: ignore[attr-defined]
        return tensor

    def fetch(self) -> Encoded:
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
        raw: Tensor | Folding,
        memo: Memo | None,
        ticket: Ticket,
        store: Store,
        waiting: Waiting,
    ) -> None:
        self._payload = weakref.ref(payload)
        self._encoded: Encoded | None = encoded
        self._raw: Tensor | Folding | None = raw
        self._memo, self._ticket, self._store = memo, ticket, store
        self._plan = memo.plan if memo is not None else None
        self.nbytes, self.device = raw.nbytes, raw.device
        self.waiting = waiting
        payload.pending = self

    def settle(self, *, waits: bool = True) -> bool:
        """Take note of what the device said and let the tensor go; False if it has not said so yet and nobody waits."""
        raw, encoded, ticket = self._raw, self._encoded, self._ticket
        if raw is None or encoded is None:
            return True
        status = ticket.status
        if status == -1:
            if not waits:
                return False
            status = ticket.wait()
        self._raw = self._encoded = None
        if self._memo is not None:
            self._memo.rate = status / max(raw.numel(), 1)
            self._memo.rated = getattr(self._plan, "model", None)
        payload = self._payload()
        if payload is not None:
            payload.pending = None
            settled = payload.codec.settle(encoded, raw, status, self._plan)  # type: ignore[attr-defined]
            if settled is not encoded:
                payload.hold(self._store.put(settled))
        return True


class Waiting:
    """The payloads that have not reported, oldest first. Their tensors are let go in that order [15].

    The more of them are kept, the further the host may run ahead of the device. Some always are; beyond that, as many
    as leave forward's peak below backward's, by what was in use when the last step's tensors were decoded. Where half
    of what the process may use is in use, memory matters more than time, and none are.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._lock = threading.Lock()  # forward adds to it, backward, in a thread of its own, takes from it
        self._queue: deque[Pending] = deque()
        self._nbytes = 0
        self._most, self._least = 0, 1  # bytes that may be kept, and payloads that are kept in any case
        self._added = 0  # bytes since room was looked for
        self._high = self._rising = 0  # most bytes in use in backward: of the last step, and of this one so far
        self._largest = self._growing = 0  # bytes of the largest tensor decoded, likewise

    def add(self, pending: Pending) -> None:
        """Keep the tensor until its encoder has reported; wait for the oldest if too much is kept."""
        with self._lock:
            self._queue.append(pending)
            self._nbytes += pending.nbytes
            self._added += pending.nbytes
            self._take_known()
            if self._nbytes > MOST_PENDING:
                most = max(MOST_PENDING, self._extend(pending))
                while self._nbytes > most and len(self._queue) > self._least:
                    self._take_oldest()

    def _extend(self, pending: Pending) -> int:
        """Bytes that may be kept where there is memory to spare, looked up again when enough has been added."""
        if self._nbytes > self._most or self._added > MOST_PENDING:
            used, limit = in_use(pending.device)
            self._ledger.is_scarce = used > limit / 2
            coming = 2 * pending.nbytes  # two more like this one, before anything goes
            room = max(self._high, self._rising) - used - coming
            self._most = 0 if self._ledger.is_scarce else max(self._nbytes + room, 0)
            self._least = 0 if self._ledger.is_scarce and pending.nbytes > limit / 64 else 1
            self._added = 0
        return self._most

    def watch(self, tensor: Tensor) -> None:
        """A tensor has been decoded: take note of what is in use, if it is large. To ask the allocator takes time."""
        nbytes: int = tensor.nbytes
        if nbytes > self._growing:
            self._growing = nbytes
        if nbytes >= _WATCHED and 2 * nbytes >= max(self._largest, self._growing):
            self._rising = max(self._rising, _allocated(tensor.device))

    def is_small(self, nbytes: int) -> bool:
        """Whether a tensor is half as large, at most, as the largest one decoded in the last step."""
        return 2 * nbytes <= self._largest

    def end_step(self) -> None:
        self._high, self._rising = self._rising, 0
        self._largest, self._growing = self._growing or self._largest, 0  # a replay tells nothing

    def let_go(self) -> None:
        """Let go of the tensors whose encoders have reported; does not wait."""
        if self._queue:
            with self._lock:
                self._take_known()

    def finish(self) -> None:
        """Wait for all that have not reported."""
        with self._lock:
            while self._queue:
                self._take_oldest()

    def _take_known(self) -> None:
        queue = self._queue
        while queue and queue[0].settle(waits=False):
            self._nbytes -= queue.popleft().nbytes

    def _take_oldest(self) -> None:
        oldest = self._queue.popleft()
        self._nbytes -= oldest.nbytes
        oldest.settle()


def stream_of(device: torch.device) -> int:
    """The one that is current, as a number."""
    return current_stream(device.index) if device.type == "cuda" else 0


def in_use(device: torch.device) -> tuple[int, float]:
    """Bytes that torch has allocated on a GPU, and those that this process may; 0 of any number where nobody counts."""
    if device.type != "cuda":
        return 0, math.inf
    used = _allocated(device)
    return used, _limit(device) if used else math.inf


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    try:
        used: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
    except (RuntimeError, KeyError):  # an allocator of the user's own does not count
        return 0
    return used


def _limit(device: torch.device) -> float:
    share: float = torch.cuda.get_per_process_memory_fraction(device)
    return share * torch.cuda.get_device_properties(device).total_memory
