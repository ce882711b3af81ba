"""The codec ``sz`` on NVIDIA GPUs, in CUDA C++ (sz.cu): the formats and values of ``lowtide.codecs.sz``.

How long a payload gets is known to the device alone. The encoder is given room for a guess (``capacity``, from the last
payload of the same place) and told to report how much it needs; nothing is written past the room. ``settle`` is called
with the report: it hands back the payload, or encodes the tensor again with the room it needs. Whoever gives no ticket
waits for the device instead.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import blocks, dither, exact, layout, rans
from lowtide.coding.grid import Grid
from lowtide.kernels import _nvrtc, _tickets
from lowtide.kernels._sz_twin import SzTwin
from lowtide.records import Bound, Encoded, TensorSpec

PROGRAM = _nvrtc.Program("sz", resources.files("lowtide.kernels").joinpath("sz.cu").read_text())

_TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "Bfloat"}
_TENSOR, _RUNS, _INNER, _MIXED, _ANY = range(5)
_WARPS = 8  # of a block, a chunk each
_ARGS = struct.Struct("<12Q2Q4I2I4i6I")
_CODES, _EXACTS = 512, 64  # escapes that a warp can stage, as in sz.cu
_SLOTS, _SLOT_NBYTES = 256, 8192  # where chunks that outgrow their stages go on
_ROUND = {4: 4, 3: 3, 2: 2, 1: 1}  # rows that the rans kernels work on at a time
_SLACK = 1 / 32  # of room beyond the last payload of the same place
_SMALL = 1 << 15  # values; below, the heads of rans outweigh its gain


@dataclass(frozen=True, slots=True)
class SzCuda(SzTwin):
    """The twin of one ``Sz``."""

    ticketed: ClassVar[bool] = True

    @classmethod
    def of(cls, codec: Sz) -> SzCuda:
        return cls(replace(codec, coder="rans") if codec.coder == "auto" else codec)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in _TYPES

    def fit(
        self, grid: Grid, sample: Tensor, count: int, zero_code: bool | None = None, before: Plan | None = None
    ) -> Plan:
        plan = SzTwin.fit(self, grid, sample, count, zero_code, before)
        return replace(plan, model=None) if count < _SMALL else plan

    def encode(
        self,
        x: Tensor,
        bound: Bound | None = None,
        *,
        seed: int = 0,
        plan: Plan | None = None,
        ticket: Tensor | None = None,
        capacity: int | None = None,
    ) -> Encoded:
        plan = plan if plan is not None else self.plan(x, bound)
        spec = layout.spec_of(x)
        job = self._encoding(spec, plan)
        if job is None:
            encoded = self.codec.encode(x, seed=seed, plan=plan)
            if ticket is not None:
                ticket.fill_(_words(encoded))
            return encoded
        if ticket is not None:
            return self._launch(
                x, spec, plan, seed, job, job.most if capacity is None else min(capacity, job.most), ticket
            )
        told = _tickets.take()
        encoded = self._launch(x, spec, plan, seed, job, job.most, told.word)
        return _trim(encoded, told.wait())

    def room(self, words: float) -> int:
        """Words to make room for where the last payload of the same place had ``words``."""
        return int(words * (1 + _SLACK)) + 1024

    def settle(self, encoded: Encoded, x: Tensor, status: int, plan: Plan | None = None) -> Encoded:
        """The payload, now that ``status`` words are known to be needed for it; ``plan`` is what it was made by."""
        if status <= _words(encoded):
            return encoded
        assert plan is not None, "a payload that did not fit is made again, by the plan that it was made by"
        return self.encode(x, seed=encoded.meta["seed"], plan=plan)

    def _encoding(self, spec: TensorSpec, plan: Plan) -> _Encoding | None:
        """What does not change between two tensors of the same place; None where the kernels do not reach."""
        model = plan.model
        like = (spec.shape, spec.stride, spec.dtype, plan.grid.axes)
        how = (model.alphabet, model.bits) if model is not None else None
        return _remember(
            _ENCODINGS, (like, plan.zero_code, how, self.codec), lambda: _Encoding.of(self.codec, spec, plan)
        )

    def _launch(
        self, x: Tensor, spec: TensorSpec, plan: Plan, seed: int, job: _Encoding, capacity: int, ticket: Tensor
    ) -> Encoded:
        grid, model, device = plan.grid, plan.model, x.device
        inverse, promised, step, centre = grid.inverse, grid.promised, grid.step, grid.centre
        assert inverse is not None and promised is not None, "only the decoder works without a bound"
        words = torch.empty(capacity, dtype=torch.int32, device=device)
        heads = torch.empty(job.heads, dtype=torch.int32, device=device)
        headers_at = freqs_at = 0
        if model is None:
            headers = torch.empty(job.headers, dtype=torch.uint8, device=device)
            headers_at = headers.data_ptr()
            parts = {"headers": headers, "offsets": heads, "words": words, "step": step}
        else:
            freqs_at = model.freqs.data_ptr()
            parts = {"heads": heads, "words": words, "freqs": model.freqs, "step": step}
        if centre is not None:
            parts["centre"] = centre
        index = device.index or 0
        stream = _stream(index)
        low, high = _keys(seed)
        work, spill, epoch = _workspace(device, stream, job.blocks)
        arguments = _ARGS.pack(
            x.data_ptr(), inverse.data_ptr(), promised.data_ptr(), step.data_ptr(),
            centre.data_ptr() if centre is not None else 0, freqs_at,
            words.data_ptr(), heads.data_ptr(), headers_at, work, ticket.data_ptr(), spill, spec.numel, capacity,
            job.chunks, low, high, epoch, *job.sizes, _SLOTS, *job.where.numbers,
        )  # fmt: skip
        function = _function(job.kernel, index, *job.template, values=job.values)
        function.launch(job.blocks, _WARPS * 32, job.shared, arguments, stream)
        return Encoded(self.codec.name, self.codec.version, spec, {**job.meta, "seed": seed}, parts)

    def _decode(self, encoded: Encoded, *, mask: bool) -> Tensor:
        encoded.require(self.codec.name, self.codec.version)
        spec, meta, tensors = encoded.spec, encoded.meta, encoded.tensors
        job = _decoding(spec, meta)
        if job is None:
            return self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)
        flat = torch.empty(job.numel, dtype=spec.dtype, device=spec.device)
        index = spec.device.index or 0
        low, high = _keys(meta["seed"])
        headers_at = freqs_at = 0
        if job.headers:
            heads = encoded.tensor("offsets", dtype=torch.int32, numel=job.heads)
            headers_at = encoded.tensor("headers", dtype=torch.uint8, numel=job.headers).data_ptr()
        else:
            heads = encoded.tensor("heads", dtype=torch.int32, numel=job.heads)
            freqs_at = encoded.tensor("freqs", dtype=torch.int16, numel=job.symbols).data_ptr()
        words = encoded.tensor("words", dtype=torch.int32)
        centre = encoded.tensor("centre", dtype=torch.bfloat16) if meta["centred"] else None
        arguments = _ARGS.pack(
            flat.data_ptr(), 0, 0, tensors["step"].data_ptr(), centre.data_ptr() if centre is not None else 0,
            freqs_at, words.data_ptr(), heads.data_ptr(), headers_at, 0, 0, 0, job.numel, words.numel(),
            job.chunks, low, high, 0, *job.sizes, 0, *job.where.numbers,
        )  # fmt: skip
        function = _function(job.kernel, index, *job.template, mask=mask, values=job.values)
        function.launch(min(job.blocks, _processors(index) * 8), _WARPS * 32, 0, arguments, _stream(index))
        return layout.restore(flat, spec)


@dataclass(frozen=True, slots=True)
class _Encoding:
    """What an encoder's launch needs beyond pointers: the same for all tensors of one geometry under one model."""

    kernel: str
    template: tuple[str, int, int, bool]
    values: int
    chunks: int
    blocks: int
    heads: int
    headers: int
    most: int  # words that suffice whatever the values
    shared: int
    sizes: tuple[int, int, int, int, int]  # rows, stage, size, first, fill
    where: _Where
    meta: Mapping[str, Any]

    @classmethod
    def of(cls, codec: Sz, spec: TensorSpec, plan: Plan) -> _Encoding | None:
        where, model = _entry(spec, plan.grid.axes), plan.model
        if not spec.numel or where is None:
            return None
        zero = int(plan.zero_code) * (2 if model is not None and model.alphabet.low == 0 else 1)
        template = (_TYPES[spec.dtype], where.kind, zero, codec.rounding == "dither")
        meta, most = codec.payload(spec, plan, 0, {}).meta, _most(spec, plan)
        if model is None:
            chunks = -(-spec.numel // blocks.CHUNK)
            return cls(
                "blocks_encode", template, 0, chunks, -(-chunks // _WARPS), chunks + 1, chunks * blocks.HEADER_NBYTES,
                most, 0, (0, 0, 0, 0, 0), where, meta,
            )  # fmt: skip
        alphabet, stage = model.alphabet, _stage(model)
        chunks = -(-spec.numel // alphabet.chunk)
        shared = _WARPS * 4 * (stage // 2 + _CODES + _EXACTS * exact.escape_words(spec.dtype))
        sizes = (alphabet.rows, stage, alphabet.size, alphabet.low, alphabet.fill)
        return cls(
            "rans_encode", template, alphabet.values, chunks, -(-chunks // _WARPS), 3 * chunks, 0, most, shared,
            sizes, where, meta,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Decoding:
    """The same for a decoder."""

    kernel: str
    template: tuple[str, int, int, bool]
    values: int
    numel: int
    chunks: int
    blocks: int
    heads: int
    headers: int
    symbols: int
    sizes: tuple[int, int, int, int, int]
    where: _Where

    @classmethod
    def of(cls, spec: TensorSpec, meta: Mapping[str, Any]) -> _Decoding | None:
        where = _entry(spec, meta.get("axes", ()))
        if meta["kind"] == "empty" or where is None or spec.dtype not in _TYPES:
            return None
        template = (_TYPES[spec.dtype], where.kind, int(meta["zero_code"]), meta["rounding"] == "dither")
        if meta["kind"] == "blocks":
            chunks = -(-spec.numel // blocks.CHUNK)
            return cls(
                "blocks_decode", template, 0, spec.numel, chunks, -(-chunks // _WARPS), chunks + 1,
                chunks * blocks.HEADER_NBYTES, 0, (0, 0, 0, 0, 0), where,
            )  # fmt: skip
        alphabet = meta["alphabet"]
        rows, size, values = alphabet["rows"], alphabet["size"], alphabet["values"]
        chunks = -(-spec.numel // (rows * rans.ROW))
        return cls(
            "rans_decode", template, values, spec.numel, chunks, -(-chunks // _WARPS), 3 * chunks, 0, size**values,
            (rows, 0, size, alphabet["low"], 0), where,
        )  # fmt: skip


def _decoding(spec: TensorSpec, meta: Mapping[str, Any]) -> _Decoding | None:
    like = (spec.shape, spec.stride, spec.dtype, meta.get("axes"))
    alphabet = meta.get("alphabet")
    how = (alphabet["rows"], alphabet["size"], alphabet["low"], alphabet["values"]) if alphabet is not None else None
    key = (like, meta["kind"], meta.get("zero_code"), meta.get("rounding"), how)
    return _remember(_DECODINGS, key, lambda: _Decoding.of(spec, meta))


_ENCODINGS: dict[Any, _Encoding | None] = {}
_DECODINGS: dict[Any, _Decoding | None] = {}
V = TypeVar("V")


def _remember(known: dict[Any, V], key: Any, find: Callable[[], V]) -> V:
    """What is known under ``key``, found out at first; a table that has grown long starts anew."""
    try:
        return known[key]
    except KeyError:
        if len(known) > 4096:
            known.clear()
        return known.setdefault(key, find())


@dataclass(frozen=True, slots=True)
class _Where:
    """How elements find their steps: the kind of kernel, and two terms (``layout.index_terms``)."""

    kind: int
    numbers: tuple[int, ...]


_ENTRIES: dict[Any, _Where | None] = {}


def _entry(spec: TensorSpec, axes: tuple[int, ...]) -> _Where | None:
    """None where the kernels do not reach: more than two terms, or places beyond 31 bits of words."""
    return _remember(_ENTRIES, (spec.shape, spec.stride, axes), lambda: _find_entry(spec, axes))


def _find_entry(spec: TensorSpec, axes: tuple[int, ...]) -> _Where | None:
    terms = layout.index_terms(spec, axes)
    if len(terms) > 2 or spec.nbytes >= 1 << 33 or spec.numel >= 1 << 32:
        return None
    none = (1, 1, 0)
    if not terms:
        return _Where(_TENSOR, (*none, *none))
    if len(terms) == 2:
        return _Where(_ANY, (*terms[0], *terms[1]))
    divide, modulo, times = terms[0]
    assert times == 1, "a single term counts by one"
    if divide % 4 == 0:
        kind = _RUNS
    elif divide == 1 and modulo % 4 == 0:
        kind = _INNER
    elif divide >= 4 or (divide == 1 and modulo >= 4):
        kind = _MIXED
    else:
        kind = _ANY
    return _Where(kind, (*terms[0], *none))


@lru_cache(maxsize=4096)  # a decoder wants what its encoder had
def _keys(seed: int) -> tuple[int, int]:
    """The keys of the dither as the kernels want them: the second one mixed with itself."""
    low, high = dither.keys(seed)
    high &= 0xFFFFFFFF
    return low & 0xFFFFFFFF, high ^ high >> 15


def _stage(model: rans.Model) -> int:
    """16-bit words that a warp can stage: a little more than a chunk is expected to need; the rest goes to a slot."""
    alphabet = model.alphabet
    worst = alphabet.rows * rans.ROW // alphabet.values
    wanted = int(model.bits * alphabet.chunk / 16 * 1.25) + 160
    return min(worst, wanted) // 2 * 2 + 32 * (4 * _ROUND[alphabet.values] // alphabet.values)


def _most(spec: TensorSpec, plan: Plan) -> int:
    """Words that suffice whatever the values: every chunk raw."""
    chunk = blocks.CHUNK if plan.model is None else plan.model.alphabet.chunk
    whole, rest = divmod(spec.numel, chunk)
    return whole * exact.raw_words(spec.dtype, chunk) + exact.raw_words(spec.dtype, rest)


def _words(encoded: Encoded) -> int:
    words = encoded.tensors.get("words")
    return words.numel() if words is not None else 0


def _trim(encoded: Encoded, words: int) -> Encoded:
    if words == encoded.tensors["words"].numel():
        return encoded
    return replace(encoded, tensors={**encoded.tensors, "words": encoded.tensors["words"][:words].clone()})


_FUNCTIONS: dict[Any, _nvrtc.Function] = {}


def _function(
    kernel: str, device: int, dtype: str, entry: int, zero: int, dithered: bool, *, values: int = 0, mask: bool = False
) -> _nvrtc.Function:
    key = (kernel, device, dtype, entry, zero, dithered, values, mask)
    function = _FUNCTIONS.get(key)
    if function is None:
        _FUNCTIONS[key] = function = PROGRAM.function(
            expression(kernel, dtype, entry, zero, dithered, values, mask), device
        )
    return function


def expression(kernel: str, dtype: str, entry: int, zero: int, dithered: bool, values: int, mask: bool) -> str:
    """The template of a kernel, as NVRTC names it."""
    parts = [dtype]
    if values:
        parts += [str(values), str(_ROUND[values])]
    parts += [str(entry), str(zero), str(dithered).lower()]
    if kernel.endswith("decode"):
        parts.append(str(mask).lower())
    return f"{kernel}<{', '.join(parts)}>"


class _Workspace:
    """What the blocks of an encoder's grid tell each other through; one for each stream, so that none is shared."""

    def __init__(self, device: torch.device) -> None:
        self.words = torch.zeros(1 << 16, dtype=torch.int64, device=device)
        self.spill = torch.empty(_SLOTS * _SLOT_NBYTES, dtype=torch.uint8, device=device)
        self.epoch = 0

    def next(self, grid: int) -> tuple[int, int, int]:
        if grid + 1 > self.words.numel() or self.epoch == (1 << 30) - 1:
            self.words = torch.zeros(max(2 * grid, self.words.numel()), dtype=torch.int64, device=self.words.device)
            self.epoch = 0
        self.epoch += 1
        return self.words.data_ptr(), self.spill.data_ptr(), self.epoch


_WORKSPACES: dict[tuple[torch.device, int], _Workspace] = {}
_WORKSPACES_LOCK = threading.Lock()


def _workspace(device: torch.device, stream: int, grid: int) -> tuple[int, int, int]:
    with _WORKSPACES_LOCK:
        space = _WORKSPACES.get((device, stream))
        if space is None:
            space = _WORKSPACES[(device, stream)] = _Workspace(device)
        return space.next(grid)


def _stream(device: int) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device))


_PROCESSORS: dict[int, int] = {}


def _processors(device: int) -> int:
    if device not in _PROCESSORS:
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROCESSORS[device]
