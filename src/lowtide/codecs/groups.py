"""Min-max quantisation in groups, with stochastic rounding: 1, 2, 4 or 8 bits a value, as in ActNN and GACT."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import bitpack, dither, layout, minmax
from lowtide.errors import DtypeError, PayloadError, PolicyError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["Groups"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("stochastic", "nearest")
# Elements worked on at a time, in whole groups: few enough for the cache of a CPU, many elsewhere to have few launches.
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24


@dataclass(frozen=True, slots=True)
class Groups:
    """|x' - x| <= scale of its group, before x' is rounded to its dtype; scale is about (max - min) / (2**bits - 1).

    ``group`` values that are neighbours in memory share their minimum, stored exactly, and a scale, rounded up to
    bfloat16 (float64 for float64). code = rint((x - min) / scale + u), u the element's dither in (-1/2, 1/2), and
    x' = min + code * scale. Why this holds: |code - t| <= 1/2 + 255/512 for t = (x - min) / scale, and what is left of
    1 is more than the roundings in t. The product is exact (8 bits times 8), so x' is rounded twice, by the sum in
    float32 and to the dtype; it is clipped to the dtype's largest value. E[x'] = x to within scale / 512 and the
    roundings. With ``rounding="nearest"`` u is zero and the error at most (1/2 + 2**-14) scale. There is no bound that
    a user can set.

    A group of equal values comes back exactly, and so does every value that is a whole number of scales above the
    minimum, where the range is a number of bfloat16 times 2**bits - 1. Zeros come back as zeros where they are the
    minimum; zeros have no sign. A scale is at least float32's smallest normal number, or zero. A group that holds NaN
    or inf, or that spans 2**126 or more (float64: 2**1022), comes back as NaN, all of it: never wrong silently, and
    its neighbours do not notice. Any shape, empty ones too, any dense layout, coded in memory order; the last group may
    be short.

    Format. A group is cut into ``parts``, as many as values fit into a byte but at least 4. A byte holds the codes at
    one place of 8 / bits neighbouring parts, lowest bits first: first come the bytes of all places of the first such
    parts, then those of the next. The same place of parts 4k to 4k + 3 shares a dither word, a byte each. So a thread
    that reads the same places of every part has all that it needs to write whole bytes. Bytes that no value of a short
    group falls into are not stored.
    """

    bits: int = 2
    group: int = 256
    rounding: str = "stochastic"

    name: ClassVar[str] = "groups"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.bits not in bitpack.WIDTHS:
            raise PolicyError(f"groups has codes of {', '.join(map(str, bitpack.WIDTHS))} bits, got {self.bits!r}")
        if not isinstance(self.group, int) or self.group < 32 or self.group % 32:
            raise PolicyError(f"groups has a positive multiple of 32 values in a group, got {self.group!r}")
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)

    @property
    def parts(self) -> int:
        return max(4, 8 // self.bits)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        spec = self.check(x)
        flat, groups = layout.memory_view(x), -(-spec.numel // self.group)
        low = torch.empty(groups, dtype=x.dtype, device=x.device)
        scale = torch.empty(groups, dtype=minmax.scale_dtype(x.dtype), device=x.device)
        codes = torch.empty(self.codes_nbytes(spec.numel), dtype=torch.uint8, device=x.device)
        for start, stop in self._slabs(spec):
            owners = slice(start // self.group, -(-stop // self.group))
            stored = slice(self.codes_nbytes(start), self.codes_nbytes(stop))
            low[owners], scale[owners], codes[stored] = self._encode(flat[start:stop], start, seed)
        return self.payload(spec, low, scale, codes)

    def check(self, x: Tensor) -> TensorSpec:
        """What encoder and twin ask of a tensor first."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"groups stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        return layout.spec_of(x)

    def payload(self, spec: TensorSpec, low: Tensor, scale: Tensor, codes: Tensor) -> Encoded:
        meta = {"bits": self.bits, "group": self.group}
        return Encoded(self.name, self.version, spec, meta, {"low": low, "scale": scale, "codes": codes})

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec, writer = encoded.spec, of_payload(encoded)
        low, scale, codes = writer.stored(encoded)
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        work, largest = minmax.work_dtype(spec.dtype), torch.finfo(spec.dtype).max
        for start, stop in writer._slabs(spec):
            owners = slice(start // writer.group, -(-stop // writer.group))
            stored = slice(writer.codes_nbytes(start), writer.codes_nbytes(stop))
            value = writer._unpack(codes[stored], owners.stop - owners.start).to(work)
            value = value.mul_(scale[owners, None].to(work)).add_(low[owners, None].to(work))
            flat[start:stop] = value.clamp_(max=largest).flatten()[: stop - start]
        return layout.restore(flat, spec)

    def stored(self, encoded: Encoded) -> tuple[Tensor, Tensor, Tensor]:
        """Minima, scales and codes of a payload that this codec wrote."""
        spec = encoded.spec
        groups = -(-spec.numel // self.group)
        low = encoded.tensor("low", dtype=spec.dtype, numel=groups)
        scale = encoded.tensor("scale", dtype=minmax.scale_dtype(spec.dtype), numel=groups)
        return low, scale, encoded.tensor("codes", dtype=torch.uint8, numel=self.codes_nbytes(spec.numel))

    def codes_nbytes(self, count: int) -> int:
        full, rest = divmod(count, self.group)
        places, per_byte = self.group // self.parts, 8 // self.bits
        starts = range(0, rest, places * per_byte)
        return full * self.group * self.bits // 8 + sum(min(rest - start, places) for start in starts)

    def _slabs(self, spec: TensorSpec) -> Iterator[tuple[int, int]]:
        size = _SLAB_CPU if spec.device.type == "cpu" else _SLAB
        size = max(size // self.group, 1) * self.group
        for start in range(0, spec.numel, size):
            yield start, min(start + size, spec.numel)

    def _encode(self, values: Tensor, start: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        """Minima, scales and packed codes of the groups from element ``start`` on."""
        count, work, levels = values.numel(), minmax.work_dtype(values.dtype), (1 << self.bits) - 1
        missing = -count % self.group
        if missing:
            values = torch.cat([values, values[-1:].expand(missing)])
        x = values.view(-1, self.group).to(work)
        low = x.amin(1) + 0.0  # of zeros of both signs, the positive one
        span = x.amax(1) - low
        step, sound = minmax.step_over(span, levels)
        t = ((x - low.unsqueeze(1)) * minmax.inverse(step).unsqueeze(1)).clamp_(max=levels)
        if self.rounding == "stochastic":
            t += self._dither(seed, start, x.numel(), work, x.device).reshape(t.shape)
        code = torch.where(sound.unsqueeze(1), torch.round(t), 0).to(torch.uint8)
        code.view(-1)[count:] = 0
        low = torch.where(sound, low, 0).to(values.dtype)
        return low, minmax.stored_scale(step, span > 0, sound), self._pack(code)[: self.codes_nbytes(count)]

    def _dither(self, seed: int, start: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Offsets of ``count`` elements in memory order; places come before parts in the order of the stream."""
        offsets = dither.offsets(seed, start, start + count, dtype=dtype, device=device)
        return offsets.view(-1, self.parts // 4, self.group // self.parts, 4).transpose(2, 3)

    def _pack(self, code: Tensor) -> Tensor:
        per_byte = 8 // self.bits
        lanes = code.view(-1, per_byte, self.group // self.parts).transpose(1, 2)
        return bitpack.pack(lanes.flatten(), self.bits)

    def _unpack(self, codes: Tensor, groups: int) -> Tensor:
        missing = groups * self.group * self.bits // 8 - codes.numel()
        if missing:
            codes = torch.cat([codes, codes.new_zeros(missing)])
        lanes = bitpack.unpack(codes, self.bits, groups * self.group)
        per_byte = 8 // self.bits
        return lanes.view(-1, self.group // self.parts, per_byte).transpose(1, 2).reshape(groups, self.group)


def of_payload(encoded: Encoded) -> Groups:
    """The codec that wrote a payload, but for its rounding, which decoding does not ask for."""
    try:
        return Groups(encoded.meta["bits"], encoded.meta["group"])
    except (KeyError, PolicyError) as error:
        raise PayloadError(f"groups payload: its options cannot be: {error}: corrupted") from error
