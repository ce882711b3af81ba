"""The kernels in sz_*.cu by name: which ones tensors of one place in a net need, compiled ahead or when asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lowtide.codecs.sz import Plan, Sz
from lowtide.kernels import _nvrtc
from lowtide.kernels._sz_jobs import ROUND, Decoding, Encoding, decoding_of, encoding_of, unfolding_of
from lowtide.records import TensorSpec

PROGRAM = _nvrtc.Program.read(
    "sz", "dtypes.cuh", "folding.cuh", "sz_args.cuh", "sz_entries.cuh", "sz_grid.cuh", "sz_fold.cuh", "sz_exact.cuh",
    "sz_places.cuh", "sz_rans.cuh", "sz_predict.cuh", "sz_rans_encode.cu", "sz_rans_decode.cu", "sz_blocks.cu",
)  # fmt: skip

# The same for graphs that are replayed: sz_args.cuh says what is different.
REPLAYED = _nvrtc.Program("sz_replayed", f"#define REPLAYED true\n{PROGRAM.source}")

# What a decoder gives, as the kernels name it; the last three of pairs.
VALUES, MASK, GATED = "ONLY_VALUES", "ONLY_MASK", "GATED"
MADE, SOURCE, SOURCE_AND_GATED = "MADE", "SOURCE", "SOURCE_AND_GATED"


class Kernel(NamedTuple):
    """One instance of a template, on one device."""

    kernel: str
    device: int
    dtype: str
    entry: int
    zero: int
    dithered: bool
    values: int = 0
    give: str = VALUES
    replayed: bool = False
    predicted: bool = False

    @classmethod
    def of(cls, job: Encoding | Decoding, device: int, give: str = VALUES, *, replayed: bool = False) -> Kernel:
        return cls(job.kernel, device, *job.template, job.values, give, replayed, job.predicted)

    @property
    def program(self) -> _nvrtc.Program:
        return REPLAYED if self.replayed else PROGRAM

    @property
    def expression(self) -> str:
        return expression(
            self.kernel, self.dtype, self.entry, self.zero, self.dithered, self.values, self.give,
            predicted=self.predicted,
        )  # fmt: skip


_FUNCTIONS: dict[tuple[Any, ...], _nvrtc.Function] = {}


def function(
    kernel: str, device: int, dtype: str, entry: int, zero: int, dithered: bool, *, values: int = 0,
    give: str = VALUES, replayed: bool = False, predicted: bool = False,
) -> _nvrtc.Function:  # fmt: skip
    key = (kernel, device, dtype, entry, zero, dithered, values, give, replayed, predicted)
    known = _FUNCTIONS.get(key)
    if known is None:
        wanted = Kernel(*key)
        known = _FUNCTIONS[key] = wanted.program.function(wanted.expression, device)
    return known


def missing(
    codec: Sz, spec: TensorSpec, plan: Plan, *, replayed: bool, folds: torch.dtype | None = None
) -> list[Kernel]:
    """Kernels that saves of such tensors by ``plan``, and what their backward asks for, would be the first to load."""
    encoding = encoding_of(codec, spec, plan, folds)
    decoding = decoding_of(spec, encoding.meta) if encoding is not None else None
    if encoding is None or decoding is None or spec.device.type != "cuda":
        return []
    gives = [VALUES]
    if codec.keep_zeros:
        gives.append(GATED)
    unfolding = unfolding_of(spec, encoding.meta, folds) if folds is not None else None
    if unfolding is not None:
        decoding, gives = unfolding, [MADE, SOURCE_AND_GATED]
    wanted = []
    for again in (False, True) if replayed else (False,):
        device = spec.device.index or 0
        wanted.append(Kernel.of(encoding, device, replayed=again))
        wanted += [Kernel.of(decoding, device, give, replayed=again) for give in gives]
    return [kernel for kernel in wanted if kernel not in _FUNCTIONS]


def expression(
    kernel: str, dtype: str, entry: int, zero: int, dithered: bool, values: int, give: str = VALUES, *,
    predicted: bool = False,
) -> str:  # fmt: skip
    """The template of a kernel, as NVRTC names it."""
    parts = [dtype]
    if values:
        parts += [str(values), str(ROUND[values])]
    parts += [str(entry), str(zero), str(dithered).lower()]
    if kernel.endswith("decode"):
        parts.append(give)
    if predicted:
        parts.append("true")
    return f"{kernel}<{', '.join(parts)}>"
