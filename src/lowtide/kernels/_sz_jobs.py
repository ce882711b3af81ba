"""What a launch of the kernels in sz_*.cu needs beyond addresses: the same for all tensors of one place in a net."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import blocks, exact, grid, layout, rans
from lowtide.records import TensorSpec

TYPES = {torch.float32: "float", torch.float16: "Half", torch.bfloat16: "Bfloat"}
WARPS = 8  # of a block, a chunk each
CODES, EXACTS = 320, 64  # escapes that a warp can stage, as in sz_rans.cuh
ROUND = {4: 4, 3: 3, 2: 2, 1: 1}  # rows that the rans kernels work on at a time
_TENSOR, _RUNS, _INNER, _MIXED, _ANY, _MANY, _FIXED = range(7)
_MOST_STAGED = 2048  # channels that a block keeps two numbers each of in shared memory
_ROUNDING, _ORIGIN = 0x4B400000, 1.5 * 2**23  # the bits of a float, and the float


@dataclass(frozen=True, slots=True)
class Encoding:
    """What an encoder's launch needs beyond pointers: the same for all tensors of one geometry under one model."""

    kernel: str
    template: tuple[str, int, int, bool]
    values: int
    numel: int
    chunks: int
    blocks: int
    heads: int
    headers: int
    most: int  # words that suffice whatever the values
    shared: int
    sizes: tuple[int, int, int, int, int]  # rows, stage, size, first, fill
    digits: tuple[float, int, int, int, int, int, int]  # origin, lowest, beyond, three pairs, room
    where: Where
    meta: Mapping[str, Any]
    predicted: bool = False
    whole: bool = field(init=False)  # values come back as whole steps, though dither was added
    headers_from: int = field(init=False)  # where in a payload's buffer, in 32-bit words, they begin: after the heads
    words_from: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "whole", self.meta["rounding"] == "stochastic")
        object.__setattr__(self, "headers_from", _aligned(self.heads))
        object.__setattr__(self, "words_from", self.headers_from + _aligned(-(-self.headers // 4)))

    @property
    def is_folded(self) -> bool:
        """Whether it is given the two tensors of a pair."""
        return self.template[0].startswith("Folded")

    @classmethod
    def of(cls, codec: Sz, spec: TensorSpec, plan: Plan) -> Encoding | None:
        where, model = entry_of(spec, plan.grid.axes), plan.model
        if not spec.numel or where is None:
            return None
        zero = int(plan.zero_code) * (2 if model is not None and model.alphabet.low == 0 else 1)
        template = (TYPES[spec.dtype], where.kind, zero, codec.rounding != "nearest")
        meta, most = codec.payload(spec, plan, 0, {}).meta, _most(spec, plan)
        room = grid.reach(spec.dtype) - (grid.farthest_centre(spec.dtype) if plan.grid.centre is not None else 0)
        if model is None:
            chunks = -(-spec.numel // blocks.CHUNK)
            return cls(
                "blocks_encode", template, 0, spec.numel, chunks, -(-chunks // WARPS), chunks + 1,
                chunks * blocks.HEADER_NBYTES, most, where.shared(), (0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0, room), where,
                meta,
            )  # fmt: skip
        alphabet, stage = model.alphabet, stage_of(model)
        chunks = -(-spec.numel // alphabet.chunk)
        shared = where.shared(ROUND[alphabet.values])
        if alphabet.values <= 2 and spec.dtype.itemsize == 2 and where.kind in (_INNER, _FIXED):  # LIMITED
            room = grid.reach(spec.dtype)
            shared += shared // 4
        shared += WARPS * 4 * (stage // 2 + CODES + EXACTS * exact.escape_words(spec.dtype))
        sizes = (alphabet.rows, stage, alphabet.size, alphabet.low, alphabet.fill)
        return cls(
            "rans_encode", template, alphabet.values, spec.numel, chunks, -(-chunks // WARPS), 3 * chunks, 0, most,
            shared, sizes, _digits(alphabet, room, codec.rounding), where, meta, alphabet.predicted,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoding:
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
    shared: int
    sizes: tuple[int, int, int, int, int]
    where: Where
    predicted: bool = False

    @classmethod
    def of(cls, spec: TensorSpec, meta: Mapping[str, Any]) -> Decoding | None:
        where = entry_of(spec, meta.get("axes", ()))
        if meta["kind"] == "empty" or where is None or spec.dtype not in TYPES:
            return None
        template = (TYPES[spec.dtype], where.kind, int(meta["zero_code"]), meta["rounding"] == "dither")
        if meta["kind"] == "blocks":
            chunks = -(-spec.numel // blocks.CHUNK)
            return cls(
                "blocks_decode", template, 0, spec.numel, chunks, -(-chunks // WARPS), chunks + 1,
                chunks * blocks.HEADER_NBYTES, 0, where.shared(), (0, 0, 0, 0, 0), where,
            )  # fmt: skip
        alphabet = meta["alphabet"]
        rows, size, values = alphabet["rows"], alphabet["size"], alphabet["values"]
        chunks = -(-spec.numel // (rows * rans.ROW))
        return cls(
            "rans_decode", template, values, spec.numel, chunks, -(-chunks // WARPS), 3 * chunks, 0, size**values,
            where.shared(), (rows, 0, size, alphabet["low"], alphabet["fill"]), where, alphabet.get("predicted", False),
        )  # fmt: skip


def encoding_of(codec: Sz, spec: TensorSpec, plan: Plan, folds: torch.dtype | None = None) -> Encoding | None:
    """What does not change between two tensors of the same place; None where the kernels do not reach.

    ``folds``: what is coded are pairs of tensors of that dtype, folded by the encoder if it ``is_folded``.
    """
    model = plan.model
    like = (spec.shape, spec.stride, spec.dtype, plan.grid.axes, plan.grid.centre is not None)
    how = (model.alphabet, model.bits) if model is not None else None

    def find() -> Encoding | None:
        job = Encoding.of(codec, spec, plan)
        return _folded(job, spec, folds) or job if job is not None and folds is not None else job

    return _remember(_ENCODINGS, (like, plan.zero_code, how, codec, folds), find)


def decoding_of(spec: TensorSpec, meta: Mapping[str, Any]) -> Decoding | None:
    like = (spec.shape, spec.stride, spec.dtype, meta.get("axes"))
    how = _alphabet_of(meta)
    key = (like, meta["kind"], meta.get("zero_code"), meta.get("rounding"), how)
    return _remember(_DECODINGS, key, lambda: Decoding.of(spec, meta))


def unfolding_of(spec: TensorSpec, meta: Mapping[str, Any], dtype: torch.dtype) -> Decoding | None:
    """What a decoder needs that gives the tensors of a pair, of ``dtype``, in place of the one that they were folded
    into; None where there is none."""
    how = _alphabet_of(meta)
    key = (spec.shape, spec.stride, spec.dtype, meta["kind"], meta.get("zero_code"), meta.get("rounding"), how, dtype)

    def find() -> Decoding | None:
        job = decoding_of(spec, meta)
        return _folded(job, spec, dtype) if job is not None else None

    return _remember(_UNFOLDINGS, key, find)


def _alphabet_of(meta: Mapping[str, Any]) -> tuple[int, ...] | None:
    """What a decoder asks of it."""
    alphabet = meta.get("alphabet")
    if alphabet is None:
        return None
    names = ("rows", "size", "low", "values", "fill")
    return *(alphabet[name] for name in names), alphabet.get("predicted", False)


J = TypeVar("J", Encoding, Decoding)


def _folded(job: J, spec: TensorSpec, dtype: torch.dtype) -> J | None:
    """The same job for kernels that fold or unfold pairs of ``dtype`` while they code; None where there are none."""
    typename, entry, zero, dithered = job.template
    where = entry_of(spec, (1,))
    if (
        not job.values
        or job.predicted
        or entry != _TENSOR
        or zero
        or typename != "float"
        or dtype not in TYPES
        or where is None
    ):
        return None
    kind = _MANY if where.kind == _RUNS else where.kind
    if kind not in (_MANY, _INNER, _FIXED):
        return None
    return replace(
        job, template=(f"Folded<{TYPES[dtype]}, {kind}>", entry, zero, dithered), where=Where(kind, where.numbers)
    )


_ENCODINGS: dict[Any, Encoding | None] = {}
_DECODINGS: dict[Any, Decoding | None] = {}
_UNFOLDINGS: dict[Any, Decoding | None] = {}
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
class Where:
    """How elements find their steps: the kind of kernel, and two terms (``layout.index_terms``)."""

    kind: int
    numbers: tuple[int, ...]

    def shared(self, rows: int = 1) -> int:
        """Bytes of shared memory for what a block keeps of every channel, to be read ``rows`` rows at a time."""
        if self.kind == _INNER:
            return 8 * (self.numbers[1] + (rows - 1) * rans.ROW)
        return 8 * self.numbers[1] if self.kind == _RUNS else 0


_ENTRIES: dict[Any, Where | None] = {}


def entry_of(spec: TensorSpec, axes: tuple[int, ...]) -> Where | None:
    """None where the kernels do not reach: more than two terms, or places beyond 31 bits of words."""
    return _remember(_ENTRIES, (spec.shape, spec.stride, axes), lambda: _find_entry(spec, axes))


def _find_entry(spec: TensorSpec, axes: tuple[int, ...]) -> Where | None:
    terms = layout.index_terms(spec, axes)
    if len(terms) > 2 or spec.nbytes >= 1 << 33 or spec.numel >= 1 << 32:
        return None
    none = (1, 1, 0)
    if not terms:
        return Where(_TENSOR, (*none, *none))
    if len(terms) == 2:
        return Where(_ANY, (*terms[0], *terms[1]))
    divide, modulo, times = terms[0]
    assert times == 1, "a single term counts by one"
    if divide % 4 == 0:
        kind = _RUNS if modulo <= _MOST_STAGED else _MANY
    elif divide == 1 and modulo % 4 == 0 and modulo <= _MOST_STAGED:
        kind = _INNER if rans.ROW % modulo else _FIXED
    elif divide >= 4 or (divide == 1 and modulo >= 4):
        kind = _MIXED
    else:
        kind = _ANY
    return Where(kind, (*terms[0], *none))


def stage_of(model: rans.Model) -> int:
    """16-bit words that a warp can stage: a little more than a chunk is expected to need; the rest goes to a slot."""
    alphabet = model.alphabet
    worst = alphabet.rows * rans.ROW // alphabet.values
    wanted = int(model.bits * alphabet.chunk / 16 * 1.25) + 160
    return min(worst, wanted) // 2 * 2 + 32 * (4 * ROUND[alphabet.values] // alphabet.values)


def _digits(alphabet: rans.Alphabet, room: int, rounding: str) -> tuple[float, int, int, int, int, int, int]:
    """What the rans encoders compare and add, as constants: see ``Args`` in sz_args.cuh."""
    first = alphabet.low - alphabet.zero  # the code of digit 0, if it had one
    least, most = max(alphabet.low, -room), min(first + alphabet.size - 1, room)
    lowest = _ROUNDING + 256 * (least - first)
    powers = [16 * alphabet.size**k for k in range(alphabet.values)] + [0] * (4 - alphabet.values)
    pairs = [powers[k] | powers[k + 1] << 16 for k in range(3)]
    return (
        _ORIGIN - 256 * first + (128 if rounding == "nearest" else 0), lowest,
        max(_ROUNDING + 256 * (most - first + 1), lowest), pairs[0], pairs[1], pairs[2], room,
    )  # fmt: skip


def _most(spec: TensorSpec, plan: Plan) -> int:
    """Words that suffice whatever the values: every chunk raw."""
    chunk = blocks.CHUNK if plan.model is None else plan.model.alphabet.chunk
    whole, rest = divmod(spec.numel, chunk)
    return whole * exact.raw_words(spec.dtype, chunk) + exact.raw_words(spec.dtype, rest)


def _aligned(words: int) -> int:
    return -(-words // 32) * 32
