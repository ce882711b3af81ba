"""Block means, and what is left of them in few bits: the low and the high frequencies of a plane, as in DIVISION."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import bitpack, dither, layout, minmax, planes
from lowtide.coding.block_means import Blocks
from lowtide.errors import DtypeError, PayloadError, PolicyError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["Division"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("stochastic", "nearest")
_SIDES = (2, 4, 8, 16)
_PUBLISHED_EPSILON = 2e-6


@dataclass(frozen=True, slots=True)
class Division:
    """|x' - x| <= scale of its plane, before x' is rounded; about the range of a plane's residual / (2**bits - 1).

    A plane (``lowtide.coding.planes``) is cut into blocks of ``block`` x ``block`` values, or of ``block``**2 where it
    is a row; blocks at the border are smaller. Each block stores its mean. What is left, r = x - mean, is coded against
    the extremes of its plane: code = rint((r - low) / scale + u), u the element's dither in (-1/2, 1/2), and
    x' = mean + low + code * scale. Mean, low and scale are stored in bfloat16 (float64 for float64): low is rounded
    down, scale up, and codes are made with the rounded ones. So every code is in range and |code - t| < 1 for
    t = (r - low) / scale. E[x'] = x to within scale / 512 and the roundings. With ``rounding="nearest"`` u is zero and
    the error about scale / 2. There is no bound that a user can set.

    A plane of zeros comes back exactly. A plane that holds NaN or inf, or magnitudes of 2**119 (float64: 2**1015) and
    more, comes back as NaN, all of it: never wrong silently, and its neighbours do not notice. Any shape, empty ones
    too, any dense layout: payloads and values do not depend on strides.

    ``faithful`` is what was published: blocks at the border are not smaller but dropped, and the means of the others
    are stretched over the plane; codes are made with float32 extremes that are rounded to bfloat16 afterwards, so that
    errors may exceed scale.

    Format. Planes and their values follow the order of indices; means go row of blocks by row of blocks. The values of
    a plane are cut into ``parts`` of equal length, the last one padded: as many as fit into a byte, but at least 4. A
    byte holds the codes at one place of 8 / bits neighbouring parts, lowest bits first; the same place of parts 4k to
    4k + 3 shares a dither word, a byte each. It is the format of codec ``groups`` with a plane for a group.
    """

    bits: int = 2
    block: int = 8
    rounding: str = "stochastic"
    faithful: bool = False

    name: ClassVar[str] = "division"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in bitpack.WIDTHS:
            raise PolicyError(f"division has codes of {', '.join(map(str, bitpack.WIDTHS))} bits, got {self.bits!r}")
        if self.block not in _SIDES:
            raise PolicyError(f"division has blocks with a side of {', '.join(map(str, _SIDES))}, got {self.block!r}")
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        spec = self.check(x)
        blocks = self.blocks(spec)
        stored, places, area = self.room(spec, blocks), self.places(blocks), blocks.planes.area
        slots = places * self.parts
        nbytes = slots * self.bits // 8
        for start, stop in blocks.planes.slabs(x.device):
            values = blocks.planes.split(x)[start:stop].to(minmax.work_dtype(x.dtype))
            mean, low, scale, t = self._scale(values, blocks)
            if self.rounding == "stochastic":
                u = dither.offsets(seed, start * slots, stop * slots, dtype=t.dtype, device=t.device)
                u = u.view(-1, self.parts // 4, places, 4).transpose(2, 3)
                t = t + u.reshape(-1, slots)[:, :area]
            codes = torch.zeros((stop - start, slots), dtype=torch.uint8, device=x.device)
            codes[:, :area] = torch.where(scale.isnan().unsqueeze(1), 0, torch.round(t).clamp_(min=0))
            stored["mean"][start * blocks.per_plane : stop * blocks.per_plane] = mean.flatten()
            stored["low"][start:stop], stored["scale"][start:stop] = low, scale
            lanes = codes.view(-1, 8 // self.bits, places).transpose(1, 2)
            stored["codes"][start * nbytes : stop * nbytes] = bitpack.pack(lanes.flatten(), self.bits)
        return self.payload(spec, stored)

    def check(self, x: Tensor) -> TensorSpec:
        """What encoder and twin ask of a tensor first."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"division stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        return layout.spec_of(x)

    def blocks(self, spec: TensorSpec) -> Blocks:
        return Blocks.of(spec.shape, self.block, stretched=self.faithful)

    @property
    def parts(self) -> int:
        return max(4, 8 // self.bits)

    def places(self, blocks: Blocks) -> int:
        """Values of a part of a plane."""
        return -(-blocks.planes.area // self.parts)

    def codes_nbytes(self, blocks: Blocks) -> int:
        return blocks.planes.count * self.places(blocks) * self.parts * self.bits // 8

    def room(self, spec: TensorSpec, blocks: Blocks) -> dict[str, Tensor]:
        """The parts of a payload, for somebody to write."""
        count, dtype = blocks.planes.count, minmax.scale_dtype(spec.dtype)
        return {
            "mean": torch.empty(count * blocks.per_plane, dtype=dtype, device=spec.device),
            "low": torch.empty(count, dtype=dtype, device=spec.device),
            "scale": torch.empty(count, dtype=dtype, device=spec.device),
            "codes": torch.empty(self.codes_nbytes(blocks), dtype=torch.uint8, device=spec.device),
        }

    def payload(self, spec: TensorSpec, stored: dict[str, Tensor]) -> Encoded:
        meta = {"bits": self.bits, "block": self.block, "faithful": self.faithful}
        return Encoded(self.name, self.version, spec, meta, stored)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, writer = encoded.spec, of_payload(encoded)
        blocks, work = writer.blocks(spec), minmax.work_dtype(spec.dtype)
        mean, low, scale, codes = writer.stored(encoded)
        area, places, largest = blocks.planes.area, writer.places(blocks), torch.finfo(spec.dtype).max
        slots, per_byte = places * writer.parts, 8 // writer.bits
        nbytes = slots * writer.bits // 8
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        for start, stop in blocks.planes.slabs(spec.device):
            of_blocks = mean[start * blocks.per_plane : stop * blocks.per_plane].to(work)
            base = blocks.spread(of_blocks.view(-1, blocks.rows, blocks.columns)).flatten(1)
            code = bitpack.unpack(codes[start * nbytes : stop * nbytes], writer.bits, (stop - start) * slots)
            code = code.view(-1, places, per_byte).transpose(1, 2).reshape(-1, slots)
            value = code[:, :area].to(work) * scale[start:stop, None].to(work)
            value = (base + low[start:stop, None].to(work)) + value
            flat[start * area : stop * area] = value.clamp_(-largest, largest).flatten()
        return planes.join(flat, spec)

    def stored(self, encoded: Encoded) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means, lowest residuals, scales and codes of a payload that this codec wrote."""
        spec, blocks = encoded.spec, self.blocks(encoded.spec)
        count, dtype = blocks.planes.count, minmax.scale_dtype(spec.dtype)
        return (
            encoded.tensor("mean", dtype=dtype, numel=count * blocks.per_plane),
            encoded.tensor("low", dtype=dtype, numel=count),
            encoded.tensor("scale", dtype=dtype, numel=count),
            encoded.tensor("codes", dtype=torch.uint8, numel=self.codes_nbytes(blocks)),
        )

    def _scale(self, values: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Means, lowest residuals and scales as they are stored, and residuals in units of scale."""
        levels, dtype = (1 << self.bits) - 1, minmax.scale_dtype(values.dtype)
        mean = blocks.means(values).to(dtype)
        residual = (values - blocks.spread(mean.to(values.dtype))).flatten(1)
        low, high = residual.amin(1) + 0.0, residual.amax(1)  # of zeros of both signs, the positive one
        if self.faithful:
            # A product: torch divides by a number on a CPU, and multiplies by its reciprocal on a GPU.
            step = (high - low + _PUBLISHED_EPSILON) * (1.0 / levels)
            sound = step.isfinite()
            scale = torch.where(sound, step, torch.nan).to(dtype)
            t = (residual - low.unsqueeze(1)) / step.unsqueeze(1)
        else:
            low = minmax.round_down(low)
            step, sound = minmax.step_over(high - low, levels)
            scale = minmax.stored_scale(step, high > low, sound)
            t = ((residual - low.unsqueeze(1)) * minmax.inverse(step).unsqueeze(1)).clamp_(max=levels)
        mean, low = torch.where(sound[:, None, None], mean, 0), torch.where(sound, low, 0).to(dtype)
        return mean, low, scale, t


def of_payload(encoded: Encoded) -> Division:
    """The codec that wrote a payload, but for its rounding, which decoding does not ask for."""
    try:
        meta = encoded.meta
        return Division(meta["bits"], meta["block"], faithful=bool(meta["faithful"]))
    except (KeyError, PolicyError) as error:
        raise PayloadError(f"division payload: its options cannot be: {error}: corrupted") from error
