"""One payload for two tensors: the input of a batch norm, and what ReLU made of the norm's output.

Apart, the second costs as much again as the first, though it follows from it on the side where ReLU is on.
``lowtide.coding.fold`` makes one tensor of both, which keeps both bounds and ReLU's mask. Numbers in brackets are the
rules of docs/dataflow.md.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from lowtide import gates
from lowtide.ambient import Plainly
from lowtide.bounds import BoundSource
from lowtide.capture import pairs
from lowtide.capture.handles import Entry, Handle
from lowtide.capture.pairs import Pair
from lowtide.coding import fold, layout
from lowtide.kernels import _fold
from lowtide.kernels._fold import Folding
from lowtide.ledger import Lease, Ledger
from lowtide.payloads import Payload, Waiting, stream_of
from lowtide.policies.rules import Decision
from lowtide.records import Bound, Kind, Need, Site
from lowtide.witness import Witness

_PATIENCE = 4  # tensors: a norm's statistics and the indices of a pool may be between the two of a pair
_WORTH = 512  # values of a channel, at least: its numbers in the table take 28 bytes
_NEED = Need(Kind.VALUES, "the input of a batch norm and what ReLU made of its output", family="norm")


class Joint:
    """A folded tensor in its payload, and what unfolds it; shared by all saves of the two tensors.

    Backward asks for what ReLU made, then for its mask, then for the norm's input. Where a kernel unfolds while it
    decodes, one run gives the first; another gives what passes the mask and, beside it, the norm's input, which is lent
    to the third. Elsewhere the folded tensor is decoded for the second and lent to the third; where it is small among
    the tensors of the step, it is decoded once for all three.
    """

    __slots__ = ("__weakref__", "_lease", "_lent", "_name", "_source", "_table", "_waiting", "made_bound", "payload")

    def __init__(self, payload: Payload, table: Tensor, ledger: Ledger, waiting: Waiting, name: str) -> None:
        self.payload, self._table, self._waiting, self._name = payload, table, waiting, name
        self._lease = Lease(ledger, table.nbytes)
        self._lent: tuple[int, Tensor] | None = None  # the folded tensor, and of which stream
        self._source: tuple[int, Tensor] | None = None  # the norm's input, likewise
        self.made_bound: BoundSource | None = None  # of what ReLU made, if its values are to be had

    def source(self, dtype: torch.dtype) -> Tensor:
        """The input of the norm."""
        lent, self._source = self._source, None
        if lent is not None and lent[0] == stream_of(lent[1].device) and lent[1].dtype == dtype:
            return lent[1]
        parts = self.payload.unfold(self._table, dtype) if self._lent is None else None
        return parts[0] if parts is not None else _fold.source(self._folded(lends=False), self._table, dtype)

    def made(self, dtype: torch.dtype) -> Tensor:
        """What ReLU made."""
        parts = self.payload.unfold(self._table, dtype, made=True)
        return parts[0] if parts is not None else _fold.made(self._folded(lends=None), self._table, dtype)

    def variances(self) -> Tensor:
        """Of the errors of the norm's input, value by value: as multiples of that under its own bound."""
        return fold.variances(self._folded(lends=False), self._table)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Positive where ReLU was on."""
        return _fold.mask(self._folded(lends=True), dtype)

    def gate(self, gradient: Tensor) -> Tensor:
        """``gradient`` where ReLU was on, and zero elsewhere; it lies in memory as the tensor did."""
        parts = self.payload.unfold(self._table, gradient.dtype, gradient=gradient) if self._lent is None else None
        if parts is not None and parts[1] is not None:
            self._source = stream_of(gradient.device), parts[0]
            return parts[1]
        t = self._folded(lends=True)
        if t.stride() != gradient.stride() or t.shape != gradient.shape:
            t = t.as_strided(gradient.shape, gradient.stride(), t.storage_offset())
        return _fold.gate(t, gradient, self._table)

    def _folded(self, *, lends: bool | None) -> Tensor:
        """If it ``lends`` it (None: if it is small), the next who asks on the same stream gets it once more."""
        lent, self._lent = self._lent, None
        if lent is not None and lent[0] == stream_of(lent[1].device):
            t = lent[1]
        else:
            t = self.payload.decode(self._name)
        if lends or (lends is None and self._waiting.is_small(t.nbytes)):
            self._lent = stream_of(t.device), t
        return t


class Part:
    """A save that waits as a part of a joint payload."""

    __slots__ = ("_joint", "_part", "_witness")

    def __init__(
        self, joint: Joint, part: Callable[[Joint, torch.dtype], Tensor], witness: Witness | None = None
    ) -> None:
        self._joint, self._part, self._witness = joint, part, witness

    def restore(self, handle: Handle) -> Tensor:
        if self._part is Joint.mask and self._witness is None and gates.may_stand_in():
            return gates.Gate(handle.spec, self._joint.gate, lambda: self._restore(handle))
        return self._restore(handle)

    def _restore(self, handle: Handle) -> Tensor:
        spec = handle.spec
        with Plainly(spec.device.type):
            tensor = self._part(self._joint, spec.dtype)
            if self._witness is not None:
                self._witness.examine(tensor, handle.name)
        if tensor.shape == spec.shape and tensor.stride() == spec.stride:
            return tensor
        return layout.restore(tensor, spec)  # another save of the same memory may have another shape

    def variances(self) -> Tensor | None:
        """As ``Kept``."""
        return self._joint.variances() if self._part is Joint.source else None


@dataclass(frozen=True, slots=True)
class Joined:
    """The bound of a folded tensor: one number, whatever the bounds that it is folded by."""

    parts: tuple[BoundSource, ...]
    limit: float

    def resolve(self, x: Tensor, need: Need) -> Bound:
        return Bound(torch.full((), self.limit, dtype=torch.float64, device=x.device))

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))


@dataclass(frozen=True, slots=True)
class Couple:
    """Two tensors that may share a payload, and how each would be held by itself."""

    pair: Pair
    source: Entry
    made: Entry
    decision: Decision
    choices: list[tuple[Handle, Decision]]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both in the geometry of the first; their elements lie in the same order."""
        spec, x, y = self.pair.source.spec, self.source.raw, self.made.raw
        assert x is not None and y is not None, "neither has been settled"
        return (
            x.as_strided(spec.shape, spec.stride, x.storage_offset()),
            y.as_strided(spec.shape, spec.stride, y.storage_offset()),
        )

    @property
    def reader(self) -> tuple[Handle, Decision] | None:
        """A save of the second tensor that asks for values."""
        return next((choice for choice in self.choices if _kind(choice[0]) is Kind.VALUES), None)

    def goes_together(self) -> bool:
        """Whether both would be coded by ``sz``, by nobody's rule, and a mask of ReLU and no other is asked for."""
        first, decision, reader = self.pair.source, self.decision, self.reader
        spec, codec = first.spec, decision.codec
        if codec is None or codec.name != "sz" or decision.is_ruled or not layout.is_dense(spec.shape, spec.stride):
            return False
        if spec.numel < _WORTH * spec.shape[1] or self.source.record.is_kept or self.made.record.is_kept:
            return False
        is_masked = False
        for handle, choice in self.choices:
            kind, need = _kind(handle), handle.need
            if choice.codec is None or choice.is_ruled or choice.store is not decision.store:
                return False
            if need is not None and need.is_nonzero:
                is_masked |= handle.spec == spec
            elif kind is Kind.VALUES:
                if reader is None or not _is_served(handle, choice, reader[1].bound) or choice.codec != codec:
                    return False
            elif kind is not Kind.METADATA:
                return False
        return is_masked


class Settler(Protocol):
    """What is used here of a pipeline."""

    ledger: Ledger

    @property
    def waiting(self) -> Waiting: ...

    def settle_alone(self, entry: Entry, handles: list[Handle]) -> None: ...

    def decide(self, handle: Handle, raw: Tensor) -> Decision: ...

    def measure(self, x: Tensor, decision: Decision, handle: Handle) -> Bound | None: ...

    def encode_pair(self, pair: Folding, decision: Decision, handle: Handle) -> tuple[Payload, int] | None: ...

    def witness(self, x: Tensor, decision: Decision, bound: Bound | None) -> Witness | None: ...

    def note(self, handle: Handle, entry: Entry, codec: str, reason: str, bound: str, held: int) -> None: ...


class _Wait(threading.local):
    """The tensor of this thread that waits for its second, and how many others may still be settled before it."""

    first: weakref.ref[Handle] | None = None
    patience = 0


class Joiner:
    """Has tensors settled one by one, but for pairs: the first of two waits for the second one, for a while [18]."""

    def __init__(self, settler: Settler) -> None:
        self._settler = settler
        self._wait = _Wait()
        self._decisions: dict[str, tuple[Decision, Decision | None, Decision]] = {}

    def settle(self, entry: Entry, handles: list[Handle]) -> None:
        """Every op that saved this tensor so far is known."""
        pair = entry.maker if isinstance(entry.maker, Pair) else None
        if pair is not None:
            entry.maker = None
            if self._take(pair.source):
                self._settle_both(pair, entry, handles)
                return
        if len(handles) == 1 and pairs.may_begin(handles[0].need):
            self.finish()
            self._wait.first, self._wait.patience = weakref.ref(handles[0]), _PATIENCE
            return
        self._wait.patience -= 1
        if self._wait.patience <= 0:
            self.finish()
        if not self._settle_later(entry, handles):
            self._settler.settle_alone(entry, handles)

    def finish(self) -> None:
        """The tensor that waits has waited long enough: it is settled alone."""
        ref, self._wait.first = self._wait.first, None
        first = ref() if ref is not None else None
        if first is not None and first.entry is not None:
            self._settler.settle_alone(first.entry, [first])

    def forget(self) -> None:
        """Bounds may have changed."""
        self._decisions.clear()

    def _take(self, source: Handle) -> bool:
        """Whether the first tensor of a pair waits, which it then does no longer."""
        first = self._wait.first
        if first is not None and first() is source:
            self._wait.first = None
            return True
        entry = source.entry
        handles = entry.take_named() if entry is not None and entry.raw is not None else []
        if handles == [source]:  # its turn would have come later
            return True
        if entry is not None and handles:
            self._settler.settle_alone(entry, handles)
        return False

    def _settle_both(self, pair: Pair, made: Entry, handles: list[Handle]) -> None:
        source, settler = pair.source.entry, self._settler
        assert source is not None and source.raw is not None and made.raw is not None, "neither has been settled"
        rest: list[Handle] | None = None
        if source.raw._version == source.version and made.raw._version == made.version:
            with Plainly(source.raw.device.type):
                decision = settler.decide(pair.source, source.raw)
                choices = [(handle, settler.decide(handle, made.raw)) for handle in handles]
                couple = Couple(pair, source, made, decision, choices)
                rest = self._join(couple) if couple.goes_together() else None
        if rest is None:
            settler.settle_alone(source, [pair.source])
            settler.settle_alone(made, handles)
            return
        if rest:
            settler.settle_alone(made, rest)
        source.raw = made.raw = None

    def _join(self, couple: Couple) -> list[Handle] | None:
        """Hold both in one payload; gives the saves of the second tensor that it does not serve.

        None where a bound, the size of the payload or a weight would have to be known, and is not.
        """
        settler, reader, first, norm = self._settler, couple.reader, couple.pair.source, couple.pair.norm()
        if norm is None:
            return None
        x, y = couple.tensors()
        bound = settler.measure(x, couple.decision, first)
        made_bound = settler.measure(y, reader[1], reader[0]) if reader is not None else None
        if bound is None or (reader is not None and made_bound is None):
            return None
        table = _fold.table(norm, bound, made_bound, x.dtype)
        stored = self._store(couple, Folding(x, y, table))
        if stored is None:
            return None
        payload, nbytes = stored
        joint = Joint(payload, table, settler.ledger, settler.waiting, first.name)
        couple.made.share("joint", joint)
        nbytes += table.nbytes
        half = nbytes // 2 if reader is not None else 0
        decision = couple.decision
        first.kept = Part(joint, Joint.source, settler.witness(x, decision, bound))
        settler.note(first, couple.source, "sz", decision.reason, decision.bound_text, nbytes - half)
        for handle, decision in couple.choices:
            if _kind(handle) is Kind.VALUES:  # first: what plain training holds is counted where values are read
                joint.made_bound = decision.bound
                self._hold(handle, couple.made, joint, decision, settler.witness(y, decision, made_bound), half)
                half = 0
        for handle, decision in couple.choices:
            if _kind(handle) is Kind.MASK:
                self._hold(handle, couple.made, joint, decision, settler.witness(y, decision, None), 0)
        return [handle for handle, _ in couple.choices if _kind(handle) is Kind.METADATA]

    def _store(self, couple: Couple, pair: Folding) -> tuple[Payload, int] | None:
        """A payload of the folded tensor, which goes by a name of its own."""
        first = couple.pair.source
        assert first.site is not None
        stand_in = Handle(pair.spec, first.call_path, first.module, is_leaf=False)
        stand_in.site, stand_in.need = _site(first.site), _NEED
        return self._settler.encode_pair(pair, self._decide(couple, stand_in.name), stand_in)

    def _decide(self, couple: Couple, name: str) -> Decision:
        """How the folded tensor is stored: the same object for as long as that is so of both tensors."""
        first, second = couple.decision, couple.reader[1] if couple.reader is not None else None
        known = self._decisions.get(name)
        if known is not None and known[0] is first and known[1] is second:
            return known[2]
        parts = tuple(decision.bound for decision in (first, second) if decision is not None and decision.bound)
        bound = Joined(parts, fold.limit(couple.pair.source.spec.dtype))
        decision = dataclasses.replace(first, bound=bound, reason=_NEED.why)
        self._decisions[name] = first, second, decision
        return decision

    def _hold(
        self, handle: Handle, entry: Entry, joint: Joint, decision: Decision, witness: Witness | None, held: int
    ) -> None:
        is_mask = _kind(handle) is Kind.MASK
        handle.kept = Part(joint, Joint.mask if is_mask else Joint.made, witness)
        self._settler.note(handle, entry, "in sz" if is_mask else "sz", decision.reason, decision.bound_text, held)

    def _settle_later(self, entry: Entry, handles: list[Handle]) -> bool:
        """Another save of a tensor that a joint payload holds already: whether that serves it, too."""
        joint, raw = entry.payload("joint"), entry.raw
        if joint is None or raw is None or raw._version != entry.version:
            return False
        choices = [(handle, self._settler.decide(handle, raw)) for handle in handles]
        for handle, decision in choices:
            is_mask = handle.need is not None and handle.need.is_nonzero
            if decision.is_ruled or not (is_mask or _is_served(handle, decision, joint.made_bound)):
                return False
        for handle, decision in choices:
            self._hold(handle, entry, joint, decision, None, 0)
        entry.raw = None
        return True


def _kind(handle: Handle) -> Kind | None:
    return handle.need.kind if handle.need is not None else None


def _is_served(handle: Handle, decision: Decision, bound: BoundSource | None) -> bool:
    """Whether a save asks for values under this bound, the same one for all of them."""
    need = handle.need
    if need is None or need.kind is not Kind.VALUES or need.axes(len(handle.spec.shape)):
        return False
    return bound is not None and decision.bound == bound


@lru_cache(maxsize=4096)
def _site(site: Site) -> Site:
    """Under which the folded tensor is known."""
    return dataclasses.replace(site, field=f"{site.field}+relu")
