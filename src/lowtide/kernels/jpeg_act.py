"""Twin of the codec ``jpeg_act`` for NVIDIA GPUs: transform and codes (jpeg_act.cu), and their coder (integers.cu).

Where memory has another order than planes, torch turns some samples at a time round.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lowtide.codecs.jpeg_act import JpegAct, channel_axis, channels, has_transform, of_payload
from lowtide.coding import dct, dither, escapes, layout
from lowtide.coding.planes import Planes
from lowtide.kernels import _integers, _nvrtc
from lowtide.kernels._base import Twin
from lowtide.kernels._integers import Row
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._sz_jobs import TYPES
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["JpegActKernel"]

PROGRAM = _nvrtc.Program.read("jpeg_act", "dtypes.cuh", "four.cuh", "warp.cuh", "dither.cuh", "jpeg_act.cu")

_ARGS = struct.Struct("<7Q4Q4I9If4x")
_THREADS, _WARPS, _PIECE = 256, 8, 4096  # as in jpeg_act.cu
_BLOCKS = 1 << 12  # of a grid that has more to do than blocks
_MODES = {"nearest": 0, "dither": 1}
_FAITHFUL = 2
_SLAB = 1 << 24  # values turned round at a time
_FEW = 8  # values of a run of one channel, for which a warp would have too little to do


@dataclass(frozen=True, slots=True)
class JpegActKernel(Twin):
    """The twin of one ``JpegAct``; what its kernels do not reach is left to the codec."""

    codec: JpegAct

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in TYPES and self.codec.coder == "blocks" and _nvrtc.available()

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        spec = layout.spec_of(x)
        if x.dtype not in TYPES or not 0 < spec.numel <= _integers.MOST:
            return self.codec.encode(x, bound, seed=seed)
        job = _Job.of(spec, self.codec, seed)
        lost = torch.zeros(1, dtype=torch.int64, device=x.device)
        job.find_peaks(x, lost)
        codes = torch.empty(job.bands.room, dtype=torch.int16, device=x.device)
        for first, part in _slabs(x):
            job.encode(part.contiguous(), codes, first)
        rows = [_integers.measure(Row(band)) for band in job.bands.of(codes)]
        *words, escaped = _integers.lengths(rows, lost)
        coded = [row.pack(words[number], f"band{number}_") for number, row in enumerate(rows)]
        flat = layout.memory_view(x)
        outside = escapes.gather(flat, ~flat.isfinite()) if escaped else escapes.none(flat)
        return self.codec.payload(spec, seed, coded, job.peak.to(x.dtype), outside)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, meta = encoded.spec, encoded.meta
        readable = all(_integers.is_readable(band) for band in meta["bands"])
        if spec.dtype not in TYPES or not 0 < spec.numel <= _integers.MOST or not readable:
            return self.codec.decode(encoded)
        peak = encoded.tensor("peak", dtype=spec.dtype, numel=channels(spec)).float()
        job = _Job.of(spec, of_payload(encoded), meta["seed"], peak)
        codes = torch.empty(job.bands.room, dtype=torch.int16, device=spec.device)
        for number, (band, coded) in enumerate(zip(job.bands.of(codes), meta["bands"], strict=True)):
            _integers.read(encoded, coded, band, f"band{number}_")
        x = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
        for first, part in _slabs(x):
            values = part if part.is_contiguous() else torch.empty(part.shape, dtype=x.dtype, device=x.device)
            job.decode(values, codes, first)
            if values is not part:
                part.copy_(values)
        escapes.scatter(layout.memory_view(x), encoded, checked=False)
        return x


def _slabs(x: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The tensor if its planes follow each other in memory, else some of its samples at a time; and the first plane."""
    if x.is_contiguous():
        yield 0, x
        return
    each, planes = max(_SLAB * x.shape[0] // x.numel(), 1), Planes.of(x.shape).count // x.shape[0]
    for start in range(0, x.shape[0], each):
        yield start * planes, x[start : start + each]


@dataclass(frozen=True, slots=True)
class _Bands:
    """Codes by band, each of which begins where four of them are read at once."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]  # of all planes
    sizes: tuple[int, ...]  # of a plane
    room: int

    @classmethod
    def of_planes(cls, maps: Planes) -> _Bands:
        sizes = [band.numel() for band in dct.bands(maps.height, maps.width)] if has_transform(maps) else [maps.area]
        starts, at = [], 0
        for size in sizes:
            starts.append(at)
            at += -(-size * maps.count // 8) * 8
        return cls(tuple(starts), tuple(size * maps.count for size in sizes), tuple(sizes), at)

    def of(self, codes: Tensor) -> list[Tensor]:
        return [codes[start : start + length] for start, length in zip(self.starts, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class _Job:
    """One tensor, coded or decoded: planes, bands, and the largest magnitude of every channel (float32)."""

    spec: TensorSpec
    codec: JpegAct
    seed: int
    maps: Planes
    bands: _Bands
    peak: Tensor

    @classmethod
    def of(cls, spec: TensorSpec, codec: JpegAct, seed: int, peak: Tensor | None = None) -> _Job:
        maps = Planes.of(spec.shape)
        if peak is None:
            peak = torch.zeros(channels(spec), dtype=torch.float32, device=spec.device)
        return cls(spec, codec, seed, maps, _Bands.of_planes(maps), peak)

    def find_peaks(self, x: Tensor, lost: Tensor) -> None:
        """Raise ``peak``, and count in ``lost`` what is not finite."""
        terms, count = layout.index_terms(self.spec, channel_axis(self.spec)), self.spec.numel
        divide, modulo = terms[0][:2] if terms else (count, 1)
        if divide >= _FEW:
            kernel, blocks = "peaks_of_runs", -(-(count // divide * -(-divide // _PIECE)) // _WARPS)
        else:
            kernel, blocks = "peaks_of_columns", -(-max(divide * modulo, min(count, _BLOCKS * _THREADS)) // _THREADS)
        self._run(kernel, blocks, layout.memory_view(x), divide, modulo, lost=lost)

    def encode(self, values: Tensor, codes: Tensor, first: int) -> None:
        """Planes that follow each other in memory; ``first`` is the number of the first one."""
        self._code("encode", values, codes, first)

    def decode(self, values: Tensor, codes: Tensor, first: int) -> None:
        self._code("decode", values, codes, first)

    def _code(self, kernel: str, values: Tensor, codes: Tensor, first: int) -> None:
        spec, maps, count = self.spec, self.maps, values.numel()
        divide = spec.numel // (spec.shape[0] * spec.shape[1]) if maps.is_image else 1
        channel = divide, self.peak.numel()
        if not has_transform(maps):
            blocks = -(-count // (4 * _THREADS))
            self._run(f"{kernel}_plain", blocks, values, *channel, first, codes=codes)
            return
        steps, places = _tables(self.codec.steps(), maps.height, maps.width, spec.device)
        tiles = count // maps.area * -(-maps.width // 32) * -(-maps.height // dct.SIDE)
        blocks = min(-(-tiles // _WARPS), _BLOCKS)
        bases = _bases(kernel == "decode", spec.device)
        self._run(
            f"{kernel}_maps", blocks, values, *channel, first, codes=codes, bases=bases, steps=steps, places=places
        )

    def _run(
        self, kernel: str, blocks: int, values: Tensor, divide: int, modulo: int, first: int = 0, **tensors: Tensor
    ) -> None:
        place = {name: tensors[name].data_ptr() if name in tensors else 0 for name in _FIELDS}
        fill = [0] * (4 - len(self.bands.sizes))
        keys = [key & 0xFFFFFFFF for key in dither.keys(self.seed)]
        mode = _FAITHFUL if self.codec.faithful else _MODES[self.codec.rounding]
        arguments = _ARGS.pack(
            values.data_ptr(), place["codes"], self.peak.data_ptr(), place["bases"], place["steps"], place["places"],
            place["lost"], *self.bands.starts, *fill, *self.bands.sizes, *fill, values.numel(), first,
            self.maps.height, self.maps.width, divide, modulo, *keys, mode, torch.finfo(self.spec.dtype).max,
        )  # fmt: skip
        device = self.spec.device.index or 0
        function = _function(f"{kernel}<{TYPES[self.spec.dtype]}>", device)
        function.launch(blocks, _THREADS, 0, arguments, current_stream(device))


_FIELDS = ("codes", "bases", "steps", "places", "lost")


@cache
def _tables(steps: tuple[tuple[int, ...], ...], height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the coefficients of a plane: their steps; their bands (in the highest two bits) and their ranks there."""
    places = torch.zeros(height * width, dtype=torch.int64)
    for number, band in enumerate(dct.bands(height, width)):
        places[band] = torch.arange(band.numel()) + (number << 30)
    places = torch.where(places >= 1 << 31, places - (1 << 32), places).to(torch.int32)
    spread = dct.spread(torch.tensor(steps, dtype=torch.float32), height, width).flatten()
    return spread.to(device), places.to(device)


@cache
def _bases(inverse: bool, device: torch.device) -> Tensor:
    """Weights of transforms of 1 to 8 values, those of an output in a row of eight."""
    tables = torch.zeros((dct.SIDE, dct.SIDE, dct.SIDE), dtype=torch.float32)
    for size in range(1, dct.SIDE + 1):
        tables[size - 1, :size, :size] = dct.weights(size, inverse=inverse)
    return tables.to(device)


@cache
def _function(kernel: str, device: int) -> _nvrtc.Function:
    return PROGRAM.function(kernel, device)
