"""Error-bounded values: a grid anchored at zero, dither or nearest rounding, an entropy coder, and an exact way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lowtide import bounds
from lowtide.bounds import CONSTANT, BoundRule, BoundSource
from lowtide.coding import blocks, layout, membership, rans, rans_fit
from lowtide.coding.grid import Grid
from lowtide.coding.survey import PIECES, survey
from lowtide.errors import BoundError, DtypeError, PayloadError, PolicyError, UnknownNameError
from lowtide.records import Bound, Encoded, Need, TensorSpec

__all__ = ["Sz"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_ROUNDINGS = ("dither", "nearest", "stochastic")
_CODERS = ("auto", "blocks", "rans")
_PREDICTIONS = ("off", "row")
# Elements worked on at a time: few enough for the cache of a CPU, many elsewhere to have few launches.
_SLAB_CPU, _SLAB = 1 << 17, 1 << 24
_ZERO_SHARE = 1 / 64  # above it, "exactly zero" gets a code of its own
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST_BITS = 9.0  # a value; where rans would need more, its alphabet is too small


@dataclass(frozen=True, slots=True)
class Plan:
    """What is settled before a tensor is coded, from itself or from earlier tensors of the same place in a net.

    The values that come back depend on ``grid`` and, for zeros, on ``zero_code``; ``model`` (None: coder ``blocks``)
    decides about the size only.
    """

    grid: Grid
    zero_code: bool
    model: rans.Model | None
    ready: Any = field(default=None, init=False, repr=False, compare=False)  # for a twin; not copied

    def on(self, grid: Grid) -> Plan:
        """The same with another grid of the same kind; what a twin has made ready is made to fit."""
        plan = replace(self, grid=grid)
        if (
            self.ready is not None
            and grid.axes == self.grid.axes
            and (grid.centre is None) == (self.grid.centre is None)
        ):
            object.__setattr__(plan, "ready", self.ready.on(grid))
        return plan


@dataclass(frozen=True, slots=True)
class Sz:
    """For every finite x with bound eb: |x' - x| <= eb in exact arithmetic, the rounding of x' to its dtype included.

    q = floor(x / step + dither) and x' is the middle of q's interval; ``lowtide.coding.grid`` has the arithmetic and
    the proof. With dither, E[x'] = x to within step / 512 and the error is uniform, whatever x is; its variance is
    step**2 / 12. NaN and inf come back bit for bit; so do values beyond 2046 steps. A bound of zero or NaN that came
    out of a statistic stores the elements it governs exactly. Chunks of values that cannot be coded for less are stored
    raw, so a payload exceeds the raw values at most by its heads and steps. Any shape and any dense layout, coded in
    memory order.

    Zeros come back as zeros where "exactly zero" has a code of its own: if more than one value in 64 of a sample is
    zero, with any rounding but dither anyway, and with ``keep_zeros``, so that ``nonzero`` recovers it without the
    values.

    ``rounding``: ``dither``, ``nearest``, or, for float32, ``stochastic``: to one of the multiples of the step around
    x, at random, so that the mean is x. Its step is half as large; it is for values most of which lie far below it.

    ``coder``: ``rans`` comes near the entropy of the codes, ``blocks`` is simpler; ``auto`` is rans on NVIDIA GPUs and
    blocks elsewhere. Values do not depend on it.

    ``predict``: with ``row`` the coder rans stores, in place of codes, by how much they differ from the one before in
    memory, wherever a sample says that this saves 5 %; never where zero has a code. Values do not depend on that
    either. ``off`` is the default until its speed has been measured on a GPU.
    """

    rounding: str = "dither"
    coder: str = "auto"
    keep_zeros: bool = False
    predict: str = "off"

    name: ClassVar[str] = "sz"
    version: ClassVar[int] = 2
    carries_values: ClassVar[bool] = True
    takes_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.rounding not in _ROUNDINGS:
            raise UnknownNameError("rounding", self.rounding, _ROUNDINGS)
        if self.coder not in _CODERS:
            raise UnknownNameError("coder", self.coder, _CODERS)
        if self.predict not in _PREDICTIONS:
            raise UnknownNameError("prediction of sz", self.predict, _PREDICTIONS)
        if self.predict != "off" and self.coder == "blocks":
            raise PolicyError(
                f"sz predicts values for the coder rans alone; got predict={self.predict!r} and coder='blocks': "
                "leave out predict, or take coder='rans' or 'auto'"
            )

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 if self.rounding == "stochastic" else dtype in _DTYPES

    @property
    def learns(self) -> bool:
        """Whether another survey can change the plan: ``blocks`` has no tables."""
        return self.coder == "rans"

    def grid(self, x: Tensor, bound: Bound | None) -> Grid:
        """Steps for tensors like ``x`` under ``bound``; refuses what cannot be promised."""
        if not self.accepts(x.dtype):
            known = filter(self.accepts, _DTYPES)
            raise DtypeError(f"sz with rounding {self.rounding!r} stores {', '.join(map(str, known))}; got {x.dtype}")
        if bound is None:
            raise BoundError("sz needs an error bound: pass Bound.absolute(...) or a relative rule")
        bound.check_shape(TensorSpec.of(x))
        return Grid.of(bound, x.dtype, x.device, self.rounding, _means(x, bound.axes))

    def plan(self, x: Tensor, bound: Bound | None, zero_code: bool | None = None) -> Plan:
        """A plan from the tensor itself; ``zero_code`` as it was decided before, if it was."""
        grid = self.grid(x, bound)
        return self.fit(grid, self.survey(x, grid).cpu(), x.numel(), zero_code)

    def measure(self, x: Tensor, source: BoundSource, need: Need) -> tuple[Bound, Grid] | None:
        """What ``source`` says of ``x`` and the grid it leads to, where the host knows both; None elsewhere."""
        axes = need.axes(x.dim())
        if axes or not isinstance(source, BoundRule) or source.unit not in CONSTANT:
            return None
        return source.resolve(x, need), Grid.uniform(source.value, x.dtype, x.device, self.rounding)

    def survey(self, x: Tensor, grid: Grid, *, pieces: int = PIECES) -> Tensor:
        """Codes of a sample, as int16 on the device of ``x``, with a mark for zeros; nothing waits for them."""
        return survey(layout.memory_view(x), TensorSpec.of(x), grid, pieces=pieces)

    def fit(
        self, grid: Grid, sample: Tensor, count: int, zero_code: bool | None = None, before: Plan | None = None
    ) -> Plan:
        """A plan from a survey, once it has reached the CPU; ``before`` is the plan that it follows."""
        if zero_code is None:
            zeros = int((sample == rans.ZERO_CODE).sum())
            zero_code = self.rounding == "dither" and zeros > _ZERO_SHARE * sample.numel()
        zero_code = zero_code or self.keep_zeros
        if self.coder != "rans" or not sample.numel():
            return Plan(grid, zero_code, None)
        known = before.model if before is not None else None
        model = rans_fit.fit(sample, count, known, zero_code=zero_code, predict=self.predict == "row")
        if model.bits > _MOST_BITS:
            return Plan(grid, zero_code, None)
        freqs = model.freqs.pin_memory() if grid.step.is_cuda else model.freqs
        return Plan(grid, zero_code, replace(model, freqs=freqs.to(grid.step.device, non_blocking=True)))

    def encode(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, plan: Plan | None = None) -> Encoded:
        plan = plan if plan is not None else self.plan(x, bound)
        spec, flat = layout.spec_of(x), layout.memory_view(x)
        if not spec.numel:
            return Encoded(self.name, self.version, spec, {"kind": "empty"})
        if plan.model is not None:
            q, zero, lost = _codes(flat, spec, plan, seed, 0, spec.numel)
            parts = rans.write(q, zero, lost, flat, plan.model, lambda: _restored(q, zero, spec, plan, seed))
            return self.payload(spec, plan, seed, parts)
        streams = []
        for start, stop in _slabs(spec):
            q, zero, lost = _codes(flat[start:stop], spec, plan, seed, start, stop)
            code = q.abs() if zero is None else (q.abs() + 1) * ~(zero | lost)
            streams.append(blocks.write(code, (q < 0) & (code > 0), lost, flat[start:stop]))
        return self.payload(spec, plan, seed, blocks.join(streams))

    def payload(self, spec: TensorSpec, plan: Plan, seed: int, tensors: Mapping[str, Tensor]) -> Encoded:
        """``tensors`` under the plan that they were coded by."""
        meta: dict[str, Any] = {
            "kind": "blocks" if plan.model is None else "rans",
            "zero_code": plan.zero_code,
            "axes": plan.grid.axes,
            "centred": plan.grid.centre is not None,
            "rounding": self.rounding,
            "seed": seed,
        }
        if plan.model is not None:
            meta["alphabet"] = plan.model.alphabet.meta()
        parts = {**tensors, "step": plan.grid.step}
        if plan.grid.centre is not None:
            parts["centre"] = plan.grid.centre
        return Encoded(self.name, self.version, spec, meta, parts)

    def decode(self, encoded: Encoded) -> Tensor:
        encoded.require(self.name, self.version)
        spec = encoded.spec
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        if encoded.meta["kind"] == "empty":
            return layout.restore(flat, spec)
        grid, reader = stored_grid(encoded), _reader(encoded)
        for start, stop in reader.slabs:
            q, zero = reader.read(start, stop)
            value = grid.value(q, range(start, stop), spec, encoded.meta["seed"])
            if zero is not None:
                value.view(_BITS[value.dtype.itemsize]).mul_(~zero)
            flat[start:stop] = value
        reader.write_exact(flat)
        return layout.restore(flat, spec)

    def nonzero(self, encoded: Encoded) -> Tensor:
        """Where x was not zero, exactly, as ones and zeros in the dtype of x; needs a payload with a zero code."""
        encoded.require(self.name, self.version)
        spec = encoded.spec
        flat = torch.empty(spec.numel, dtype=spec.dtype, device=spec.device)
        if encoded.meta["kind"] == "empty":
            return layout.restore(flat, spec)
        require_zeros(encoded)
        reader = _reader(encoded)
        for start, stop in reader.slabs:
            zero = reader.read(start, stop)[1]
            assert zero is not None, "the payload has a code for zero"
            flat[start:stop] = ~zero
        reader.write_exact(flat)
        return layout.restore(reader.nonzero(flat).to(spec.dtype), spec)

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        """``gradient`` where x was not zero, and zero elsewhere; it lies in memory as x did."""
        return membership.gated(gradient, self.nonzero(encoded))

    def step(self, bound: Bound, spec: TensorSpec) -> Tensor:
        """The step that a bound leads to for tensors like ``spec``: the error's variance is step**2 / 12."""
        return Grid.of(bound, spec.dtype, spec.device, self.rounding).step.float()

    def codes(self, x: Tensor, bound: Bound | None = None, *, seed: int = 0, plan: Plan | None = None) -> Tensor:
        """The integers that are stored for ``x``, in memory order, "exactly zero" (if it has a code) as 4096."""
        plan = plan if plan is not None else self.plan(x, bound)
        spec = layout.spec_of(x)
        q, zero, _ = _codes(layout.memory_view(x), spec, plan, seed, 0, spec.numel)
        return q if zero is None else torch.where(zero, 4096, q)


def stored_grid(encoded: Encoded) -> Grid:
    axes = encoded.meta["axes"]
    count = 1
    for axis in axes:
        count *= encoded.spec.shape[axis]
    step = encoded.tensor("step", dtype=torch.bfloat16, numel=count)
    centre = encoded.tensor("centre", dtype=torch.bfloat16, numel=count) if encoded.meta["centred"] else None
    return Grid(axes, encoded.meta["rounding"], step, centre)


def _means(x: Tensor, axes: tuple[int, ...]) -> Tensor | None:
    """The mean of each channel, of some of the tensor; None where there is one step for all, or one for each row."""
    if not axes or 0 in axes or not x.numel():
        return None
    over = [axis for axis in range(x.dim()) if axis not in axes]
    return bounds.sample(x, axes).mean(over, dtype=torch.promote_types(x.dtype, torch.float32))


def require_zeros(encoded: Encoded) -> None:
    if not encoded.meta["zero_code"]:
        raise PayloadError("sz payload has no code for zero: encode with keep_zeros=True to ask for non-zeros")


def _codes(
    part: Tensor, spec: TensorSpec, plan: Plan, seed: int, start: int, stop: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes, where they stand for zero (None without such a code), and what no code carries."""
    q, lost = plan.grid.quantise(part, range(start, stop), spec, seed)
    if not plan.zero_code:
        return q, None, lost
    zero = part == 0
    return q * ~zero, zero, lost & ~zero


def _restored(q: Tensor, zero: Tensor | None, spec: TensorSpec, plan: Plan, seed: int) -> Tensor:
    """What codes come back as; where zero has a code, another value that comes back as zero is minus zero."""
    value = plan.grid.value(q, range(spec.numel), spec, seed)
    if zero is None:
        return value
    return torch.where(zero, 0.0, torch.where(value == 0, -0.0, value))


def _slabs(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    size = _SLAB_CPU if spec.device.type == "cpu" else _SLAB
    for start in range(0, spec.numel, size):
        yield start, min(start + size, spec.numel)


def _reader(encoded: Encoded) -> _Blocks | _Rans:
    return _Rans(encoded) if encoded.meta["kind"] == "rans" else _Blocks(encoded)


class _Blocks:
    """Codes of a payload of coder ``blocks``, slab by slab."""

    def __init__(self, encoded: Encoded) -> None:
        headers = encoded.tensor("headers", dtype=torch.uint8)
        words = encoded.tensor("words", dtype=torch.int32)
        offsets = encoded.tensors.get("offsets")
        if offsets is None or offsets.dtype not in (torch.int32, torch.int64):
            raise PayloadError("sz payload lacks its chunk offsets: truncated or corrupted")
        self._reader = blocks.Reader(headers, offsets, words, dtype=encoded.spec.dtype, count=encoded.spec.numel)
        self._zero_code = encoded.meta["zero_code"]
        self.slabs = list(_slabs(encoded.spec))

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        code, negative = self._reader.read(start, stop)
        magnitude = code - 1 if self._zero_code else code
        return magnitude * (1 - 2 * negative.int()), code == 0 if self._zero_code else None

    def write_exact(self, flat: Tensor) -> None:
        self._reader.write_exact(flat)

    def nonzero(self, flat: Tensor) -> Tensor:
        return flat != 0


class _Rans:
    """Codes of a payload of coder ``rans``, all at once."""

    def __init__(self, encoded: Encoded) -> None:
        self._alphabet = rans.Alphabet(**encoded.meta["alphabet"])
        self._parts = {
            "heads": encoded.tensor("heads", dtype=torch.int32),
            "words": encoded.tensor("words", dtype=torch.int32),
            "freqs": encoded.tensor("freqs", dtype=torch.int16),
        }
        self._dtype, self._count = encoded.spec.dtype, encoded.spec.numel
        self.slabs = [(0, self._count)]

    def read(self, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        return rans.read(self._parts, self._alphabet, dtype=self._dtype, count=self._count)

    def write_exact(self, flat: Tensor) -> None:
        rans.write_exact(self._parts, self._alphabet, flat)

    def nonzero(self, flat: Tensor) -> Tensor:
        """In raw chunks minus zero stands for a value that is not zero."""
        return flat.view(_BITS[flat.dtype.itemsize]) != 0
