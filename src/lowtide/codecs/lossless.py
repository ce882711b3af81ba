"""Every bit of the values, in less room: a bitmap of zeros, then byte planes through the entropy stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.coding import bitpack, byte_planes, integers, layout
from lowtide.errors import DtypeError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["Lossless"]

_FEW_ZEROS = 1 / 64  # of the values, below which a bit for every value costs more than it saves


@dataclass(frozen=True, slots=True)
class Lossless:
    """x' = x, bit for bit: NaN payloads, signed zeros and subnormals included. Any float dtype, shape, dense layout.

    Where one value in 64 or more is (positive) zero, a bitmap says which are and only the others are stored. Their
    bytes are sorted by place (``lowtide.coding.byte_planes``); a place whose bytes have an entropy below 7.5 bits is
    coded, the others are stored as they are. A payload exceeds the values at most by a few heads.

    ``coder`` is one of ``lowtide.coding.integers``. ``keep_zeros`` changes nothing: zeros are always told from the
    rest, so that ``nonzero`` answers where a ReLU asks.
    """

    coder: str = "blocks"
    keep_zeros: bool = False

    name: ClassVar[str] = "lossless"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        integers.require_coder(self.coder)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point and dtype.itemsize in byte_planes.WORDS

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"lossless stores floating point tensors, got {x.dtype}")
        spec = layout.spec_of(x)
        words = layout.memory_view(x).view(byte_planes.WORDS[x.dtype.itemsize])
        zero = words == 0
        parts = {}
        with_bitmap = has_bitmap(int(zero.sum()), spec)
        if with_bitmap:
            parts["zeros"] = bitpack.pack(zero.to(torch.uint8), 1)
            words = words[~zero]
        planes, coded = byte_planes.write(words, self.coder)
        return self.payload(spec, with_bitmap, words.numel(), planes, {**parts, **coded})

    def payload(
        self, spec: TensorSpec, bitmap: bool, stored: int, planes: list[dict[str, Any]], parts: dict[str, Tensor]
    ) -> Encoded:
        """Of ``stored`` values in ``planes``; ``parts`` begin with the bitmap, if there is one."""
        meta: dict[str, Any] = {"bitmap": bitmap, "stored": stored, "planes": tuple(planes)}
        return Encoded(self.name, self.version, spec, meta, parts)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, meta = encoded.spec, encoded.meta
        words = byte_planes.read(encoded, meta["planes"], meta["stored"], byte_planes.WORDS[spec.dtype.itemsize])
        if meta["bitmap"]:
            nbytes = bitpack.packed_nbytes(spec.numel, 1)
            zeros = bitpack.unpack(encoded.tensor("zeros", dtype=torch.uint8, numel=nbytes), 1, spec.numel)
            rest = words
            words = torch.zeros(spec.numel, dtype=rest.dtype, device=spec.device)
            words[zeros == 0] = rest
        return layout.restore(words.view(spec.dtype), spec)

    def nonzero(self, encoded: Encoded) -> Tensor:
        """Where x is not zero (NaN is not), as ones and zeros in its dtype."""
        x = self.decode(encoded)
        return (x != 0).to(x.dtype)


def has_bitmap(zeros: int, spec: TensorSpec) -> bool:
    """Whether so many zeros are worth a bit for every value."""
    return zeros >= max(spec.numel * _FEW_ZEROS, 1)
