"""The CUDA twin of ``sz`` under the emulator, against the codec: the same bytes for ``blocks``; for ``rans``, whose
escapes may stand in any order, each reads what the other wrote and finds the same values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from guarded import Guarded
from same_payload import assert_same_payload, assert_same_values, bits
from simt import Emulated, EmulatedFunction, requires_compiler
from sz_cases import edges, mixture
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import layout, rans, rans_fit
from lowtide.errors import PayloadError
from lowtide.kernels import _sz_cuda, _sz_functions, _sz_jobs
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound, Encoded, TensorSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LARGEST = {1: 256, 2: 16, 3: 6, 4: 4}


def emulated(
    kernel: str, device: int, dtype: str, entry: int, zero: int, dithered: bool, *, values: int = 0, give: str = "0",
    replayed: bool = False, predicted: bool = False,
) -> EmulatedFunction:  # fmt: skip
    program = _sz_functions.REPLAYED if replayed else _sz_functions.PROGRAM
    template = (dtype, entry, zero, dithered, values, give)
    return Emulated(program).function(_sz_functions.expression(kernel, *template, predicted=predicted))


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> Any:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    return emulate(_sz_cuda, emulated)


def raw_chunks(encoded: Encoded) -> list[int]:
    """Chunks of a payload of ``rans`` that are raw."""
    return [chunk for chunk, length in enumerate(encoded.tensors["heads"].tolist()[1::3]) if length < 0]


def is_raw(encoded: Encoded) -> Tensor:
    raw = torch.zeros(encoded.spec.numel, dtype=torch.bool)
    size = encoded.meta["alphabet"]["rows"] * 128
    for chunk in raw_chunks(encoded):
        raw[chunk * size : (chunk + 1) * size] = True
    return raw


def check(x: Tensor, codec: Sz, plan: Plan, *, seed: int = 3, masked: bool = False) -> Encoded:
    """Everything that must be equal, and that nothing of the input was changed; gives the twin's payload."""
    twin, before = SzCuda(codec), bits(x)
    gradient = torch.empty_like(x).copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
    got, expected = twin.encode(x, seed=seed, plan=plan), codec.encode(x, seed=seed, plan=plan)
    assert torch.equal(bits(x), before), "encode changed its input"
    values, plain = twin.decode(got), codec.decode(expected)
    assert_same_values(codec.decode(got), values, "the codec reads what the twin wrote")
    assert_same_values(twin.decode(expected), plain, "the twin reads what the codec wrote")
    if plan.model is None:
        assert_same_payload(got, expected, "payload")
        assert_same_values(values, plain, "values")
    else:
        assert got.meta == expected.meta
        differ = bits(values) != bits(plain)
        both_zero = bits(values == 0).bool() & bits(plain == 0).bool()
        assert not bool((differ & ~both_zero).any()), "values depend on the payload"
        assert not bool((is_raw(expected) & ~is_raw(got)).any()), "the twin codes for less than the codec"
    if masked and plan.zero_code:
        for payload in (got, expected):
            assert_same_values(twin.nonzero(payload), (x != 0).to(x.dtype), "nonzero")
            assert_same_values(twin.gate(payload, gradient), codec.gate(payload, gradient), "gate")
            assert_same_values(twin.gate(payload, gradient), torch.where(x != 0, gradient, 0), "gate")
        at_odds = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].copy_(layout.memory_view(gradient))
        at_odds = at_odds.as_strided(x.shape, x.stride(), 1)
        assert_same_values(twin.gate(got, at_odds), torch.where(x != 0, gradient, 0), "gate, at an odd address")
    return got


@dataclass(frozen=True)
class Instance:
    """One instance of the kernels: what tensors must look like to get to it."""

    dtype: torch.dtype
    kind: int
    coder: str = "blocks"
    rounding: str = "dither"
    zeros: bool = False
    values: int = 0
    predicted: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        zeros = "zeros" if self.zeros else "predicted" if self.predicted else "no_zeros"
        return f"{self.coder}{self.values or ''}-{dtype}-{KINDS[self.kind]}-{self.rounding}-{zeros}"

    @property
    def codec(self) -> Sz:
        return Sz(coder=self.coder, rounding=self.rounding, keep_zeros=self.zeros)

    def plan(self, x: Tensor, bound: Bound) -> Plan:
        """By the codec, but with as many values to a symbol as the instance has."""
        codec = self.codec
        grid = codec.grid(x, bound)
        plan = codec.fit(grid, codec.survey(x, grid), x.numel(), self.zeros)
        if self.coder == "blocks":
            return plan
        sample = rans_fit.Sample(codec.survey(x, grid), self.zeros)
        alphabet = replace(sample.alphabet(self.values, x.numel()), predicted=self.predicted)
        return replace(plan, model=sample.model(alphabet))


KINDS = ["tensor", "runs", "inner", "mixed", "any", "many", "fixed"]
TENSOR, RUNS, INNER, MIXED, ANY, MANY, FIXED = range(7)
# Every value of every parameter occurs with every coder, and the kinds with both sizes of values; not all combinations.
INSTANCES = [
    Instance(F32, TENSOR),
    Instance(BF16, TENSOR, zeros=True),
    Instance(F16, RUNS, zeros=True),
    Instance(BF16, INNER, rounding="nearest"),
    Instance(F32, MIXED, zeros=True),
    Instance(F32, ANY, rounding="nearest", zeros=True),
    Instance(BF16, ANY),
    Instance(F32, TENSOR, "rans", zeros=True, values=4),
    Instance(BF16, TENSOR, "rans", zeros=True, values=2),
    Instance(F16, TENSOR, "rans", values=3),
    Instance(BF16, RUNS, "rans", values=1),
    Instance(F32, INNER, "rans", values=2),
    Instance(BF16, INNER, "rans", values=3),
    Instance(F16, MIXED, "rans", "nearest", zeros=True, values=1),
    Instance(F32, ANY, "rans", "nearest", values=4),
    Instance(BF16, ANY, "rans", zeros=True, values=3),
    Instance(F32, RUNS, "rans", values=3),
    Instance(F32, MANY, "rans", "nearest", values=2),
    Instance(BF16, FIXED, "rans", values=3),
    Instance(F16, FIXED, "rans", zeros=True, values=4),
    Instance(BF16, MANY, zeros=True),
    Instance(F32, FIXED),
    Instance(F32, TENSOR, rounding="stochastic"),
    Instance(F32, TENSOR, "rans", "stochastic", values=4),
    Instance(F32, INNER, "rans", "stochastic", values=1),
    Instance(F32, RUNS, "rans", "stochastic", zeros=True, values=2),
    Instance(F32, TENSOR, "rans", values=2, predicted=True),
    Instance(F32, RUNS, "rans", values=4, predicted=True),
    Instance(BF16, RUNS, "rans", values=1, predicted=True),
    Instance(BF16, INNER, "rans", values=3, predicted=True),
    Instance(F16, MIXED, "rans", "nearest", values=2, predicted=True),
    Instance(F32, ANY, "rans", "nearest", values=1, predicted=True),
    Instance(F32, MANY, "rans", values=3, predicted=True),
    Instance(BF16, FIXED, "rans", values=4, predicted=True),
    Instance(F32, INNER, "rans", "stochastic", values=2, predicted=True),
]
PREDICTED = [instance for instance in INSTANCES if instance.predicted]
# Shapes, orders of the axes in memory, and axes of the bound, by kind.
LAYOUTS: dict[int, list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]] = {
    TENSOR: [((9001,), (0,), ())],
    RUNS: [((3, 5, 12, 50), (0, 1, 2, 3), (1,)), ((2, 9, 500), (0, 1, 2), (0, 1)), ((33, 300), (0, 1), (0,))],
    INNER: [((6, 12, 11, 9), (0, 2, 3, 1), (1,)), ((700, 12), (0, 1), (1,)), ((30, 320), (0, 1), (1,))],
    MIXED: [((6, 7, 13, 15), (0, 1, 2, 3), (1,)), ((6, 7, 13, 15), (0, 2, 3, 1), (1,)), ((81, 101), (0, 1), (0,))],
    MANY: [((2100, 8), (0, 1), (0,))],
    FIXED: [((6, 16, 11, 9), (0, 2, 3, 1), (1,)), ((70, 128), (0, 1), (1,)), ((2500, 4), (0, 1), (1,))],
    ANY: [((500, 7, 3), (0, 1, 2), (1,)), ((3, 7, 13, 25), (0, 2, 3, 1), (0, 1)), ((4000, 2), (0, 1), (1,))],
}


def tensors(instance: Instance) -> Iterator[tuple[Tensor, Bound]]:
    """Normal values with everything in them that has no code, channels of which some are far from zero."""
    for shape, order, axes in LAYOUTS[instance.kind]:
        sizes = [shape[axis] for axis in axes]
        spread = [size if axis in axes else 1 for axis, size in enumerate(shape)]
        x = torch.randn(shape) + (torch.randn(sizes) * 3).round().view(spread)
        if instance.zeros:
            x = x.relu()
        flat = x.view(-1)
        flat[5], flat[700], flat[1234], flat[77], flat[78] = math.nan, -math.inf, 3e4, -0.0, 0.0
        flat[-1] = -55.0
        value = (torch.rand(sizes, dtype=torch.float64) + 0.5) * (0.25 if instance.values == 1 else 0.7)
        if axes:
            value.view(-1)[0], value.view(-1)[1] = 0.0, math.nan
        inverse = [order.index(axis) for axis in range(len(shape))]
        yield x.to(instance.dtype).permute(order).contiguous().permute(inverse), Bound(value, axes)


STARTS = [(3, 4697), (1, 1), (0, 2), (2, 31), (0, 127), (0, 128), (1, 1023), (0, 1024), (0, 4096), (4, 4097)]
WATCHED = [INSTANCES[number] for number in (3, 5, 10, 12, 13, 15, 19, 33)]  # for races; one of each kind and more


@requires_compiler
@pytest.mark.parametrize(
    "instance",
    [pytest.param(item, marks=[pytest.mark.races] if item in WATCHED else []) for item in INSTANCES],
    ids=str,
)
def test_the_twin_is_the_codec(instance: Instance) -> None:
    for number, (x, bound) in enumerate(tensors(instance)):
        plan = instance.plan(x, bound)
        found = _sz_jobs.entry_of(TensorSpec.of(x), bound.axes)
        assert found is not None and found.kind == instance.kind
        got = check(x, instance.codec, plan, seed=number, masked=instance.zeros and instance.dtype != F16)
        error = (SzCuda(instance.codec).decode(got).double() - x.double()).abs()
        shape = [size if axis in bound.axes else 1 for axis, size in enumerate(x.shape)]
        promised = bound.value.nan_to_num(0.0).view(shape).expand(x.shape)
        assert bool((error <= promised)[x.isfinite()].all())


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("instance", [*INSTANCES[:2], *INSTANCES[7:10], *PREDICTED[:3]], ids=str)
def test_starts_and_lengths(instance: Instance) -> None:
    """At any address, of any length: loads of four values at once are not always possible."""
    values = torch.randn(4700)
    values = (values.relu() if instance.zeros else values).to(instance.dtype)
    plan = instance.plan(values, Bound.absolute(0.7))
    for start, count in STARTS:
        check(values[start : start + count], instance.codec, plan, seed=start)


@requires_compiler
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("size", [0.0625, 3e-3, 1e-12])
def test_blocks_of_every_kind(dtype: torch.dtype, size: float) -> None:
    """All widths, signs or none, escapes, raw chunks, and a short raw one of odd length."""
    x = mixture(dtype, torch.Generator().manual_seed(1))
    codec = Sz(coder="blocks", keep_zeros=dtype == BF16)
    plan = codec.plan(x, Bound.absolute(size), dtype == BF16)
    check(x, codec, plan, masked=True)


@requires_compiler
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_ends_of_intervals(dtype: torch.dtype) -> None:
    """Where x / s is half a unit from the next, up to the last code and beyond."""
    codec, bound = Sz(coder="blocks", keep_zeros=dtype == BF16), Bound.absolute(0.37)
    x = edges(dtype, torch.Generator().manual_seed(2), bound, "dither")
    check(x, codec, codec.plan(x, bound), seed=77)


@requires_compiler
def test_many_blocks_of_a_grid_and_many_launches() -> None:
    """300 chunks: more blocks than a warp looks back over at once. Then again, with what the last launch left."""
    codec = Sz(coder="blocks")
    x = torch.randn(300 * 1024 + 5)
    plan = codec.plan(x, Bound.absolute(0.5))
    payloads = [SzCuda(codec).encode(x, seed=1, plan=plan) for _ in range(2)]
    expected = codec.encode(x, seed=1, plan=plan)
    for payload in payloads:
        assert_same_payload(payload, expected, "300 chunks")
    check(x[:5000], codec, plan)


def explicit(
    values: int, *, low: int, zero: bool = False, rows: int = 12, bits_a_value: float = 4.0, sparse: bool = False,
    predicted: bool = False,
) -> rans.Model:  # fmt: skip
    """A model that was not fitted to anything."""
    size = LARGEST[values] if values > 1 or predicted else 40
    alphabet = rans.Alphabet(values, size, low, zero, 1, rows, predicted)
    share = torch.rand(alphabet.symbols, dtype=torch.float64)
    if sparse:
        share[torch.rand(alphabet.symbols) < 0.7] = 0
    freqs = torch.tensor(rans_fit.normalise((share / share.sum()).tolist(), alphabet.fill_symbol, every=predicted))
    return rans.Model(alphabet, freqs.short(), bits_a_value)


@requires_compiler
@pytest.mark.parametrize("instance", [*INSTANCES[7:10], *PREDICTED[:4]], ids=str)
def test_models_that_do_not_fit(instance: Instance) -> None:
    """Symbols without a share; alphabets that leave out some codes, or all; codes that all lie beyond the reach of
    16-bit values, on either side; zeros that have no symbol."""
    values = torch.randn(3 * 1536 + 700)
    values = values.relu() if instance.zeros else values
    codec = instance.codec
    for shift, low, sparse in [
        (0, -2, True),
        (0, 0, False),
        (0, 0, True),
        (0, 1, True),
        (0, 900, False),
        (30, 28, False),
        (-30, -32, True),
    ]:
        x = (values + shift).to(instance.dtype)
        plan = codec.plan(x, Bound.absolute(0.5), instance.zeros)
        model = explicit(instance.values, low=low, zero=instance.zeros, sparse=sparse, predicted=instance.predicted)
        check(x, codec, replace(plan, model=model), masked=True)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("channels", [_sz_jobs._MOST_STAGED, _sz_jobs._MOST_STAGED + 4])
def test_more_channels_than_a_block_can_stage(channels: int) -> None:
    codec, bound = Sz(coder="rans"), Bound(torch.rand(channels, dtype=torch.float64) + 0.5, (1,))
    x = (torch.randn(9, channels) + torch.randn(channels) * 3).to(BF16)
    found = _sz_jobs.entry_of(TensorSpec.of(x), bound.axes)
    assert found is not None and found.kind == (INNER if channels == _sz_jobs._MOST_STAGED else MIXED)
    plan = Instance(BF16, found.kind, "rans", values=3).plan(x, bound)
    check(x, codec, plan)


@requires_compiler
@pytest.mark.parametrize("shape", [(1024, 12), (96, 128)], ids=["inner", "runs"])
def test_codes_within_the_reach_are_no_escapes(shape: tuple[int, int]) -> None:
    """Codes of 5 to 8 steps, of which centres (rows have none) leave some beyond what is sure at first sight: the very
    payload of the codec, but for the order of its escapes, of which there are some."""
    axes = (1,) if shape[1] == 12 else (0,)
    bound = Bound(torch.full((shape[axes[0]],), 0.5, dtype=torch.float64), axes)
    means = torch.tensor([0.0, 3.6, -3.6, 1.0] * 3) if axes == (1,) else torch.zeros(1)
    x = (torch.randn(shape) * 1.8 + means).to(BF16)
    instance = Instance(BF16, INNER if axes == (1,) else RUNS, "rans", values=2)
    plan = instance.plan(x, bound)
    assert (plan.grid.centre is not None) == (axes == (1,))
    got, expected = check(x, instance.codec, plan), instance.codec.encode(x, seed=3, plan=plan)
    assert torch.equal(got.tensors["heads"], expected.tensors["heads"])
    assert int(expected.tensors["heads"][2::3].sum()) > 0
    codes = instance.codec.codes(x, seed=3, plan=plan)
    assert int((codes.abs() > 4).sum()) > 50


@requires_compiler
@pytest.mark.parametrize("middle", [-300.0, 1900.0])
def test_codes_far_from_zero_have_digits(middle: float) -> None:
    """As those of log-probabilities: no escapes."""
    x, instance = 10 * torch.randn(40000) + middle, Instance(F32, TENSOR, "rans", values=1)
    got = check(x, instance.codec, instance.plan(x, Bound.absolute(0.5)))
    assert 32 * got.nbytes / x.nbytes < 6.2 and not bool(got.tensors["heads"][2::3].any())


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_more_escapes_than_a_warp_can_stage_make_a_raw_chunk(dtype: torch.dtype) -> None:
    """As many codes and values as are staged fit; one more of either does not, although the codec would still code the
    chunk. Chunk 6 has as many of both as fit."""
    model = explicit(2, low=-8, rows=32)
    chunk, codes, values = model.alphabet.chunk, _sz_jobs.CODES, _sz_jobs.EXACTS
    x = (torch.rand(8, chunk) - 0.5).to(dtype)
    order = torch.randperm(chunk)
    for row, outside, lost in (
        (1, codes, 0),
        (2, codes + 1, 0),
        (4, 0, values),
        (5, 0, values + 1),
        (6, codes, values),
    ):
        x[row, order[:outside]] = 40.0
        x[row, order[outside : outside + lost]] = math.inf
    codec = Sz(coder="rans")
    plan = replace(codec.plan(x, Bound.absolute(0.5), False), model=model)
    assert raw_chunks(codec.encode(x, plan=plan)) == []
    assert raw_chunks(check(x, codec, plan)) == [2, 5]


@pytest.mark.races
@requires_compiler
def test_streams_that_outgrow_their_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that promises little room and then needs much: what does not fit goes on in a slot; without one left,
    the chunk is raw. Slots are free again for the next launch."""
    model = explicit(2, low=-8, rows=32, bits_a_value=0.1)
    codec = Sz(coder="rans")
    x = torch.randn(20 * model.alphabet.chunk) * 2
    plan = replace(codec.plan(x, Bound.absolute(0.5), False), model=model)
    assert _sz_jobs.stage_of(model) < 4.0 * model.alphabet.chunk / 16, "the stage holds all: nothing is tested"
    for _ in range(2):
        assert raw_chunks(check(x, codec, plan)) == []
    monkeypatch.setattr(_sz_cuda, "_SLOTS", 3)
    for _ in range(2):
        assert len(raw_chunks(check(x, codec, plan))) == 17
    monkeypatch.setattr(_sz_cuda, "_SLOTS", 0)
    assert len(raw_chunks(check(x, codec, plan))) == 20


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans"])
def test_nothing_is_written_past_the_room_and_settle_makes_it_again(coder: str, guarded: Guarded) -> None:
    """The words needed are reported whatever the room; chunks that fit are written, the others left alone."""
    codec = Sz(coder=coder)
    twin = SzCuda(codec)
    x = torch.randn(20 * 4096 + 77)
    x[4096:8192] *= 1e9
    plan = codec.plan(x, Bound.absolute(0.5))
    assert (plan.model is None) == (coder == "blocks")
    whole = twin.encode(x, seed=9, plan=plan)
    needed = whole.tensors["words"].numel()
    for capacity in (0, 1, 31, needed // 3, needed - 1, needed, needed + 1, 10 * needed):
        ticket = torch.full((1,), -1, dtype=torch.int64)
        encoded = twin.encode(x, seed=9, plan=plan, ticket=ticket, capacity=capacity)
        guarded.check()
        room = encoded.tensors["words"].numel()
        assert int(ticket) == needed and room <= capacity
        settled = twin.settle(encoded, x, int(ticket), plan)
        if capacity >= needed:
            assert settled is encoded
        else:
            assert settled is not encoded
            assert_same_payload(settled, whole, f"settled from {capacity} words")
        assert_same_values(twin.decode(settled), twin.decode(whole), "values")
        heads = encoded.tensors["offsets" if coder == "blocks" else "heads"]
        assert torch.equal(heads, whole.tensors["offsets" if coder == "blocks" else "heads"])
        fits = [start for start in (heads if coder == "blocks" else heads[::3]).tolist() if start <= room]
        written = max(fits, default=0)
        assert torch.equal(encoded.tensors["words"][:written], whole.tensors["words"][:written])


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans"])
@pytest.mark.parametrize("scale", [1.0, 1e3, 1e9])
def test_a_first_payload_takes_the_room_it_needs(coder: str, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the worst case, unless it comes; and as often as it takes: what is needed may be more the next time,
    because chunks race for slots."""
    rooms: list[int] = []
    launch, slots = SzCuda._launch, iter([256, 0, 0, 0])

    def note(self: SzCuda, x: Tensor, ready: _sz_cuda._Ready, seed: int, capacity: int, ticket: Tensor) -> Encoded:
        rooms.append(capacity)
        monkeypatch.setattr(_sz_cuda, "_SLOTS", next(slots))
        return launch(self, x, ready, seed, capacity, ticket)

    codec = Sz(coder=coder)
    x = torch.randn(20 * 4096 + 77)
    plan = codec.plan(x, Bound.absolute(0.5))
    monkeypatch.setattr(SzCuda, "_launch", note)
    encoded = SzCuda(codec).encode(scale * x, seed=9, plan=plan)
    most = _sz_cuda.encoding_of(codec, encoded.spec, plan).most
    assert rooms == sorted(set(rooms)) and rooms[0] < most / 3 and (len(rooms) > 1) == (scale > 1)
    assert encoded.tensors["words"].numel() <= rooms[-1] <= most
    assert ((SzCuda(codec).decode(encoded) - scale * x).abs() <= 0.5 + 1e-6 * scale).all()


@requires_compiler
def test_room_follows_the_last_payload() -> None:
    """A little more than it, so that tensors of a like size fit."""
    twin = SzCuda(Sz(coder="rans"))
    assert 100_000 < twin.room(100_000) < 110_000 and twin.room(0) > 0


@requires_compiler
def test_what_the_kernels_do_not_reach_is_left_to_the_codec() -> None:
    """Three terms, nothing at all, float64; a ticket is filled in all the same."""
    codec = Sz(coder="blocks")
    twin = SzCuda(codec)
    x = torch.randn(3, 2, 4, 3, 20)
    bound = Bound(torch.rand(3, 4, 20, dtype=torch.float64), (0, 2, 4))
    for source, limit in ((x, bound), (torch.empty(0, 3), Bound.absolute(1.0))):
        plan = codec.plan(source, limit)
        ticket = torch.full((1,), -1, dtype=torch.int64)
        got, expected = twin.encode(source, plan=plan, ticket=ticket), codec.encode(source, plan=plan)
        assert_same_payload(got, expected, "left to the codec")
        assert int(ticket) == (expected.tensors["words"].numel() if expected.tensors else 0)
        assert_same_values(twin.decode(got), codec.decode(expected), "left to the codec")
    assert not twin.accepts(torch.float64)
    wide = codec.encode(torch.randn(100).double(), Bound.absolute(0.1))
    assert_same_values(twin.decode(wide), codec.decode(wide), "float64")


def test_small_tensors_and_wide_codes_have_no_model() -> None:
    twin = SzCuda.of(Sz())
    assert twin.codec.coder == "rans" and SzCuda.of(Sz(coder="blocks")).codec.coder == "blocks"
    assert twin.plan(torch.randn(1 << 15), Bound.absolute(0.5)).model is not None
    assert twin.plan(torch.randn((1 << 15) - 1), Bound.absolute(0.5)).model is None
    assert twin.plan(torch.randn(1 << 15), Bound.absolute(1e-3)).model is None


def test_a_payload_that_lacks_a_part_is_refused() -> None:
    for coder, parts in (("blocks", ("headers", "offsets", "words")), ("rans", ("heads", "freqs", "words"))):
        encoded = Sz(coder=coder).encode(torch.randn(5000), Bound.absolute(0.5))
        for part in parts:
            left = {name: tensor for name, tensor in encoded.tensors.items() if name != part}
            with pytest.raises(PayloadError, match=f"lacks its part '{part}'"):
                SzCuda(Sz()).decode(replace(encoded, tensors=left))
            if part != "words":
                cut = {**encoded.tensors, part: encoded.tensors[part][:-1]}
                with pytest.raises(PayloadError, match="truncated or corrupted"):
                    SzCuda(Sz()).decode(replace(encoded, tensors=cut))
    with pytest.raises(PayloadError, match="sz payload has no code for zero"):
        SzCuda(Sz()).nonzero(Sz(coder="blocks").encode(torch.randn(500), Bound.absolute(0.5)))


@requires_compiler
@pytest.mark.parametrize("coder", ["blocks", "rans"])
def test_a_plan_on_another_grid_is_as_good_as_a_new_one(coder: str) -> None:
    """What was made ready for the old grid reads the tables of the new one, and the old plan still reads its own."""
    codec, x = Sz(coder=coder), torch.randn(40, 96) + 3
    grids = [codec.grid(x, Bound.absolute(torch.linspace(low, 0.6, 96), (1,))) for low in (0.3, 0.5)]
    plan = codec.fit(grids[0], codec.survey(x, grids[0]), x.numel())
    SzCuda(codec).encode(x, plan=plan)
    moved = plan.on(grids[1])
    assert plan.ready is not None and moved.ready is not None and moved.ready.tables != plan.ready.tables
    ready = moved.ready
    check(x, codec, moved)
    check(x, codec, plan)
    assert moved.ready is ready, "it was not made anew"
    tensor_wide = codec.grid(x, Bound.absolute(0.5))
    assert plan.on(tensor_wide).ready is None, "another kind of grid has other kernels"
