"""Min-max groups for what a norm reads: each channel or row from its own mean, in units of its own spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide import bounds
from lowtide.codecs import Codec
from lowtide.codecs.groups import Groups
from lowtide.codecs.sample_groups import SampleGroups
from lowtide.coding import bitpack, layout, minmax
from lowtide.errors import DtypeError, PayloadError, PolicyError
from lowtide.records import Bound, Encoded, Kind, Need, Per, TensorSpec

__all__ = ["NormGroups"]

_OWN = ("centre", "unit")  # parts of a payload that are not those of groups


@dataclass(frozen=True, slots=True)
class NormGroups:
    """|x' - x| <= scale of its group times the unit of its channel, before x' is rounded to its dtype.

    A norm divides each channel (batch norm), channel of a sample (group norm) or row (layer norm) by its own spread. So
    an error counts in that unit, and where a group mixes a wide channel with a narrow one, the narrow one drowns in it.
    Where groups do mix them (channels_last, small maps, short rows), values are coded as (x - centre) / unit: centre is
    the mean, and unit the power of two next above the standard deviation, both in bfloat16 (float64 for float64). Where
    ``group`` neighbours in memory are of one channel as a rule, values are coded as they are.

    ``per`` and ``row_dims`` are those of the need. The rest is codec ``groups``, or ``sample_groups`` where ``bits`` is
    an average between two widths: dtypes, layouts, NaN and inf.
    """

    bits: float = 2
    group: int = 256
    rounding: str = "stochastic"
    per: str = "channel"
    row_dims: int = 1

    name: ClassVar[str] = "norm_groups"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.per not in {per.value for per in Per}:
            raise PolicyError(f"norm_groups goes by {', '.join(per.value for per in Per)}; got {self.per!r}")
        self.coders()

    def coders(self) -> tuple[Groups | SampleGroups]:
        return _coders(self.bits, self.group, self.rounding)

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.coders()[0].accepts(dtype)

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        return self.encode_by(self.coders(), x, seed)

    def encode_by(self, coders: Sequence[Codec], x: Tensor, seed: int) -> Encoded:
        """By this codec for groups, which may be a twin."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"norm_groups stores the dtypes of groups; got {x.dtype}")
        spec = layout.spec_of(x)
        own: dict[str, Tensor] = {}
        if self._mixes(spec):
            centre, unit = self._measure(x)
            # In one pass: units are powers of two, so that their products are exact.
            x = torch.addcmul(-centre / unit, x, 1 / unit, out=torch.empty_like(x))
            own = {"centre": centre.flatten(), "unit": unit.flatten()}
        coded = coders[0].encode(x, seed=seed)
        meta: dict[str, Any] = {"bits": self.bits, "group": self.group, "per": self.per, "row_dims": self.row_dims}
        return Encoded(self.name, self.version, spec, meta, {**coded.tensors, **own})

    def decode(self, encoded: Encoded) -> Tensor:
        writer = self.of_payload(encoded)
        return writer.decode_by(writer.coders(), encoded)

    @classmethod
    def of_payload(cls, encoded: Encoded) -> NormGroups:
        """The codec that wrote a payload, but for its rounding, which decoding does not ask for."""
        encoded.require(cls.name, cls.version)
        try:
            meta = encoded.meta
            return cls(meta["bits"], meta["group"], per=meta["per"], row_dims=meta["row_dims"])
        except (KeyError, PolicyError) as error:
            raise PayloadError(f"norm_groups payload: its options cannot be: {error}: corrupted") from error

    def decode_by(self, coders: Sequence[Codec], encoded: Encoded) -> Tensor:
        """A payload that this codec wrote."""
        spec, plain = encoded.spec, self.coders()[0]
        tensors = {name: part for name, part in encoded.tensors.items() if name not in _OWN}
        meta = {"bits": plain.bits, "group": plain.group}
        x = coders[0].decode(Encoded(plain.name, plain.version, spec, meta, tensors))
        if not self._mixes(spec):
            return x
        sizes = [size if axis in self._axes(spec) else 1 for axis, size in enumerate(spec.shape)]
        dtype = minmax.scale_dtype(spec.dtype)
        centre, unit = (encoded.tensor(name, dtype=dtype, numel=prod(sizes)).view(sizes) for name in _OWN)
        x = torch.addcmul(centre, x, unit, out=x)
        return x.clamp_(-(largest := torch.finfo(x.dtype).max), largest) if x.dtype == torch.float16 else x

    def _axes(self, spec: TensorSpec) -> tuple[int, ...]:
        return _axes(self.per, self.row_dims, len(spec.shape))

    def _mixes(self, spec: TensorSpec) -> bool:
        """Whether groups reach over channels or rows as a rule."""
        strides = [spec.stride[axis] for axis in self._axes(spec) if spec.shape[axis] > 1]
        return bool(strides) and spec.numel > 0 and min(strides) < self.group

    def _measure(self, x: Tensor) -> tuple[Tensor, Tensor]:
        axes, dtype = self._axes(TensorSpec.of(x)), minmax.scale_dtype(x.dtype)
        over = [axis for axis in range(x.dim()) if axis not in axes]
        some = bounds.sample(x, axes).to(minmax.work_dtype(x.dtype))
        if not over:
            return torch.zeros_like(some, dtype=dtype), torch.ones_like(some, dtype=dtype)
        variance, mean = torch.var_mean(some, over, correction=0, keepdim=True)
        exponent = torch.frexp(variance.sqrt()).exponent.clamp(-100, 100)
        sound = variance.isfinite() & (variance > 0)
        unit = torch.where(sound, torch.ldexp(torch.ones_like(mean), exponent), 1)
        return torch.where(mean.isfinite(), mean, 0).to(dtype), unit.to(dtype)


@cache
def _coders(bits: float, group: int, rounding: str) -> tuple[Groups | SampleGroups]:
    if bits in bitpack.WIDTHS:
        return (Groups(int(bits), group, rounding),)
    return (SampleGroups(bits, group, rounding),)


@cache
def _axes(per: str, row_dims: int, dims: int) -> tuple[int, ...]:
    return Need(Kind.VALUES, "", per=Per(per), row_dims=row_dims).axes(dims)
