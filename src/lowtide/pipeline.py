"""From a named save to what is held, and back: policy -> codec -> store, and store -> codec -> the gradient."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.ambient import Plainly
from lowtide.bounds import BoundRule
from lowtide.capture.handles import Alias, Entry, Handle
from lowtide.capture.identity import Left
from lowtide.capture.makers import Maker
from lowtide.codecs import Codec
from lowtide.coding import dither, grid, layout, probabilities
from lowtide.graphs.recording import Recording
from lowtide.joint import Joiner
from lowtide.kernels import _tickets
from lowtide.kernels._fold import Folding
from lowtide.kernels._packing import packed
from lowtide.kernels._probabilities import rounded_of_logs
from lowtide.ledger import Ledger
from lowtide.payloads import Payload, Pending, Waiting
from lowtide.policies.rules import Decision, Policy
from lowtide.records import Bound, Kind, Membership, Need, Site, TensorSpec
from lowtide.restoring import Coded, Remade
from lowtide.sites import Memo, Sites
from lowtide.stores import Store
from lowtide.witness import Witness

_MOVED_RATE = 1 / 32  # words a value to make room for where a bound has changed since the last payload: one bit

_REPLAYED = 1 << 63  # in place of a step's number, for the dither of graphs
_NOT_KNOWN = "no payload of it was there before the graph was captured, or its layout is beyond the kernels"
_NOT_LOOKED_AT = "nobody can look for a mask of two values while a graph is captured"


@dataclasses.dataclass(slots=True)
class Recipe:
    """How tensors of one site and one geometry are stored: all that stays as it is from step to step."""

    decision: Decision
    spec: TensorSpec
    with_mask: bool
    key: int  # saves of one tensor under the same key share a payload
    codec: Codec
    name: str  # of the codec
    is_dense: bool
    is_ticketed: bool
    keeps_zeros: bool
    memo: Memo | None = None


class Pipeline:
    """Settles entries: decides for each save of a tensor, encodes once, and lets the tensor go."""

    def __init__(
        self,
        policy: Policy,
        store: Store,
        ledger: Ledger,
        *,
        seed: int,
        check: bool | str,
        refresh: int,
        waits: bool = False,
        joins: bool = False,
    ) -> None:
        self.policy, self.store, self.ledger = policy, store, ledger
        self.seed, self.check = seed, check
        self.sites = Sites(refresh, waits=waits)
        self.step = 0
        self.coded = 0
        self._uses: dict[str, int] = {}
        self._recipes: dict[str, Recipe] = {}
        self._keys: dict[Any, int] = {}
        self._stream: int | None = None  # of dither, for this step
        self._waiting = Waiting(ledger)
        self._joiner = Joiner(self) if joins else None
        self._recording: Recording | None = None

    @contextlib.contextmanager
    def recorded(self, recording: Recording) -> Iterator[None]:
        """What is saved inside belongs to a graph, or to its rehearsal; their dither does not depend on the step."""
        self.finish()
        self._recording, self._stream = recording, dither.mix64(self.seed, _REPLAYED)
        self._uses.clear()
        try:
            yield
        finally:
            self._recording, self._stream = None, None

    def finish(self) -> None:
        """Wait until every encoder has reported, and for the models that are being fitted."""
        self._waiting.finish()
        self.sites.wait()

    def end_step(self, *, moved: bool) -> None:
        """A step has ended; ``moved`` if bounds may have changed."""
        self.step += 1
        self._stream = None
        self._uses.clear()
        self._waiting.end_step()
        if moved:
            self._forget()

    def resume(self, seed: int, step: int) -> None:
        """Continue at the beginning of ``step``."""
        self.seed, self.step = seed, step
        self._stream = None
        self._uses.clear()
        self._forget()

    def _forget(self) -> None:
        self.policy.forget()
        self._recipes.clear()
        self._keys.clear()
        if self._joiner is not None:
            self._joiner.forget()

    def settle(self, entry: Entry, handles: list[Handle]) -> None:
        """Every op that saved this tensor so far is known: choose how it is held [7]."""
        if self._joiner is not None:
            self._joiner.settle(entry, handles)
        else:
            self.settle_alone(entry, handles)

    def settle_rest(self) -> None:
        """No other tensor is settled for now."""
        if self._joiner is not None:
            self._joiner.finish()

    def settle_alone(self, entry: Entry, handles: list[Handle]) -> None:
        """The same, whatever other tensors there are."""
        raw = entry.raw
        assert raw is not None, "an unsettled entry holds its tensor"
        if raw._version != entry.version:
            entry.maker = None
            for handle in handles:
                self._keep(handle, entry, raw, "changed in place after it was saved")
        elif torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with Plainly("cuda" if raw.is_cuda else raw.device.type):
                self._settle(entry, raw, handles)
        else:
            self._settle(entry, raw, handles)
        entry.raw = None

    def _settle(self, entry: Entry, raw: Tensor, handles: list[Handle]) -> None:
        choices = [(handle, self.decide(handle, raw)) for handle in handles]
        maker, entry.maker = entry.maker, None
        if maker is not None and _can_be_remade(maker, entry, choices):
            self._leave_to(maker, entry, handles)
            return
        masks = []
        for handle, decision in choices:
            if decision.codec is None:
                self._keep(handle, entry, raw, decision.reason)
            elif handle.need is not None and handle.need.is_nonzero:
                masks.append(handle)
        for handle, decision in choices:
            if handle.kept is None and entry.record.is_kept:
                self._keep(handle, entry, raw, "its storage is kept anyway")
            elif handle.kept is None and handle not in masks:
                self._encode(handle, entry, raw, decision, with_mask=bool(masks))
        for handle, decision in choices if masks else ():
            if handle.kept is None:
                self._answer_mask(handle, entry, raw, decision)

    def _leave_to(self, maker: Maker, entry: Entry, handles: list[Handle]) -> None:
        """Hold nothing of a tensor that can be made again."""
        self.coded += 1  # nothing is held of it: that is as good
        reason = f"made of {' and '.join(source.name for source in maker.sources)}"
        remade = Remade(maker, len(handles))
        for handle in handles:
            handle.kept = remade
            self.note(handle, entry, f"again by {maker.op}", reason, "", 0)

    def left(self, handle: Handle, left: Left, added: int) -> None:
        """A tensor that is passed through: note it and why."""
        raw = handle.entry.record.claim() if handle.entry is not None else 0
        name = f"{handle.name} ({left.reason})"
        self.ledger.record(name, handle.module, "exact", "kept", left.reason, "", raw, added)

    def decide(self, handle: Handle, raw: Tensor) -> Decision:
        assert handle.site is not None and handle.need is not None, "settled handles are named"
        need = handle.need
        if need.two_valued:
            need = handle.need = self._look_for_mask(handle.site, need, raw)
        return self.policy.decide(handle.site, need, handle.spec)

    def has_bound(self, handle: Handle) -> bool:
        """Whether a save that is named is held exactly, or under a bound."""
        assert handle.site is not None and handle.need is not None
        codec = self.policy.decide(handle.site, handle.need, handle.spec).codec
        return codec is None or bool(getattr(codec, "takes_bound", False))

    def _look_for_mask(self, site: Site, need: Need, raw: Tensor) -> Need:
        """Dropout on the CPU multiplies by a float mask: zeros and one other value are a bit each, exactly."""
        if self._is_capturing and self.sites.may_be_mask(site):
            return dataclasses.replace(need, kind=Kind.EXACT, why=_NOT_LOOKED_AT, two_valued=False)
        if self.sites.may_be_mask(site) and raw.numel():
            other = float(raw.abs().amax())
            two_values = (raw == 0) & ~raw.signbit() | (raw == other)
            if other > 0 and bool(two_values.all()):
                mask = Membership("two_valued", (other,), (0.0, other))
                return dataclasses.replace(
                    need, kind=Kind.MASK, why="zeros and one other value", membership=mask, two_valued=False
                )
            self.sites.is_no_mask(site)
        return dataclasses.replace(need, two_valued=False)

    def _keep(self, handle: Handle, entry: Entry, raw: Tensor, reason: str) -> None:
        lease, added = entry.record.keep()
        handle.kept = Alias(_view(raw, handle.spec), entry.version, lease)
        self.note(handle, entry, "kept", reason, "", added)

    def _encode(self, handle: Handle, entry: Entry, raw: Tensor, decision: Decision, with_mask: bool) -> None:
        assert handle.site is not None
        recipe = self._recipe_for(handle, decision, with_mask)
        payload = entry.payload(recipe.key)
        added = 0
        if payload is None:
            x = raw if entry.spec is recipe.spec else _view(raw, recipe.spec)
            if not recipe.is_dense:
                x = packed(x)
            seen = None
            if decision.as_probabilities:
                seen = probabilities.of_logs(x) if self.check else None
                x = self._as_probabilities(x, recipe, handle.site)
            stored = self._record(x, recipe, handle) if self._is_capturing else self._store(x, recipe, handle, seen)
            if stored is None:
                self._keep(handle, entry, raw, _NOT_KNOWN)
                return
            payload, added = stored
            entry.share(recipe.key, payload)
            if recipe.keeps_zeros:
                entry.share("nonzero", payload)
        if not recipe.is_dense:
            handle.spec = _packed_spec(raw, handle.spec)
        gates = handle.need is not None and handle.need.is_nonzero
        handle.kept = Coded(payload, gates=gates, logs=decision.as_probabilities)
        self.note(handle, entry, recipe.name, decision.reason, decision.bound_text, added)

    def encode_pair(self, pair: Folding, decision: Decision, handle: Handle) -> tuple[Payload, int] | None:
        """A payload of what a pair is folded into, which goes by the name of ``handle``, and its bytes; None where
        nothing may wait and the payload's size is not known."""
        recipe = self._recipe_for(handle, decision, with_mask=False)
        codec: Any = recipe.codec
        x: Any = pair  # which looks like a tensor to all but the kernels
        if not hasattr(codec, "folding"):
            x = pair.folded()
        elif self.check:  # what is promised about the folded tensor is looked at, too
            x, recipe.codec = pair.folded(), codec.folding(None)
        else:
            recipe.codec = codec.folding(pair.source.dtype)
        return self._record(x, recipe, handle) if self._is_capturing else self._store(x, recipe, handle)

    def measure(self, x: Tensor, decision: Decision, handle: Handle) -> Bound | None:
        """The bound of a tensor; None where nothing is measured and it is not known."""
        assert decision.bound is not None and handle.site is not None and handle.need is not None
        if not self._is_capturing:
            return self.sites.measure(x, decision.bound, handle.site, handle.need).bound
        assert self._recording is not None
        memo = self.sites.measured(x, decision.bound, handle.site, handle.need)
        return self._recording.bound(memo) if memo is not None else None

    def witness(self, x: Tensor, decision: Decision, bound: Bound | None) -> Witness | None:
        """Of what is promised about a tensor that is not restored by its codec alone."""
        if not self.check or self._is_capturing or decision.codec is None:
            return None
        witness = Witness.of(x, decision.codec, bound, self.check)
        return witness if witness is None or bound is None else witness.allowing(torch.finfo(x.dtype).eps)

    @property
    def waiting(self) -> Waiting:
        return self._waiting

    @property
    def _is_capturing(self) -> bool:
        return self._recording is not None and self._recording.is_capturing

    def _recipe_for(self, handle: Handle, decision: Decision, with_mask: bool) -> Recipe:
        assert handle.site is not None
        recipe = self._recipes.get(handle.site.name)
        if (
            recipe is None
            or recipe.decision is not decision
            or recipe.spec is not handle.spec
            or recipe.with_mask is not with_mask
        ):
            recipe = self._recipes[handle.site.name] = self._recipe(handle, decision, with_mask)
        return recipe

    def _recipe(self, handle: Handle, decision: Decision, with_mask: bool) -> Recipe:
        codec, need, spec = decision.codec, handle.need, handle.spec
        assert codec is not None and need is not None
        axes = need.axes(len(spec.shape)) if decision.bound is not None else ()
        like = (codec, decision.bound, axes and (axes, spec.shape, spec.stride))
        key = self._keys.setdefault(like, len(self._keys))
        if with_mask and need.kind is Kind.VALUES and hasattr(codec, "nonzero"):
            codec = _keeping_zeros(codec)  # type: ignore[arg-type]
        codec = kernels.twin(codec, spec.device, torch.float32 if decision.as_probabilities else spec.dtype)
        is_dense, is_ticketed = layout.is_dense(spec.shape, spec.stride), getattr(codec, "ticketed", False)
        keeps_zeros = getattr(codec, "keep_zeros", False)
        return Recipe(decision, spec, with_mask, key, codec, codec.name, is_dense, is_ticketed, keeps_zeros)

    def _answer_mask(self, handle: Handle, entry: Entry, raw: Tensor, decision: Decision) -> None:
        """The question "is it zero?" costs nothing where the values are stored with a code for zero."""
        payload = entry.payload("nonzero")
        if payload is None:
            self._encode(handle, entry, raw, decision, with_mask=False)
            return
        if not layout.is_dense(handle.spec.shape, handle.spec.stride):
            handle.spec = _packed_spec(raw, handle.spec)
        handle.kept = Coded(payload, mask=True, gates=True)
        self.note(handle, entry, f"in {payload.codec.name}", decision.reason, "", 0)

    def _as_probabilities(self, logs: Tensor, recipe: Recipe, site: Site) -> Tensor:
        """As whole units of the codec's grid, so that it adds no bias however small they are."""
        rule = recipe.decision.bound
        assert isinstance(rule, BoundRule), "a bound on probabilities is a number"
        unit = grid.unit_of(rule.value, torch.float32, "stochastic")
        number = self._recording.replay.number if self._recording is not None else None
        return rounded_of_logs(logs, unit, self._next_seed(site), number)

    def _store(self, x: Tensor, recipe: Recipe, handle: Handle, seen: Tensor | None = None) -> tuple[Payload, int]:
        """``seen`` is what the promise is about, where that is not ``x`` itself."""
        site, need, codec, memo = handle.site, handle.need, recipe.codec, recipe.memo
        assert site is not None and need is not None
        options: dict[str, Any] = {"seed": self._next_seed(site)}
        bound = None
        rate = 0.0
        if recipe.decision.bound is not None:
            if memo is None:
                memo = recipe.memo = self.sites.recall(x, recipe.decision.bound, site, need)
            extra = _MOVED_RATE if memo.moved else 0.0
            self.sites.prepare(memo, x, codec, site, need)
            rate = memo.rate + extra
            bound = memo.bound
            if memo.plan is not None:
                options["plan"] = memo.plan
        witness = Witness.of(x if seen is None else seen, codec, bound, self.check) if self.check else None
        ticket = None
        if recipe.is_ticketed and (memo is None or memo.rate):
            ticket = _tickets.take()
            options["ticket"] = ticket.word
            if memo is not None:
                options["capacity"] = codec.room(rate * x.numel())  # type: ignore[attr-defined]
        if self._recording is not None and getattr(codec, "takes_replay", False):
            options["replay"] = self._recording.replay
        encoded = codec.encode(x, bound, **options)
        store = recipe.decision.store or self.store
        held = store.put(encoded)
        self.coded += 1
        payload = Payload(codec, held, self.ledger, witness, self._waiting)
        if self._recording is not None:
            self._recording.enlist(payload)
            if memo is not None:
                self._recording.rehearse(x, codec, memo)
        if ticket is not None:
            self._waiting.add(Pending(payload, encoded, x, memo, ticket, store, self._waiting))
        elif memo is not None and "words" in encoded.tensors:
            memo.rate = encoded.tensors["words"].numel() / max(x.numel(), 1)
            memo.rated = getattr(memo.plan, "model", None)
        return payload, held.nbytes

    def _record(self, x: Tensor, recipe: Recipe, handle: Handle) -> tuple[Payload, int] | None:
        """The same while a graph is captured: nothing is learnt and nothing waits; None where that cannot be."""
        site, need, recording = handle.site, handle.need, self._recording
        assert site is not None and need is not None and recording is not None
        codec: Any = recipe.codec
        store = recipe.decision.store or self.store
        recording.check(codec, store, site.name)
        if recipe.decision.bound is None:
            encoded = recording.encode(x, codec, site.name, self._next_seed(site))
        else:
            memo = self.sites.known(x, recipe.decision.bound, site, need)
            if memo is None or not codec.reaches(x, memo.plan):
                return None
            bound, plan = self.sites.as_known(memo, x, codec, need)
            seed = self._next_seed(site)
            encoded = recording.encode_bounded(x, codec, site.name, seed, memo, bound, plan)
        held = store.put(encoded)
        self.coded += 1
        payload = Payload(codec, held, self.ledger, None, self._waiting)
        recording.enlist(payload)
        return payload, held.nbytes

    def let_go(self) -> None:
        """Let go of the tensors whose encoders have reported; does not wait."""
        self._waiting.let_go()

    def _next_seed(self, site: Site) -> int:
        """A stream of dither for each site, step and repeat, from the session's seed alone."""
        repeat = self._uses.get(site.name, 0)
        self._uses[site.name] = repeat + 1
        if self._stream is None:
            self._stream = dither.mix64(self.seed, self.step)
        return dither.mix64(site.digest, repeat, state=self._stream)

    def note(self, handle: Handle, entry: Entry, codec: str, reason: str, bound: str, held: int) -> None:
        assert handle.site is not None and handle.need is not None
        site, raw = handle.site, entry.record.claim()
        self.ledger.record(site.name, site.module, handle.need.kind._value_, codec, reason, bound, raw, held)


def _can_be_remade(maker: Maker, entry: Entry, choices: list[tuple[Handle, Decision]]) -> bool:
    """Whether every save of the tensor asks for values that its maker's sources give, as exactly as it is to be."""
    if (
        entry.record.is_kept
        or not maker.has_parts
        or any(
            handle.need is None or handle.need.kind is not Kind.VALUES or decision.is_ruled
            for handle, decision in choices
        )
    ):
        return False
    stored = [source.kept for source in maker.sources if type(source.kept) is not Alias]
    if not stored and not maker.is_chain:
        return maker.is_exact
    return all(map(_is_bounded, stored)) and all(decision.bound is not None for _, decision in choices)


def _is_bounded(kept: Any) -> bool:
    """Whether a save has an error that a bound, its own or those of what it is made of, keeps small."""
    if type(kept) is Remade:
        return all(type(source.kept) is Alias or _is_bounded(source.kept) for source in kept.maker.sources)
    return type(kept) is Coded and getattr(kept.payload.codec, "takes_bound", False)


@cache
def _keeping_zeros(codec: Codec) -> Codec:
    return dataclasses.replace(codec, keep_zeros=True)  # type: ignore[type-var]


def _view(raw: Tensor, spec: TensorSpec) -> Tensor:
    """The entry's memory in the geometry of one of its saves."""
    if raw.shape == spec.shape and raw.stride() == spec.stride:
        return raw
    return raw.as_strided(spec.shape, spec.stride, raw.storage_offset())


def _packed_spec(raw: Tensor, spec: TensorSpec) -> TensorSpec:
    """A view with gaps comes back packed, its axes in the same order; anything dense comes back as it lay."""
    return layout.dense_spec(_view(raw, spec))
