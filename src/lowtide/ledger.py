"""Counts bytes: what autograd would have held, what is held instead, site by site, and why something was left alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class SiteEntry:
    """What happened at one site during the last step in which it was seen."""

    name: str
    module: str
    need: str
    codec: str
    reason: str
    bound: str = ""
    saves: int = 0
    raw_nbytes: int = 0
    held_nbytes: int = 0


class Lease:
    """Bytes held from now until the last reference to this object goes."""

    __slots__ = ("__weakref__", "_ledger", "nbytes")

    def __init__(self, ledger: Ledger, nbytes: int) -> None:
        self._ledger, self.nbytes = ledger, nbytes
        held = ledger.held = ledger.held + nbytes
        if held > ledger.held_peak:
            ledger.held_peak = held

    def __del__(self) -> None:
        self._ledger.held -= self.nbytes


@dataclass(slots=True)
class Ledger:
    """``raw``: unique storages that saved tensors would keep alive in plain training, in their own dtype.
    ``held``: payloads plus storages kept as they are. Neither counts parameters, buffers and the model's inputs, which
    somebody else holds anyway."""

    raw: int = 0
    held: int = 0
    raw_peak: int = 0
    held_peak: int = 0
    is_scarce: bool = False  # the device has little memory left: nothing is kept a little longer to save time
    raw_usual: int = 0  # the peak of the last whole step, or of this one so far if it is larger
    step: int = 0
    is_replayed: bool = False  # the step at hand is a replay of one that was counted when it was captured
    _raw_of_step: int = 0
    sites: dict[str, SiteEntry] = field(default_factory=dict)
    _fresh: set[str] = field(default_factory=set)

    def add_raw(self, nbytes: int) -> None:
        """Plain training would hold so many bytes more; who has added them takes them off ``raw`` again."""
        raw = self.raw = self.raw + nbytes
        if raw > self._raw_of_step:
            self._raw_of_step = raw
            if raw > self.raw_usual:
                self.raw_usual = raw
            if raw > self.raw_peak:
                self.raw_peak = raw

    def record(
        self, name: str, module: str, need: str, codec: str, reason: str, bound: str, raw: int, held: int
    ) -> None:
        """Add one save to its site; the first save of a step starts the site's count anew."""
        if name not in self._fresh:
            self.sites[name] = SiteEntry(name, module, need, codec, reason, bound, 1, raw, held)
            self._fresh.add(name)  # last: a thread that finds it here finds the entry, too
            return
        known = self.sites[name]
        if codec != known.codec and codec not in known.codec.split(", "):
            known.codec = f"{known.codec}, {codec}"
        known.saves += 1
        known.raw_nbytes += raw
        known.held_nbytes += held

    def end_step(self) -> None:
        self.step += 1
        if not self.is_replayed:
            self.raw_usual, self._raw_of_step = self._raw_of_step, self.raw
        self.is_replayed = False
        self._fresh.clear()

    def totals(self) -> dict[str, Any]:
        """The figures of the whole session so far."""
        totals: dict[str, Any] = {
            "step": self.step,
            "raw_nbytes_now": self.raw,
            "held_nbytes_now": self.held,
            "raw_nbytes_peak": self.raw_peak,
            "held_nbytes_peak": self.held_peak,
            "ratio": self.raw_peak / self.held_peak if self.held_peak else None,
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            totals["cuda_allocated_peak"] = torch.cuda.max_memory_allocated()
            totals["cuda_reserved_peak"] = torch.cuda.max_memory_reserved()
        return totals
