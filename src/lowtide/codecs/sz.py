"""Error-bounded values: a grid anchored at zero, dither or nearest rounding, bit planes, and an exact way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.coding import blocks, dither, layout
from lowtide.errors import BoundError, DtypeError, PayloadError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

__all__ = ["Sz"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("dither", "nearest")
_CODERS = ("blocks",)
# Elements worked on at a time: few enough for the cache of a CPU, many elsewhere to have few launches.
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24
_ZERO_SHARE = 1 / 64  # above it, a code for "exactly zero" is cheaper than escaping the zeros


@dataclass(frozen=True, slots=True)
class Sz:
    """For every finite x with bound eb: |x' - x| <= eb in exact arithmetic, the rounding of x' to its dtype included.

    q = rint(x / step + u) and x' = (q - u) * step rounded to the dtype of x, where step <= 2 eb and u is the element's
    dither (zero for ``rounding="nearest"``). Why the bound holds: the encoder computes x' as the decoder will and
    compares it with x in float64; an element that misses its bound, or whose code is out of range, is stored exactly
    (an escape). To make misses rare, step / 2 is eb with its mantissa cut to 8 bits (5 for 16-bit dtypes): then
    x +- step / 2 lie on the dtype's own grid for all but very large x, and rounding x' cannot push it past them.

    With dither, E[x'] = x to within step / 512 and the error is uniform, whatever x is; its variance is step**2 / 12.
    Zeros come back as zeros. NaN and inf come back bit for bit; so do values beyond 2046 steps. A bound of zero or NaN
    that came out of a statistic stores the elements it governs exactly. 1024 values that cannot be coded for less are
    stored raw, so a payload exceeds the raw values at most by its headers and steps (a sixth of a bit a value, and two
    bytes a bound). Any shape and any dense layout, coded in memory order.

    ``keep_zeros`` forces "exactly zero" to have a code of its own, so that ``nonzero`` recovers it without the values.
    """

    rounding: str = "dither"
    coder: str = "blocks"
    keep_zeros: bool = False

    name: ClassVar[str] = "sz"
    version: ClassVar[int] = 1
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)
        if self.coder not in _CODERS:
            raise UnknownNameError("coder", self.coder, _CODERS)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _DTYPES

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0) -> Encoded:
        prepared = self.prepare(x, bound, seed)
        if prepared is None:
            return Encoded(self.name, self.version, layout.spec_of(x), {"kind": "empty"})
        spec, flat, grid, zero_code = prepared
        streams = []
        for start, stop in _slabs(spec):
            part = flat[start:stop]
            code, negative, lost = _quantise(part, grid, start, stop, zero_code)
            streams.append(blocks.write(code, negative, lost, part))
        tensors = {**blocks.join(streams), "step": grid.step.to(torch.bfloat16)}
        return self.payload(spec, zero_code, grid, tensors)

    def prepare(self, x: Tensor, bound: Bound | None, seed: int) -> tuple[TensorSpec, Tensor, Grid, bool] | None:
        """What encoder and twin share: checks, memory order, grid, whether zero has a code. None if empty."""
        if not self.accepts(x.dtype):
            raise DtypeError(f"sz stores {', '.join(map(str, _DTYPES))}; got {x.dtype}")
        if bound is None:
            raise BoundError("sz needs an error bound: pass Bound.absolute(...) or a relative rule")
        spec = layout.spec_of(x)
        bound.check_shape(spec)
        flat = layout.memory_view(x)
        if not spec.numel:
            return None
        grid = Grid(spec, bound, _step(bound, spec), seed if self.rounding == "dither" else None)
        return spec, flat, grid, self._wants_zero_code(flat)

    def payload(self, spec: TensorSpec, zero_code: bool, grid: Grid, tensors: dict[str, Tensor]) -> Encoded:
        meta = {"kind": self.coder, "zero_code": zero_code, "axes": grid.axes, "seed": grid.seed}
        return Encoded(self.name, self.version, spec, meta, tensors)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec = encoded.spec
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        if encoded.meta["kind"] == "empty":
            return layout.restore(flat, spec)
        reader, grid = _reader(encoded), _grid(encoded)
        for start, stop in _slabs(spec):
            code, negative = reader.read(start, stop)
            zero = code == 0 if encoded.meta["zero_code"] else None
            magnitude = code if zero is None else code - 1
            value = grid.value(torch.where(negative, -magnitude, magnitude), start, stop)
            flat[start:stop] = value if zero is None else value.masked_fill_(zero, 0)
        reader.write_exact(flat)
        return layout.restore(flat, spec)

    def step(self, bound: Bound, spec: TensorSpec) -> Tensor:
        """The step that a bound leads to for tensors like ``spec``: the error's variance is step**2 / 12."""
        return _step(bound, spec)

    def nonzero(self, encoded: Encoded) -> Tensor:
        """Where x was not zero, exactly, as ones and zeros in the dtype of x; needs a payload with a zero code."""
        encoded.require(self.name, self.version)
        spec = encoded.spec
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        if encoded.meta["kind"] == "empty":
            return layout.restore(flat, spec)
        if not encoded.meta["zero_code"]:
            raise PayloadError("sz payload has no code for zero: encode with keep_zeros=True to ask for non-zeros")
        reader = _reader(encoded)
        for start, stop in _slabs(spec):
            flat[start:stop] = reader.read(start, stop)[0] != 0
        reader.write_exact(flat)
        return layout.restore((flat != 0).to(spec.dtype), spec)

    def _wants_zero_code(self, flat: Tensor) -> bool:
        if self.keep_zeros:
            return True
        if self.rounding != "dither":
            return False
        zeros = flat.numel() - int(torch.count_nonzero(flat))
        return zeros > flat.numel() * _ZERO_SHARE


class Grid:
    """The reconstruction points of every element: steps and dither, the same for encoder and decoder."""

    def __init__(self, spec: TensorSpec, bound: Bound | None, step: Tensor, seed: int | None) -> None:
        self.axes = bound.axes if bound is not None else ()
        self.dtype = spec.dtype
        self.device = spec.device
        self.work = torch.float64 if spec.dtype == torch.float64 else torch.float32
        self.step = step
        self.seed = seed
        self.promised = None if bound is None else _promised(bound, spec)
        self.terms = layout.index_terms(spec, self.axes)

    @classmethod
    def stored(cls, spec: TensorSpec, axes: tuple[int, ...], step: Tensor, seed: int | None) -> Grid:
        grid = cls(spec, None, step, seed)
        grid.axes = axes
        grid.terms = layout.index_terms(spec, axes)
        return grid

    def entries(self, start: int, stop: int) -> Tensor | None:
        """Where elements [start, stop) find their step; None when one step serves all."""
        if not self.terms:
            return None
        return layout.entries_at(self.terms, torch.arange(start, stop, device=self.device))

    def steps(self, entries: Tensor | None) -> Tensor:
        step = self.step.to(self.work)
        return step if entries is None else step[entries]

    def offsets(self, start: int, stop: int) -> Tensor | float:
        if self.seed is None:
            return 0.0
        return dither.offsets(self.seed, start, stop, dtype=self.work, device=self.device)

    def value(self, q: Tensor, start: int, stop: int) -> Tensor:
        """x' of integer codes; two roundings (the product, then the dtype), no fused multiply-add."""
        return ((q.to(self.work) - self.offsets(start, stop)) * self.steps(self.entries(start, stop))).to(self.dtype)


def _quantise(part: Tensor, grid: Grid, start: int, stop: int, zero_code: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, signs and the elements that must escape, for elements [start, stop)."""
    x = part.to(grid.work)
    entries = grid.entries(start, stop)
    q = torch.round(x * (1 / grid.steps(entries)) + grid.offsets(start, stop))
    room = blocks.MAX_CODE - 1
    in_range = q.abs() <= room
    q = torch.where(in_range, q, 0).to(torch.int32)
    restored = grid.value(q, start, stop)
    assert grid.promised is not None, "only the decoder works without a bound"
    promised = grid.promised if entries is None else grid.promised[entries]
    zero = x == 0
    kept = in_range & ((restored.double() - part.double()).abs() <= promised)
    kept = kept | zero if zero_code else kept & (~zero | (restored == 0))
    code = q.abs()
    if zero_code:
        code = torch.where(zero, 0, code + 1)
    code = torch.where(kept, code, 0)
    return code, (q < 0) & (code > 0), ~kept


def _step(bound: Bound, spec: TensorSpec) -> Tensor:
    """Twice the bound with its mantissa cut, exact in bfloat16; zero where no promise can be kept by a grid."""
    keep = 5 if spec.dtype.itemsize == 2 else 8
    value = bound.value.to(device=spec.device, dtype=torch.float64).flatten()
    # A quarter of the largest value, so that the step and every x' near zero are finite.
    largest = min(torch.finfo(spec.dtype).max, torch.finfo(torch.float32).max)
    value = torch.where(value > 0, value, 0).clamp(max=largest / 4)
    bits = _down32(value).view(torch.int32) & -(1 << (24 - keep))
    return bits.view(torch.float32) * 2


def _promised(bound: Bound, spec: TensorSpec) -> Tensor:
    """What an element is compared with: the bound, rounded down to the precision that the work is done in."""
    value = bound.value.to(device=spec.device, dtype=torch.float64).flatten()
    return value if spec.dtype == torch.float64 else _down32(value).double()


def _down32(value: Tensor) -> Tensor:
    narrow = value.float()
    return torch.where(narrow.double() > value, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)


def _slabs(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    size = _SLAB_CPU if spec.device.type == "cpu" else _SLAB
    for start in range(0, spec.numel, size):
        yield start, min(start + size, spec.numel)


def _grid(encoded: Encoded) -> Grid:
    axes = encoded.meta["axes"]
    count = 1
    for axis in axes:
        count *= encoded.spec.shape[axis]
    step = encoded.tensor("step", dtype=torch.bfloat16, numel=count).float()
    return Grid.stored(encoded.spec, axes, step, encoded.meta["seed"])


def _reader(encoded: Encoded) -> blocks.Reader:
    headers = encoded.tensor("headers", dtype=torch.uint8)
    words = encoded.tensor("words", dtype=torch.int32)
    offsets = encoded.tensors.get("offsets")
    if offsets is None or offsets.dtype not in (torch.int32, torch.int64):
        raise PayloadError("sz payload lacks its chunk offsets: truncated or corrupted")
    return blocks.Reader(headers, offsets, words, dtype=encoded.spec.dtype, count=encoded.spec.numel)
