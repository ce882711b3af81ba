"""From a named save to what is held, and back: policy -> codec -> store, and store -> codec -> the gradient."""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter

import torch
from torch import Tensor

from lowtide import kernels
from lowtide.capture.handles import Alias, Entry, Handle
from lowtide.capture.identity import Left
from lowtide.codecs import Codec
from lowtide.coding import dither, layout
from lowtide.errors import PayloadError
from lowtide.ledger import Lease, Ledger, SiteEntry
from lowtide.policies.rules import Decision, Policy
from lowtide.records import Kind, Membership, Need, Site, TensorSpec
from lowtide.stores import Held, Store
from lowtide.witness import Witness


class Payload:
    """One encoded tensor in a store's keeping, with its lease in the ledger; shared by every save of that tensor."""

    __slots__ = ("__weakref__", "_held", "_lease", "_witness", "codec", "keeps_zeros")

    def __init__(self, codec: Codec, held: Held, ledger: Ledger, witness: Witness | None) -> None:
        self.codec = codec
        self.keeps_zeros = getattr(codec, "keep_zeros", False)
        self._held = held
        self._lease = Lease(ledger, "held", held.nbytes)
        self._witness = witness

    def decode(self, site: str) -> Tensor:
        tensor = self.codec.decode(self._held.fetch())
        if self._witness is not None:
            self._witness.examine(tensor, site)
        return tensor

    def nonzero(self) -> Tensor:
        tensor: Tensor = self.codec.nonzero(self._held.fetch())  # type: ignore[attr-defined]
        return tensor


class Coded:
    """A save that waits as a payload; ``mask`` if its backward asks only where the tensor is not zero."""

    __slots__ = ("_mask", "_payload")

    def __init__(self, payload: Payload, *, mask: bool = False) -> None:
        self._payload, self._mask = payload, mask

    def restore(self, handle: Handle) -> Tensor:
        spec = handle.spec
        with torch.no_grad(), _without_autocast(spec.device):
            tensor = self._payload.nonzero() if self._mask else self._payload.decode(handle.name)
        if tensor.numel() != spec.numel or tensor.dtype != spec.dtype or tensor.device != spec.device:
            raise PayloadError(
                f"{handle.name}: decoded a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}, "
                f"saved was {spec.dtype}, {spec.shape} on {spec.device}"
            )
        return tensor.as_strided(spec.shape, spec.stride, 0)


class Pipeline:
    """Settles entries: decides for each save of a tensor, encodes once, and lets the tensor go."""

    def __init__(self, policy: Policy, store: Store, ledger: Ledger, *, seed: int, check: bool | str) -> None:
        self.policy, self.store, self.ledger = policy, store, ledger
        self.seed, self.check = seed, check
        self.step = 0
        self.coded = 0
        self._uses: Counter[str] = Counter()

    def end_step(self) -> None:
        self.step += 1
        self._uses.clear()
        self.policy.forget()

    def resume(self, seed: int, step: int) -> None:
        """Continue at the beginning of ``step``."""
        self.seed, self.step = seed, step
        self._uses.clear()
        self.policy.forget()

    def settle(self, entry: Entry, handles: list[Handle]) -> None:
        """Every op that saved this tensor so far is known: choose how it is held [7]."""
        raw = entry.raw
        assert raw is not None, "an unsettled entry holds its tensor"
        if raw._version != entry.version:
            for handle in handles:
                self._keep(handle, entry, raw, "changed in place after it was saved")
            entry.raw = None
            return
        with torch.no_grad(), _without_autocast(raw.device):
            self._settle(entry, raw, [(handle, self._decide(handle, raw)) for handle in handles])
        entry.raw = None

    def _settle(self, entry: Entry, raw: Tensor, choices: list[tuple[Handle, Decision]]) -> None:
        for handle, decision in choices:
            if decision.codec is None:
                self._keep(handle, entry, raw, decision.reason)
        coded = [choice for choice in choices if choice[1].codec is not None]
        masks = [choice for choice in coded if choice[0].need is not None and choice[0].need.is_nonzero]
        for handle, decision in coded:
            if entry.record.is_kept:
                self._keep(handle, entry, raw, "its storage is kept anyway")
            elif (handle, decision) not in masks:
                self._encode(handle, entry, raw, decision, with_mask=bool(masks))
        for handle, decision in masks:
            if handle.kept is None:
                self._answer_mask(handle, entry, raw, decision)

    def left(self, handle: Handle, left: Left, added: int) -> None:
        """A tensor that is passed through: note it and why."""
        raw = handle.entry.record.claim() if handle.entry is not None else 0
        name = f"{handle.name} ({left.reason})"
        self.ledger.record(SiteEntry(name, handle.module, "exact", "kept", left.reason, "", 1, raw, added))

    def _decide(self, handle: Handle, raw: Tensor) -> Decision:
        assert handle.site is not None and handle.need is not None, "settled handles are named"
        need = handle.need
        if need.two_valued:
            need = handle.need = _look_for_mask(need, raw)
        return self.policy.decide(handle.site, need, handle.spec)

    def _keep(self, handle: Handle, entry: Entry, raw: Tensor, reason: str) -> None:
        lease, added = entry.record.keep(self.ledger)
        handle.kept = Alias(_view(raw, handle.spec), entry.version, lease)
        self._note(handle, entry, "kept", reason, "", added)

    def _encode(self, handle: Handle, entry: Entry, raw: Tensor, decision: Decision, *, with_mask: bool) -> None:
        codec, need = decision.codec, handle.need
        assert codec is not None and need is not None
        axes = need.axes(len(handle.spec.shape)) if decision.bound is not None else ()
        key = (codec, decision.bound, axes and (axes, handle.spec.shape, handle.spec.stride))
        payload = entry.payloads.get(key)
        added = 0
        if payload is None:
            if with_mask and need.kind is Kind.VALUES and hasattr(codec, "nonzero"):
                codec = dataclasses.replace(codec, keep_zeros=True)  # type: ignore[type-var]
            payload, added = self._store(_view(raw, handle.spec), codec, decision, handle)
            entry.payloads[key] = payload
            if payload.keeps_zeros:
                entry.payloads["nonzero"] = payload
        self._hold(handle, payload, raw, mask=False)
        self._note(handle, entry, codec.name, decision.reason, str(decision.bound or ""), added)

    def _answer_mask(self, handle: Handle, entry: Entry, raw: Tensor, decision: Decision) -> None:
        """The question "is it zero?" costs nothing where the values are stored with a code for zero."""
        payload = entry.payloads.get("nonzero")
        if payload is None:
            self._encode(handle, entry, raw, decision, with_mask=False)
            return
        self._hold(handle, payload, raw, mask=True)
        self._note(handle, entry, f"in {payload.codec.name}", decision.reason, "", 0)

    def _hold(self, handle: Handle, payload: Payload, raw: Tensor, *, mask: bool) -> None:
        """A view with gaps comes back packed, its axes in the same order; anything dense comes back as it lay."""
        handle.spec = layout.dense_spec(_view(raw, handle.spec))
        handle.kept = Coded(payload, mask=mask)

    def _store(self, x: Tensor, codec: Codec, decision: Decision, handle: Handle) -> tuple[Payload, int]:
        assert handle.site is not None and handle.need is not None
        if not layout.is_dense(tuple(x.shape), tuple(x.stride())):
            x = x.clone()
        bound = decision.bound.resolve(x, handle.need) if decision.bound is not None else None
        witness = Witness.of(x, codec, bound, self.check) if self.check else None
        codec = kernels.twin(codec, x.device, x.dtype)
        held = self.store.put(codec.encode(x, bound, seed=self._next_seed(handle.site)))
        self.coded += 1
        return Payload(codec, held, self.ledger, witness), held.nbytes

    def _next_seed(self, site: Site) -> int:
        """A stream of dither for each site, step and repeat, from the session's seed alone."""
        repeat = self._uses[site.name]
        self._uses[site.name] += 1
        return dither.mix64(self.seed, self.step, zlib.crc32(site.name.encode()), repeat)

    def _note(self, handle: Handle, entry: Entry, codec: str, reason: str, bound: str, held: int) -> None:
        assert handle.site is not None and handle.need is not None
        need, site = handle.need.kind.value, handle.site
        raw = entry.record.claim()
        self.ledger.record(SiteEntry(site.name, site.module, need, codec, reason, bound, 1, raw, held))


def _view(raw: Tensor, spec: TensorSpec) -> Tensor:
    """The entry's memory in the geometry of one of its saves."""
    if tuple(raw.shape) == spec.shape and tuple(raw.stride()) == spec.stride:
        return raw
    return raw.as_strided(spec.shape, spec.stride, raw.storage_offset())


def _look_for_mask(need: Need, raw: Tensor) -> Need:
    """Dropout on the CPU multiplies by a float mask: zeros and one other value are a bit each, exactly."""
    other = float(raw.abs().amax()) if raw.numel() else 0.0
    two_values = (raw == 0) & ~raw.signbit() | (raw == other)
    if other > 0 and bool(two_values.all()):
        mask = Membership("two_valued", (other,), (0.0, other))
        return dataclasses.replace(
            need, kind=Kind.MASK, why="zeros and one other value", membership=mask, two_valued=False
        )
    return dataclasses.replace(need, two_valued=False)


def _without_autocast(device: torch.device) -> torch.autocast:
    """Codecs compute in the precision they say, whatever autocast the model runs under."""
    return torch.autocast(device.type, enabled=False)
