"""Store max-pooling indices by their place in the window: 9 places need 4 bits where int64 has 64."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import bitpack, layout
from lowtide.errors import DtypeError, PayloadError
from lowtide.records import Bound, Encoded

__all__ = ["WindowIndex"]


@dataclass(frozen=True, slots=True)
class WindowIndex:
    """x' = x exactly. An index i into the input plane becomes, along each axis, (coordinate - origin) / dilation.

    The encoder decodes its own codes and compares: indices that do not come from this window (or a window of more than
    256 places, or none given) are stored as int32, or as they are where the plane is too large even for that.
    """

    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    plane: tuple[int, ...] = ()

    name: ClassVar[str] = "window_index"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = False
    takes_bound: ClassVar[bool] = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype == torch.int64

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"window_index stores int64 indices, got {x.dtype}")
        spec = layout.spec_of(x)
        width = bitpack.width_for(prod(self.kernel)) if 0 < len(self.kernel) <= x.dim() else 0
        if width:
            code = self._to_window(x)
            within = (code >= 0) & (code < prod(self.kernel))
            if bool(within.all()) and torch.equal(self._to_plane(code), x):
                meta = {"width": width, "window": (self.kernel, self.stride, self.padding, self.dilation, self.plane)}
                packed = bitpack.pack(layout.memory_view(code.to(torch.uint8)), width)
                return Encoded(self.name, self.version, spec, meta, {"codes": packed})
        flat = layout.memory_view(x)
        narrow = flat.to(torch.int32)
        fits = torch.equal(narrow.long(), flat)
        return Encoded(self.name, self.version, spec, {"width": 0}, {"index": narrow if fits else flat.clone()})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, width = encoded.spec, encoded.meta["width"]
        if not width:
            index = encoded.tensors.get("index")
            if index is None or index.numel() != spec.numel or index.dtype not in (torch.int32, torch.int64):
                raise PayloadError(f"window_index payload for shape {spec.shape} lacks its indices: corrupted")
            return layout.restore(index.to(torch.int64, copy=True), spec)
        nbytes = bitpack.packed_nbytes(spec.numel, width)
        packed = encoded.tensor("codes", dtype=torch.uint8, numel=nbytes)
        code = layout.restore(bitpack.unpack(packed, width, spec.numel).long(), spec)
        index = WindowIndex(*encoded.meta["window"])._to_plane(code)
        return layout.restore(layout.memory_view(index), spec)

    def _origins(self, like: Tensor) -> list[Tensor]:
        """Along each spatial axis, the first input coordinate of every output position's window."""
        axes = len(self.kernel)
        origins = []
        for axis in range(axes):
            size = like.shape[like.dim() - axes + axis]
            origin = torch.arange(size, device=like.device) * self.stride[axis] - self.padding[axis]
            origins.append(origin.view(-1, *(1,) * (axes - 1 - axis)))
        return origins

    def _to_window(self, index: Tensor) -> Tensor:
        code = torch.zeros_like(index)
        rest = index
        places = 1
        for axis in reversed(range(len(self.kernel))):
            coordinate = rest % self.plane[axis]
            rest = rest // self.plane[axis]
            offset = coordinate - self._origins(index)[axis]
            place = offset // self.dilation[axis]
            code += place * places
            places *= self.kernel[axis]
        return code

    def _to_plane(self, code: Tensor) -> Tensor:
        index = torch.zeros_like(code)
        rest = code
        places = 1
        for axis in reversed(range(len(self.kernel))):
            place = rest % self.kernel[axis]
            rest = rest // self.kernel[axis]
            index += (self._origins(code)[axis] + place * self.dilation[axis]) * places
            places *= self.plane[axis]
        return index
