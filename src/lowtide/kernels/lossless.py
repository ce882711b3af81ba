"""Twin of the codec ``lossless`` for NVIDIA GPUs: byte planes (lossless.cu) and their coder (integers.cu).

The host waits three times: for the number of zeros, for how often each byte occurs, and for the sizes of what is coded.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.codecs.lossless import Lossless, has_bitmap
from lowtide.coding import bitpack, byte_planes, layout
from lowtide.errors import PayloadError
from lowtide.kernels import _integers, _nvrtc
from lowtide.kernels._base import Twin
from lowtide.kernels._integers import Row
from lowtide.kernels._nvrtc import current_stream
from lowtide.records import Bound, Encoded

__all__ = ["LosslessKernel"]

PROGRAM = _nvrtc.Program.read("lossless", "dtypes.cuh", "four.cuh", "warp.cuh", "lossless.cu")

_ARGS = struct.Struct("<2Q8Q5Q3I4x")
_WORDS = {1: "u8", 2: "u16", 4: "u32", 8: "u64"}
_CHUNK, _WARPS = 1024, 8  # as in lossless.cu
_PARTS, _PART = 512, 1 << 16  # of a plane whose bytes are counted: at most so many, of so many bytes


@dataclass(frozen=True, slots=True)
class LosslessKernel(Twin):
    """The twin of one ``Lossless``; what its kernels do not reach is left to the codec."""

    codec: Lossless

    @property
    def keep_zeros(self) -> bool:
        return self.codec.keep_zeros

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.codec.accepts(dtype) and self.codec.coder == "blocks" and _nvrtc.available()

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        spec = layout.spec_of(x)
        if not self.codec.accepts(x.dtype) or not 0 < spec.numel <= _integers.MOST:
            return self.codec.encode(x, bound, seed=seed)
        job = _Job(spec.dtype, spec.numel, layout.memory_view(x))
        before, stored = job.rank()
        nonzeros = int(stored)
        parts = {}
        with_bitmap = has_bitmap(spec.numel - nonzeros, spec)
        if with_bitmap:
            nbytes = bitpack.packed_nbytes(spec.numel, 1)
            parts["zeros"] = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
        job.stored = nonzeros if with_bitmap else spec.numel
        planes = [torch.empty(job.stored, dtype=torch.uint8, device=x.device) for _ in range(job.width)]
        job.launch("split", with_bitmap, planes=planes, before=before, **parts)
        metas, coded = job.code(planes)
        return self.codec.payload(spec, with_bitmap, job.stored, metas, {**parts, **coded})

    def decode(self, encoded: Encoded) -> Tensor:
        return self._decode(encoded, mask=False)

    def nonzero(self, encoded: Encoded) -> Tensor:
        """Where x is not zero (NaN is not), as ones and zeros in its dtype."""
        return self._decode(encoded, mask=True)

    def _decode(self, encoded: Encoded, *, mask: bool) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, metas = encoded.spec, encoded.meta["planes"]
        readable = all(meta.get("coder") == "raw" or _integers.is_readable(meta) for meta in metas)
        if not 0 < spec.numel <= _integers.MOST or len(metas) != spec.dtype.itemsize or not readable:
            return self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        job = _Job(spec.dtype, spec.numel, flat, stored=encoded.meta["stored"])
        parts = {}
        if encoded.meta["bitmap"]:
            nbytes = bitpack.packed_nbytes(spec.numel, 1)
            zeros = encoded.tensor("zeros", dtype=torch.uint8, numel=nbytes)
            parts = {"zeros": zeros, "before": job.rank(zeros)[0]}
        elif job.stored != spec.numel:
            raise PayloadError(f"lossless payload: {job.stored} of {spec.numel} values and no bitmap: corrupted")
        planes = [job.plane(encoded, number, meta) for number, meta in enumerate(metas)]
        job.launch("merge", encoded.meta["bitmap"], mask, planes=planes, target=flat, **parts)
        return layout.restore(flat, spec)


@dataclass(slots=True)
class _Job:
    """One tensor, coded or decoded."""

    dtype: torch.dtype
    count: int
    flat: Tensor
    stored: int = 0

    @property
    def width(self) -> int:
        return self.dtype.itemsize

    def rank(self, zeros: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """How many words other than zero lie before each chunk, and in all; by a bitmap, if there is one already."""
        chunks = -(-self.count // _CHUNK)
        counts = torch.empty(chunks, dtype=torch.int32, device=self.flat.device)
        if zeros is None:
            self.launch("count_words", counts=counts)
        else:
            self.launch("count_bits", counts=counts, zeros=zeros)
        sums = counts.cumsum(0, dtype=torch.int32)
        return sums - counts, sums[-1]

    def code(self, planes: list[Tensor]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """As ``byte_planes.write`` does it; a plane that is not coded becomes a part as it is."""
        histogram = torch.zeros((self.width, 256), dtype=torch.int32, device=self.flat.device)
        self.launch("count_bytes", planes=planes, histogram=histogram)
        centres = byte_planes.centres(histogram.cpu())
        rows = {
            number: _integers.measure(Row(plane, centre))
            for number, (plane, centre) in enumerate(zip(planes, centres, strict=True))
            if centre is not None
        }
        words = dict(zip(rows, _integers.lengths(list(rows.values())), strict=True)) if rows else {}
        metas: list[dict[str, Any]] = []
        parts: dict[str, Tensor] = {}
        for number, plane in enumerate(planes):
            prefix = f"plane{number}_"
            if number in rows and rows[number].nbytes(words[number]) < plane.nbytes:
                meta, coded = rows[number].pack(words[number], prefix)
                metas.append({**meta, "centre": centres[number]})
                parts |= coded
            else:
                metas.append({"coder": "raw"})
                parts[f"{prefix}raw"] = plane
        return metas, parts

    def plane(self, encoded: Encoded, number: int, meta: dict[str, Any]) -> Tensor:
        prefix = f"plane{number}_"
        if meta["coder"] == "raw":
            return encoded.tensor(f"{prefix}raw", dtype=torch.uint8, numel=self.stored)
        into = torch.empty(self.stored, dtype=torch.uint8, device=self.flat.device)
        return _integers.read(encoded, meta, into, prefix, meta["centre"])

    def launch(self, kernel: str, *switches: bool, planes: list[Tensor] | None = None, **tensors: Tensor) -> None:
        tensors.setdefault("source", self.flat)
        place = {name: tensors[name].data_ptr() if name in tensors else 0 for name in _FIELDS}
        bytes_at = [plane.data_ptr() for plane in planes or ()]
        parts = max(1, min(_PARTS, -(-self.stored // _PART)))
        arguments = _ARGS.pack(
            place["source"], place["target"], *bytes_at, *[0] * (8 - len(bytes_at)), place["zeros"], place["counts"],
            place["before"], place["histogram"], _one(self.dtype), self.count, self.stored, parts,
        )  # fmt: skip
        grid = len(bytes_at) * parts if kernel == "count_bytes" else -(-self.count // (_CHUNK * _WARPS))
        device = self.flat.device.index or 0
        function = _function(expression(kernel, self.width, *switches), device)
        function.launch(grid, 32 * _WARPS, 0, arguments, current_stream(device))


_FIELDS = ("source", "target", "zeros", "counts", "before", "histogram")


def expression(kernel: str, width: int, *switches: bool) -> str:
    """The template of a kernel for words of so many bytes, as NVRTC names it."""
    return f"{kernel}<{', '.join([_WORDS[width], *[str(switch).lower() for switch in switches]])}>"


@cache
def _one(dtype: torch.dtype) -> int:
    """The bits of 1.0."""
    word = torch.ones(1, dtype=torch.float32).to(dtype).view(byte_planes.WORDS[dtype.itemsize])
    return int(word) & ((1 << 8 * dtype.itemsize) - 1)


@cache
def _function(kernel: str, device: int) -> _nvrtc.Function:
    return PROGRAM.function(kernel, device)
