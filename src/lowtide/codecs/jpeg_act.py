"""Activation maps as JPEG would: a cosine transform, a table of steps, and an entropy coder, as in JPEG-ACT."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide.coding import dct, dither, escapes, integers, layout, minmax, planes
from lowtide.coding.planes import Planes
from lowtide.errors import DtypeError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["JpegAct"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("dither", "nearest")
_LARGEST = 127.0  # of a channel, in the units of the tables
_PUBLISHED_LARGEST = 4.5 * 32  # of which what is beyond 127 was clipped
# As published with JPEG-ACT (Evans, Liu, Aamodt, ISCA 2020): optL served in the first epochs, optH in all others.
_TABLES = {
    "optL": (
        (8, 7, 7, 7, 7, 6, 6, 6),
        (8, 7, 7, 7, 6, 6, 6, 6),
        (7, 7, 6, 6, 6, 6, 6, 6),
        (7, 6, 6, 6, 6, 6, 5, 5),
        (7, 6, 6, 6, 6, 6, 5, 5),
        (7, 6, 6, 6, 6, 6, 5, 5),
        (7, 6, 6, 6, 6, 5, 5, 5),
        (6, 6, 6, 6, 5, 5, 5, 5),
    ),
    "optH": (
        (8, 26, 25, 25, 24, 24, 23, 22),
        (26, 24, 24, 23, 22, 22, 21, 20),
        (26, 24, 24, 23, 22, 21, 20, 20),
        (25, 23, 23, 22, 21, 21, 20, 19),
        (25, 23, 22, 21, 21, 20, 19, 19),
        (24, 22, 21, 20, 20, 20, 19, 19),
        (23, 21, 20, 20, 19, 19, 19, 19),
        (22, 20, 20, 19, 19, 19, 19, 19),
    ),
}


@dataclass(frozen=True, slots=True)
class JpegAct:
    """No bound on an element. The squared errors of a block sum to about those of its codes: table**2 / 12 each.

    A channel (axis 1 of maps, a feature of rows) is scaled to +-127 by its largest magnitude. Maps of 8 x 8 and more go
    through the cosine transform (``lowtide.coding.dct``) and each coefficient is divided by its entry of ``table``;
    smaller maps and rows are rounded as they are, to 8 bits. Codes go through the entropy stage, whose ``coder`` is one
    of ``lowtide.coding.integers``.

    With dither, x' is unbiased: code = rint(c / step + u), c' = (code - u) * step, u the element's dither.
    ``"nearest"`` rounds c / step. NaN and inf come back bit for bit and count as zeros in the transform; channels of
    zeros come back exactly. Any shape, any dense layout: payloads do not depend on strides.

    ``faithful`` is what was published: the largest magnitude becomes 144 and what exceeds 127 is clipped, values and
    coefficients are rounded to integers before the table, and the division by it truncates, so that values shrink.
    """

    table: str = "optH"
    rounding: str = "dither"
    coder: str = "blocks"
    faithful: bool = False

    name: ClassVar[str] = "jpeg_act"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.table not in _TABLES:
            raise UnknownNameError("table of jpeg_act", self.table, _TABLES)
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)
        integers.require_coder(self.coder)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Of the coefficients of a block, by frequency, where the largest magnitude of a channel is 127."""
        return _TABLES[self.table]

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        if not self.accepts(x.dtype):
            raise DtypeError(f"jpeg_act stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        spec, maps = layout.spec_of(x), Planes.of(x.shape)
        lost = ~x.isfinite()
        values = maps.split(torch.where(lost, 0, x))
        peak = _peaks(values, spec)
        codes = torch.empty((maps.count, maps.area), dtype=torch.int16, device=x.device)
        for start, stop in maps.slabs(x.device):
            at = _peak_of(peak, range(start, stop), spec).to(minmax.work_dtype(x.dtype))
            unit = torch.where(at > 0, values[start:stop].to(at.dtype) / torch.where(at > 0, at, 1), 0)
            codes[start:stop] = self._quantise(unit, range(start, stop), seed).flatten(1)
        coded = [
            integers.write(codes[:, band.to(x.device)].flatten(), self.coder, f"band{number}_")
            for number, band in enumerate(_bands(maps))
        ]
        escaped = escapes.gather(layout.memory_view(x), layout.memory_view(lost))
        return self.payload(spec, seed, coded, peak, escaped)

    def payload(
        self,
        spec: TensorSpec,
        seed: int,
        coded: list[tuple[dict[str, Any], dict[str, Tensor]]],
        peak: Tensor,
        escaped: dict[str, Tensor],
    ) -> Encoded:
        """Of bands by ``integers.write`` and escapes by ``escapes.gather``."""
        meta = {"table": self.table, "rounding": self.rounding, "faithful": self.faithful, "seed": seed}
        tensors = {name: part for _, parts in coded for name, part in parts.items()}
        tensors |= {"peak": peak, **escaped}
        return Encoded(self.name, self.version, spec, {**meta, "bands": tuple(band for band, _ in coded)}, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, meta = encoded.spec, encoded.meta
        maps, largest = Planes.of(spec.shape), torch.finfo(spec.dtype).max
        writer = of_payload(encoded)
        peak = encoded.tensor("peak", dtype=spec.dtype, numel=channels(spec))
        codes = torch.empty((maps.count, maps.area), dtype=torch.int16, device=spec.device)
        for number, (band, coded) in enumerate(zip(_bands(maps), meta["bands"], strict=True)):
            part = integers.read(encoded, coded, maps.count * band.numel(), f"band{number}_")
            codes[:, band.to(spec.device)] = part.view(maps.count, band.numel())
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        for start, stop in maps.slabs(spec.device):
            at = _peak_of(peak, range(start, stop), spec).to(minmax.work_dtype(spec.dtype))
            code = codes[start:stop].view(-1, maps.height, maps.width).to(at.dtype)
            value = writer._restore(code, range(start, stop), meta["seed"]) * at
            flat[start * maps.area : stop * maps.area] = value.clamp_(-largest, largest).flatten()
        x = planes.join(flat, spec)
        escapes.scatter(layout.memory_view(x), encoded)
        return x

    def _quantise(self, unit: Tensor, index: range, seed: int) -> Tensor:
        """Codes of planes whose values lie in +-1."""
        step = self._steps(unit)
        if self.faithful:
            fixed = torch.round(unit * _PUBLISHED_LARGEST).clamp_(-128, 127)
            return fixed if not _transforms(unit) else torch.trunc(torch.round(dct.forward(fixed)) / step)
        value = unit * _LARGEST
        value = (dct.forward(value) if _transforms(unit) else value) / step
        return torch.round(value + self._offsets(unit, index, seed))

    def _restore(self, code: Tensor, index: range, seed: int) -> Tensor:
        value = code if self.faithful else code - self._offsets(code, index, seed)
        value = value * self._steps(code)
        value = dct.inverse(value) if _transforms(code) else value
        # A product, because a GPU divides by a number otherwise than a CPU does.
        return value * (1 / (_PUBLISHED_LARGEST if self.faithful else _LARGEST))

    def _steps(self, maps: Tensor) -> Tensor:
        if not _transforms(maps):
            return torch.ones((), dtype=maps.dtype, device=maps.device)
        table = torch.tensor(self.steps(), dtype=maps.dtype)
        return dct.spread(table, maps.shape[1], maps.shape[2]).to(maps.device)

    def _offsets(self, maps: Tensor, index: range, seed: int) -> Tensor | float:
        if self.rounding != "dither":
            return 0.0
        area = maps.shape[1] * maps.shape[2]
        u = dither.offsets(seed, index.start * area, index.stop * area, dtype=maps.dtype, device=maps.device)
        return u.view(maps.shape)


def of_payload(encoded: Encoded) -> JpegAct:
    """What wrote a payload, but for its coder."""
    meta = encoded.meta
    return JpegAct(meta["table"], meta["rounding"], faithful=meta["faithful"])


def has_transform(maps: Planes) -> bool:
    return maps.height >= dct.SIDE and maps.width >= dct.SIDE


def _transforms(maps: Tensor) -> bool:
    return has_transform(Planes(*maps.shape))


def _bands(maps: Planes) -> tuple[Tensor, ...]:
    """Which values of a plane are coded together: coefficients of a band, or all of them where there are none."""
    return dct.bands(maps.height, maps.width) if has_transform(maps) else (torch.arange(maps.area),)


def channels(spec: TensorSpec) -> int:
    maps = Planes.of(spec.shape)
    return spec.shape[1] if maps.is_image else maps.width


def channel_axis(spec: TensorSpec) -> tuple[int, ...]:
    """The axis along which channels lie; none where there is but one value in every channel's place."""
    if Planes.of(spec.shape).is_image:
        return (1,)
    return tuple(axis for axis, size in enumerate(spec.shape) if size > 1)[-1:]


def _peaks(values: Tensor, spec: TensorSpec) -> Tensor:
    """The largest magnitude of each channel."""
    if not values.numel():
        return torch.zeros(channels(spec), dtype=spec.dtype, device=spec.device)
    if not Planes.of(spec.shape).is_image:
        return values.abs().amax((0, 1))
    return values.view(spec.shape[0], spec.shape[1], -1).abs().amax((0, 2))


def _peak_of(peak: Tensor, index: range, spec: TensorSpec) -> Tensor:
    """The magnitudes that belong to planes, in a shape to multiply them with."""
    maps = Planes.of(spec.shape)
    if not maps.is_image:
        return peak.view(1, 1, -1)
    per_channel = maps.count // (spec.shape[0] * spec.shape[1])
    plane = torch.arange(index.start, index.stop, device=peak.device)
    return peak[plane // per_channel % spec.shape[1]].view(-1, 1, 1)
