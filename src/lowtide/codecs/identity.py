"""Store the values as they are, packed: bit-equal, and free of the rest of a storage that a view would keep alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import layout
from lowtide.records import Bound, Encoded

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """x' = x, bit for bit: NaN payloads, signed zeros and subnormals included. Any dtype, any shape."""

    name: ClassVar[str] = "identity"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    def accepts(self, dtype: torch.dtype) -> bool:
        return True

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        return Encoded(self.name, self.version, layout.spec_of(x), {}, {"raw": layout.memory_view(x).clone()})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        raw = encoded.tensor("raw", dtype=encoded.spec.dtype, numel=encoded.spec.numel)
        return layout.restore(raw.clone(), encoded.spec)
