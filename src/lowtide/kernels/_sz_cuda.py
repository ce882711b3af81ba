"""The codec ``sz`` on NVIDIA GPUs, in CUDA C++ (sz_*.cu): the formats and values of ``lowtide.codecs.sz``.

How long a payload gets is known to the device alone. The encoder is given room for a guess (``capacity``, from the last
payload of the same place) and told to report how much it needs; nothing is written past the room. ``settle`` is called
with the report: it hands back the payload, or encodes the tensor again with the room it needs. Whoever gives no ticket
waits for the device instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lowtide.bounds import BoundSource
from lowtide.codecs.sz import Plan, Sz, require_zeros
from lowtide.coding import dither, exact, layout
from lowtide.coding.grid import Grid
from lowtide.kernels import _rows, _tickets
from lowtide.kernels._aside import Aside
from lowtide.kernels._fold import Folding
from lowtide.kernels._nvrtc import current_stream
from lowtide.kernels._sz_functions import GATED, MADE, MASK, SOURCE, SOURCE_AND_GATED, VALUES, missing
from lowtide.kernels._sz_functions import function as _function
from lowtide.kernels._sz_jobs import TYPES, WARPS, Decoding, Encoding, decoding_of, encoding_of, unfolding_of
from lowtide.kernels._sz_twin import SzTwin
from lowtide.kernels._workspaces import EAGER, Replay
from lowtide.kernels._workspaces import SLOTS as _SLOTS
from lowtide.records import Bound, Encoded, Need, TensorSpec

# What kernels are given (Args in sz_args.cuh), in two parts: the second is the same for all tensors of a place, mostly.
_FIRST, _SECOND = struct.Struct("<12Q2Q4I2I4i"), struct.Struct("<f5Ii6II7Q")
_NO_DIGITS = (0.0, 0, 0, 0, 0, 0, 0)
_NO_RESERVE = (0, 0, 0)
_SLACK = 1 / 48  # of room beyond the last payload of the same place
_SMALL = 1 << 15  # values; below, the heads of rans outweigh its gain


@dataclass(frozen=True, slots=True)
class SzCuda(SzTwin):
    """The twin of one ``Sz``. With ``folds`` it takes pairs (``Folding``) of that dtype, too."""

    folds: torch.dtype | None = None

    ticketed: ClassVar[bool] = True
    replays: ClassVar[bool] = True
    takes_replay: ClassVar[bool] = True

    @classmethod
    def of(cls, codec: Sz) -> SzCuda:
        return cls(replace(codec, coder="rans") if codec.coder == "auto" else codec)

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in TYPES and self.codec.accepts(dtype)

    def folding(self, dtype: torch.dtype | None) -> SzCuda:
        """The same, for pairs of tensors of ``dtype``."""
        return self if self.folds is dtype else replace(self, folds=dtype)

    def fit(
        self, grid: Grid, sample: Tensor, count: int, zero_code: bool | None = None, before: Plan | None = None
    ) -> Plan:
        # Behind ReLU prediction gains little, and the kernels that fold pairs have none.
        codec = self.codec if self.folds is None else replace(self.codec, predict="off")
        plan = codec.fit(grid, sample, count, zero_code, before)
        return replace(plan, model=None) if count < _SMALL else plan

    def compile_ahead(self, plan: Plan, spec: TensorSpec, *, replayed: bool = False) -> list[Future[None]]:
        """Have other threads compile what saves of such tensors by ``plan`` launch, and their backward.

        ``replayed``: and what graphs launch. Whoever asks for a kernel before it is there waits for it.
        """
        wanted = missing(self.codec, spec, plan, replayed=replayed, folds=self.folds)
        return [kernel.program.compile_ahead(kernel.expression, kernel.device) for kernel in wanted]

    def make_ready(self, plan: Plan, spec: TensorSpec, *, replayed: bool = False) -> None:
        """Wait until it is compiled, and load it: the first launch by ``plan`` then takes no longer than any other."""
        for compiled in self.compile_ahead(plan, spec, replayed=replayed):
            compiled.result()
        for kernel in missing(self.codec, spec, plan, replayed=replayed, folds=self.folds):
            _function(**kernel._asdict())

    def survey(self, x: Tensor | Folding, grid: Grid, **options: int) -> Tensor:
        return SzTwin.survey(self, _values(x), grid, **options)

    def measure(self, x: Tensor, source: BoundSource, need: Need) -> tuple[Bound, Grid] | None:
        """What ``source`` says of ``x``, and the grid it leads to, in few launches; None where that does not reach."""
        axes = need.axes(x.dim())
        return _rows.measure(x, source, axes, self.codec.rounding) if axes else SzTwin.measure(self, x, source, need)

    def encode(
        self,
        x: Tensor | Folding,
        bound: Bound | None = None,
        *,
        seed: int = 0,
        plan: Plan | None = None,
        ticket: Tensor | None = None,
        capacity: int | None = None,
        replay: Replay | None = None,
    ) -> Encoded:
        if plan is None:
            plan = self.plan(x, bound)  # type: ignore[arg-type]
        assert self.folds is None or not isinstance(x, Tensor), "who has pairs folded gives pairs"
        ready = plan.ready
        if ready is None or not ready.suits(x, self):
            ready = self._make_ready(x, plan)
        if ready is None:
            encoded = self.codec.encode(_values(x), seed=seed, plan=plan)
            if ticket is not None:
                ticket.fill_(_words(encoded))
            return encoded
        if not ready.encoding.is_folded:
            x = _values(x)
        most = ready.encoding.most
        if capacity is None:
            capacity = most if ticket is not None else self._guess(plan, ready.encoding)
        if ticket is not None:
            return self._launch(x, ready, seed, min(capacity, most), ticket, replay)
        return self._wait(x, ready, seed, min(capacity, most))

    def reaches(self, x: Tensor | Folding, plan: Plan) -> bool:
        """Whether ``x`` is coded by the kernels, with no look from the host."""
        ready: _Ready | None = plan.ready
        return (ready is not None and ready.suits(x, self)) or self._make_ready(x, plan) is not None

    def _make_ready(self, x: Tensor | Folding, plan: Plan) -> _Ready | None:
        ready = _Ready.of(self, x.spec if isinstance(x, Folding) else layout.spec_of(x), plan)
        if ready is not None:
            object.__setattr__(plan, "ready", ready)
        return ready

    def _guess(self, plan: Plan, job: Encoding) -> int:
        """Words that will do for most tensors of a place of which nothing is known."""
        return self.room(job.most / 4 if plan.model is None else 1.25 * plan.model.bits / 32 * job.numel)

    def _wait(self, x: Tensor | Folding, ready: _Ready, seed: int, capacity: int) -> Encoded:
        """A payload of exactly the size it needs, made again with more room until that is enough.

        The same values may need some more the next time: which chunks find a slot for what outgrows their stage, and
        which are stored raw, is a race.
        """
        most = ready.encoding.most
        while True:
            told = _tickets.take()
            encoded = self._launch(x, ready, seed, capacity, told.word)
            words = told.wait()
            if words <= capacity:
                return _trim(encoded, words)
            del encoded  # its room, before there is more
            capacity = most if capacity >= most // 2 else min(self.room(1.25 * words), most)

    def room(self, words: float, slack: float = _SLACK) -> int:
        """Words to make room for where the last payload of the same place had ``words``."""
        return int(words * (1 + slack)) + 1024

    def chunk(self, plan: Plan, dtype: torch.dtype) -> int:
        """Words of the largest chunk, which may lie in the reserve of a graph; 0 for payloads in one piece."""
        return exact.raw_words(dtype, plan.model.alphabet.chunk) if plan.model is not None else 0

    def settle(self, encoded: Encoded, x: Tensor | Folding, status: int, plan: Plan | None = None) -> Encoded:
        """The payload, now that ``status`` words are known to be needed for it; ``plan`` is what it was made by."""
        if status <= _words(encoded):
            return encoded
        assert plan is not None, "a payload that did not fit is made again, by the plan that it was made by"
        return self.encode(x, seed=encoded.meta["seed"], plan=plan, capacity=status)

    def _launch(
        self, x: Tensor | Folding, ready: _Ready, seed: int, capacity: int, ticket: Tensor, replay: Replay | None = None
    ) -> Encoded:
        job, index = ready.encoding, ready.index
        read, pair = ((x,), (0, 0)) if isinstance(x, Tensor) else x.parts()
        words = job.words_from + capacity
        buffer = torch.empty(words, dtype=torch.int32, device=ready.spec.device)
        heads_at = buffer.data_ptr()
        headers_at, words_at = heads_at + 4 * job.headers_from, heads_at + 4 * job.words_from
        stream = current_stream(index)
        low, high = _keys(seed)
        looking_back = job.blocks if job.headers else 0  # blocks: their chunks lie in order, those of rans need not
        work, spill, epoch = (replay if replay is not None else EAGER).next(x.device, stream, looking_back)
        _, _, step_at, centre_at, freqs_at = ready.tables
        arguments = _FIRST.pack(
            read[0].data_ptr(), *ready.tables, words_at, heads_at, headers_at, work, ticket.data_ptr(), spill,
            job.numel, capacity, job.chunks, low, high, epoch, *job.sizes, _SLOTS,
        )  # fmt: skip
        function, second, aside = ready.function, ready.second, None
        if replay is not None:
            function = _function(
                job.kernel, index, *job.template, values=job.values, replayed=True, predicted=job.predicted
            )
            second = _SECOND.pack(
                *job.digits, *job.where.numbers, job.whole, replay.number_at, *pair, 0, *replay.reserve
            )
            aside = replay.aside
            if aside is not None:
                stream = aside.begin()
        elif job.is_folded:
            second = _SECOND.pack(*job.digits, *job.where.numbers, job.whole, 0, *pair, 0, *_NO_RESERVE)
        function.launch(job.blocks, WARPS * 32, job.shared, arguments + second, stream)
        if aside is not None:
            aside.hold(*read, buffer, *ready.lent)
        encoded = Encoded(
            self.codec.name, self.codec.version, ready.spec, {**job.meta, "seed": seed}, _Parts(buffer, ready)
        )
        hint = _Hint(
            ready.decoding, step_at, centre_at, freqs_at, words_at, heads_at, headers_at, capacity, low, high,
            4 * words + ready.nbytes, replay,
        )  # fmt: skip
        object.__setattr__(encoded, "hint", hint)
        return encoded

    def decode_aside(self, encoded: Encoded, aside: Aside, *, mask: bool) -> Tensor:
        """What ``decode`` or, with ``mask``, ``nonzero`` gives, written beside the step: ``aside.join`` before use."""
        return self._decode(encoded, mask=mask, aside=aside)

    def gate(self, encoded: Encoded, gradient: Tensor) -> Tensor:
        """As ``Sz.gate``, with no mask in between."""
        hint = self._find(encoded)
        if hint is None:
            return self.codec.gate(encoded, gradient)
        if encoded.meta["kind"] != "empty":
            require_zeros(encoded)
        gated = torch.empty_like(gradient)
        self._restore(encoded, hint, GATED, gated, gradient)
        return gated

    def unfold(
        self, encoded: Encoded, table: Tensor, dtype: torch.dtype, *, made: bool = False, gradient: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None] | None:
        """Of a folded tensor what ReLU ``made``, or the norm's input, and with a ``gradient`` what ReLU lets through of
        it; the folded tensor itself is not written. None where there is no kernel for it.

        ``gradient`` lies in memory as the tensor did.
        """
        hint = self._find(encoded)
        job = unfolding_of(encoded.spec, encoded.meta, dtype) if hint is not None else None
        if hint is None or job is None:
            return None
        spec = encoded.spec
        x = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
        gated = torch.empty_like(gradient) if gradient is not None else None
        give = MADE if made else SOURCE if gradient is None else SOURCE_AND_GATED
        self._restore(encoded, hint, give, x, gradient, job=job, table=table, gated=gated)
        return x, gated

    def _decode(self, encoded: Encoded, *, mask: bool, aside: Aside | None = None) -> Tensor:
        hint = self._find(encoded)
        if hint is None:
            return self.codec.nonzero(encoded) if mask else self.codec.decode(encoded)
        x = _room_for(encoded.spec)
        self._restore(encoded, hint, MASK if mask else VALUES, x, aside=aside)
        return x

    def _find(self, encoded: Encoded) -> _Hint | None:
        """What a launch needs; None where the kernels do not reach."""
        hint = encoded.hint
        if type(hint) is _Hint:
            return hint
        encoded.require(self.codec.name, self.codec.version)
        return _Hint.of(encoded)

    def _restore(
        self,
        encoded: Encoded,
        hint: _Hint,
        give: str,
        x: Tensor,
        gradient: Tensor | None = None,
        *,
        aside: Aside | None = None,
        job: Decoding | None = None,
        table: Tensor | None = None,
        gated: Tensor | None = None,
    ) -> None:
        """``job`` if it is another one than that of the payload's own values."""
        job, index, replay = job or hint.job, x.device.index or 0, hint.replay
        arguments = _FIRST.pack(
            x.data_ptr(), 0, 0, hint.step_at, hint.centre_at, hint.freqs_at, hint.words_at, hint.heads_at,
            hint.headers_at, 0, 0, 0, job.numel, hint.words, job.chunks, hint.low, hint.high, 0, *job.sizes, 0,
        ) + _SECOND.pack(
            *_NO_DIGITS, *job.where.numbers, 0, replay.number_at if replay is not None else 0,
            *(part.data_ptr() if part is not None else 0 for part in (gradient, table, gated)),
            *(replay.reserve if replay is not None else _NO_RESERVE),
        )  # fmt: skip
        function = _function(
            job.kernel, index, *job.template, values=job.values, give=give, replayed=replay is not None,
            predicted=job.predicted,
        )  # fmt: skip
        shared = job.shared if give == VALUES else 0  # entries of a tensor with one bound are not staged
        stream = aside.begin() if aside is not None else current_stream(index)
        function.launch(min(job.blocks, _processors(index) * 8), WARPS * 32, shared, arguments, stream)
        if aside is not None:
            aside.hold(x, *encoded.tensors.values())


def _values(x: Tensor | Folding) -> Tensor:
    return x if isinstance(x, Tensor) else x.folded()


def _room_for(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)


class _Ready:
    """A plan made ready for tensors of one geometry: jobs, a kernel, the addresses of its tables."""

    __slots__ = (
        *("decoding", "encoding", "function", "index", "lent", "nbytes", "parts", "second", "spec", "tables", "twin"),
    )

    def __init__(self, twin: SzCuda, spec: TensorSpec, plan: Plan, encoding: Encoding, decoding: Decoding) -> None:
        self.twin, self.spec, self.encoding, self.decoding = twin, spec, encoding, decoding
        self.index = spec.device.index or 0
        self.function = _function(
            encoding.kernel, self.index, *encoding.template, values=encoding.values, predicted=encoding.predicted
        )
        self.second = _SECOND.pack(*encoding.digits, *encoding.where.numbers, encoding.whole, 0, 0, 0, 0, *_NO_RESERVE)
        self._lay_out(plan.grid, plan.model.freqs if plan.model is not None else None)

    def on(self, grid: Grid) -> _Ready:
        """The same for another grid with the same axes, and with a centre if this one has one."""
        other = copy(self)
        other._lay_out(grid, self.parts.get("freqs"))
        return other

    def _lay_out(self, grid: Grid, freqs: Tensor | None) -> None:
        assert grid.inverse is not None and grid.promised is not None, "only the decoder works without a bound"
        self.lent = (grid.inverse, grid.promised)  # read by the encoder alone
        self.parts = {"freqs": freqs} if freqs is not None else {}
        self.parts["step"] = grid.step
        if grid.centre is not None:
            self.parts["centre"] = grid.centre
        self.nbytes = sum(part.untyped_storage().nbytes() for part in self.parts.values())
        tables = (grid.inverse, grid.promised, grid.step, grid.centre, freqs)
        self.tables = tuple(table.data_ptr() if table is not None else 0 for table in tables)

    @classmethod
    def of(cls, twin: SzCuda, spec: TensorSpec, plan: Plan) -> _Ready | None:
        """None where the kernels do not reach."""
        encoding = encoding_of(twin.codec, spec, plan, twin.folds)
        decoding = decoding_of(spec, encoding.meta) if encoding is not None else None
        return cls(twin, spec, plan, encoding, decoding) if encoding is not None and decoding is not None else None

    def suits(self, x: Tensor | Folding, twin: SzCuda) -> bool:
        spec = self.spec
        return (
            (self.twin is twin or self.twin == twin)
            and x.shape == spec.shape
            and x.stride() == spec.stride
            and x.dtype is spec.dtype
            and x.device == spec.device
        )


class _Parts(Mapping[str, Tensor]):
    """The parts of a payload that lie in one buffer (heads, headers, words), cut out of it when somebody asks."""

    __slots__ = ("_buffer", "_parts", "_ready")

    def __init__(self, buffer: Tensor, ready: _Ready) -> None:
        self._buffer, self._ready = buffer, ready
        self._parts: dict[str, Tensor] | None = None

    def _cut(self) -> dict[str, Tensor]:
        if self._parts is None:
            job = self._ready.encoding
            heads, words = self._buffer[: job.heads], self._buffer[job.words_from :]
            if job.headers:
                headers = self._buffer[job.headers_from : job.words_from].view(torch.uint8)[: job.headers]
                self._parts = {"headers": headers, "offsets": heads, "words": words, **self._ready.parts}
            else:
                self._parts = {"heads": heads, "words": words, **self._ready.parts}
        return self._parts

    def __getitem__(self, name: str) -> Tensor:
        return self._cut()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cut())

    def __len__(self) -> int:
        return len(self._cut())

    @property
    def buffer(self) -> Tensor:
        return self._buffer

    def refill(self, encoded: Encoded) -> Callable[[Tensor], Encoded]:
        """Makes ``encoded`` again of a copy of its buffer: what a store that moves payloads asks for."""
        fields, ready, hint = (encoded.codec, encoded.version, encoded.spec, encoded.meta), self._ready, encoded.hint

        def fill(buffer: Tensor) -> Encoded:
            again = Encoded(*fields, _Parts(buffer, ready))
            if type(hint) is _Hint:
                object.__setattr__(again, "hint", hint.moved(buffer.data_ptr() - hint.heads_at))
            return again

        return fill


@dataclass(slots=True)
class _Hint:
    """What a decoder's launch needs of a payload, so that its maker need not find it out again."""

    job: Decoding
    step_at: int
    centre_at: int
    freqs_at: int
    words_at: int
    heads_at: int
    headers_at: int
    words: int
    low: int
    high: int
    nbytes: int = 0
    replay: Replay | None = None

    def moved(self, by: int) -> _Hint:
        """For a copy of the buffer that lies ``by`` bytes further on."""
        return _Hint(
            self.job, self.step_at, self.centre_at, self.freqs_at, self.words_at + by, self.heads_at + by,
            self.headers_at + by, self.words, self.low, self.high, self.nbytes, self.replay,
        )  # fmt: skip

    @classmethod
    def of(cls, encoded: Encoded) -> _Hint | None:
        """From the parts of a payload that was made elsewhere, once they have been looked at; None as in ``_Ready``."""
        meta = encoded.meta
        job = decoding_of(encoded.spec, meta)
        if job is None:
            return None
        headers_at = freqs_at = 0
        if job.headers:
            heads = encoded.tensor("offsets", dtype=torch.int32, numel=job.heads)
            headers_at = encoded.tensor("headers", dtype=torch.uint8, numel=job.headers).data_ptr()
        else:
            heads = encoded.tensor("heads", dtype=torch.int32, numel=job.heads)
            freqs_at = encoded.tensor("freqs", dtype=torch.int16, numel=job.symbols).data_ptr()
        words = encoded.tensor("words", dtype=torch.int32)
        step = encoded.tensor("step", dtype=torch.bfloat16)
        centre_at = encoded.tensor("centre", dtype=torch.bfloat16).data_ptr() if meta["centred"] else 0
        return cls(
            job, step.data_ptr(), centre_at, freqs_at, words.data_ptr(), heads.data_ptr(), headers_at, words.numel(),
            *_keys(meta["seed"]),
        )  # fmt: skip


def _keys(seed: int) -> tuple[int, int]:
    """The keys of the dither as the kernels want them: the second one mixed with itself."""
    low, high = dither.keys(seed)
    high &= 0xFFFFFFFF
    return low & 0xFFFFFFFF, high ^ high >> 15


def _words(encoded: Encoded) -> int:
    hint = encoded.hint
    if type(hint) is _Hint:
        return hint.words
    words = encoded.tensors.get("words")
    return words.numel() if words is not None else 0


def _trim(encoded: Encoded, words: int) -> Encoded:
    """The payload with as many words as it has, in a buffer of its own size."""
    if words == _words(encoded):
        return encoded
    parts = dict(encoded.tensors)
    for name in ("heads", "headers", "offsets"):
        if name in parts:
            parts[name] = parts[name].clone()
    return replace(encoded, tensors={**parts, "words": parts["words"][:words].clone()})


_PROCESSORS: dict[int, int] = {}


def _processors(device: int) -> int:
    if device not in _PROCESSORS:
        _PROCESSORS[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _PROCESSORS[device]
