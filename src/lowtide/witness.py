"""Holds a promise to account: keeps samples of what was saved and compares them with what comes back."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.codecs import Codec
from lowtide.coding import layout, membership
from lowtide.errors import BoundViolationError
from lowtide.records import Bound, TensorSpec

SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class Witness:
    """Elements of a saved tensor at ``index`` (memory order; None: all of them) and what was promised about each."""

    index: Tensor | None
    saved: Tensor
    promised: Tensor | None
    question: Any = None

    @classmethod
    def of(cls, x: Tensor, codec: Codec, bound: Bound | None, check: bool | str) -> Witness | None:
        """A witness for what ``codec`` promises about ``x``; None if it promises nothing about values."""
        question = getattr(codec, "membership", None)
        lossless = codec.name in ("identity", "lossless", "window_index")
        if bound is None and question is None and not lossless:
            return None
        flat = layout.memory_view(x)
        index = None
        if check != "full" and flat.numel() > SAMPLES:
            spread = torch.linspace(0, flat.numel() - 1, SAMPLES, dtype=torch.float64, device=x.device)
            index = spread.long()
        promised = None
        if bound is not None:
            at = torch.arange(flat.numel(), device=x.device) if index is None else index
            entries = layout.entries_at(layout.index_terms(TensorSpec.of(x), bound.axes), at)
            promised = bound.value.to(device=x.device, dtype=torch.float64).flatten()[entries]
        return cls(index, flat.clone() if index is None else flat[index], promised, question)

    def allowing(self, eps: float) -> Witness:
        """The same for values that are rounded on their way, as often as not by an op that has made them."""
        assert self.promised is not None, "there is a bound"
        return replace(self, promised=self.promised + eps * self.saved.double().abs())

    def examine(self, decoded: Tensor, site: str) -> None:
        """Raise if any sampled element broke its promise."""
        flat = layout.memory_view(decoded)
        seen = flat if self.index is None else flat[self.index]
        if self.question is not None:
            wrong = membership.classify(seen, self.question) != membership.classify(self.saved, self.question)
            if bool(wrong.any()):
                raise BoundViolationError(f"{site} (class of element)", 0.0, float(wrong.sum()))
            return
        same = (seen == self.saved) | ((seen != seen) & (self.saved != self.saved))
        error = torch.where(same, 0.0, (seen - self.saved).abs() if seen.is_complex() else _distance(seen, self.saved))
        promised = torch.zeros_like(error) if self.promised is None else self.promised
        excess = torch.where(error.isnan() | ~same & (promised == 0), torch.inf, error - promised)
        if bool((excess > 0).any()):
            worst = int(excess.argmax())
            raise BoundViolationError(site, float(promised[worst]), float(error[worst]))


def _distance(seen: Tensor, saved: Tensor) -> Tensor:
    return (seen.double() - saved.double()).abs()
