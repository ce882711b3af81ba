"""Store which branch backward takes at each element: one or two bits, exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import bitpack, layout, membership
from lowtide.errors import DtypeError, PayloadError, PolicyError
from lowtide.records import Bound, Encoded, Membership

__all__ = ["BitMask"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class BitMask:
    """x' = values[test(x, *params)]: a stand-in that falls into the same class as x, so backward takes the same branch.

    NaN and inf fall into the class that the op's own comparisons give them. Any shape, any dense layout; bool and float
    dtypes whose rounding keeps the stand-ins in their classes (others are refused, never stored wrongly).
    """

    test: str = "truth"
    params: tuple[float, ...] = ()
    values: tuple[float, ...] = (0.0, 1.0)

    name: ClassVar[str] = "bitmask"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if len(self.values) not in (2, 4):
            raise PolicyError(f"bitmask has a stand-in for each of its 2 or 4 classes, got {len(self.values)}")

    @property
    def membership(self) -> Membership:
        return Membership(self.test, self.params, self.values)

    def accepts(self, dtype: torch.dtype) -> bool:
        if self.test == "truth":
            return dtype == torch.bool
        return dtype in _DTYPES and membership.stands(self.membership, dtype)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"bitmask {self.test}{self.params} cannot stand in for {x.dtype}: keep this tensor exact")
        width = bitpack.width_for(len(self.values))
        codes = membership.classify(layout.memory_view(x), self.membership)
        meta = {"width": width, "values": self.values}
        return Encoded(self.name, self.version, layout.spec_of(x), meta, {"codes": bitpack.pack(codes, width)})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, width = encoded.spec, encoded.meta["width"]
        if width not in bitpack.WIDTHS or len(encoded.meta["values"]) != 1 << width:
            raise PayloadError(f"bitmask payload: {len(encoded.meta['values'])} values for {width} bits: corrupted")
        nbytes = bitpack.packed_nbytes(spec.numel, width)
        codes = bitpack.unpack(encoded.tensor("codes", dtype=torch.uint8, numel=nbytes), width, spec.numel)
        if spec.dtype == torch.bool:
            return layout.restore(codes.bool(), spec)
        values = torch.tensor(encoded.meta["values"], dtype=torch.float64).to(spec.dtype).to(spec.device)
        return layout.restore(values[codes.long()], spec)

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        """What ReLU's backward makes of ``gradient``, if its branches are stored; it lies in memory as they did."""
        return membership.gated(gradient, self.decode(encoded))
