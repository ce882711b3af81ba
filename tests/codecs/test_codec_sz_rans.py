"""``sz`` with the coder ``rans``: the values of ``blocks``, in fewer bytes, whatever its model was fitted to."""

from __future__ import annotations

import math
from dataclasses import replace

import blocks_format
import pytest
import rans_format
import torch
from codec_cases import bit_equal, bits
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import rans
from lowtide.errors import PayloadError, PolicyError, UnknownNameError
from lowtide.records import Bound, Encoded

RANS, BLOCKS = Sz(coder="rans"), Sz(coder="blocks")
KINDS = [RANS, Sz(coder="rans", rounding="nearest"), Sz(coder="rans", keep_zeros=True)]
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def entropy(codes: Tensor) -> float:
    """Order-0, in bits a value."""
    share = torch.unique(codes, return_counts=True)[1].double() / codes.numel()
    return float(-(share * share.log2()).sum())


def bits_a_value(encoded: Encoded) -> float:
    return encoded.nbytes * 8 / encoded.spec.numel


def make_activations(count: int, dtype: torch.dtype, *, relu: bool) -> Tensor:
    x = torch.randn(count)
    return (x.relu() if relu else x).to(dtype)


@pytest.mark.parametrize("relu", [False, True], ids=["signed", "relu"])
@pytest.mark.parametrize("share", [1.0, 0.4])
def test_size_of_independent_values(share: float, relu: bool) -> None:
    """2**22 values, a bound of ``share`` standard deviations. With the long chunks of large tensors all parts of the
    payload are within 1.08 of the entropy of the codes. 2**22 values make shorter chunks, for a GPU to have enough of
    them: 24 bits for each of 32 lanes (a state has 32, and is half full of what the stream need not hold) and 96 of
    heads a chunk, beside 2 %."""
    x = make_activations(1 << 22, torch.float32, relu=relu)
    bound = Bound.absolute(share * float(x.double().std()))
    grid = RANS.grid(x, bound)
    sample = RANS.survey(x, grid)
    long, own = RANS.fit(grid, sample, 1 << 27), RANS.fit(grid, sample, x.numel())
    assert long.model is not None and own.model is not None and long.zero_code == relu
    least = entropy(RANS.codes(x, plan=long, seed=1))
    assert bits_a_value(RANS.encode(x, plan=long, seed=1)) <= 1.08 * least
    chunk = own.model.alphabet.chunk
    assert bits_a_value(RANS.encode(x, plan=own, seed=1)) <= 1.02 * least + (24 * 32 + 96) / chunk


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", KINDS, ids=["dither", "nearest", "keep_zeros"])
def test_a_payload_read_by_hand_decodes_alike(codec: Sz, dtype: torch.dtype) -> None:
    """Codes by the slow reader; from codes to values as in ``blocks``, by the grid. Escapes of both kinds, a raw chunk,
    and a short one."""
    x = make_activations(3 * 4096 + 2000, dtype, relu=True)
    x[5], x[9000], x[7777] = math.nan, -6e4, math.inf
    x[::50] += 7
    x[4096:8192] = torch.randn(4096).to(dtype) * 1e4
    plan = codec.plan(x[8192:], Bound.absolute(0.3))
    assert plan.model is not None and plan.model.alphabet.chunk <= 4096
    encoded = codec.encode(x, seed=21, plan=plan)
    found = rans_format.content(encoded)
    assert found.escapes and found.raw and found.escaped_codes
    code = torch.tensor([found.codes.get(at, 0) for at in range(x.numel())], dtype=torch.int32)
    is_zero = code == rans_format.ZERO
    assert plan.zero_code or not bool(is_zero.any())
    value = plan.grid.value(code.masked_fill(is_zero, 0), torch.arange(x.numel()), encoded.spec, 21)
    value[is_zero] = 0
    exact = found.exact
    expected = [exact.get(at, number) for at, number in enumerate(blocks_format.bits_of(value))]
    assert blocks_format.bits_of(codec.decode(encoded)) == expected
    if plan.zero_code:
        assert torch.equal(codec.nonzero(encoded), (x != 0).to(dtype))


@pytest.mark.parametrize("relu", [False, True], ids=["signed", "relu"])
@pytest.mark.parametrize("scale", [1.0, 4.0, 0.1, -1.0])
@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_a_plan_of_other_data_changes_the_size_alone(relu: bool, scale: float, shift: float) -> None:
    """A plan is made from one tensor and used for others, as from one training step for the next."""
    first = make_activations(20480, torch.float32, relu=relu)
    plan = RANS.plan(first, Bound.absolute(0.4))
    assert plan.model is not None
    x = make_activations(20480, torch.float32, relu=relu) * scale + shift
    payload, plain = RANS.encode(x, seed=3, plan=plan), BLOCKS.encode(x, seed=3, plan=replace(plan, model=None))
    assert (payload.meta["kind"], plain.meta["kind"]) == ("rans", "blocks")
    assert not blocks_format.raw_chunks(plain)
    assert torch.equal(RANS.decode(payload), BLOCKS.decode(plain))
    if (scale, shift) == (1.0, 0.0):
        assert not rans_format.content(payload).raw and payload.nbytes < plain.nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", KINDS, ids=["dither", "nearest", "keep_zeros"])
def test_values_do_not_depend_on_which_chunks_are_raw(codec: Sz, dtype: torch.dtype) -> None:
    """A table that was made for other data makes chunks raw; a run that is resumed has another table."""
    x = make_activations(20480, dtype, relu=False)
    x[::7], x[5], x[9] = 0.0, math.nan, -0.0
    bound = Bound.absolute(0.001)
    poor = codec.plan(x * 0.05, bound)
    good = codec.plan(x, bound, poor.zero_code)
    coarse = codec.encode(x, seed=3, plan=poor)
    assert rans_format.content(coarse).raw
    values, again = codec.decode(coarse), codec.decode(codec.encode(x, seed=3, plan=good))
    assert bool(((values == again) | (values.isnan() & again.isnan())).all())
    assert not bool((values == x).all()), "raw, but quantised"
    if poor.zero_code:
        assert torch.equal(codec.nonzero(coarse), (x != 0).to(dtype))


def make_map(dtype: torch.dtype, channels: int = 6) -> Tensor:
    """Channels of smooth maps, as a convolution makes them of photos."""
    coarse = torch.randn(4, channels, 8, 8, generator=torch.Generator().manual_seed(5))
    fine = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bicubic")
    return fine.to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("axes", [(), (1,)], ids=["tensor", "channels"])
@pytest.mark.parametrize("rounding", ["dither", "nearest"])
def test_prediction_changes_the_size_alone(rounding: str, axes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Values that no code carries, and some that are outside of the alphabet, among them."""
    x = make_map(dtype)
    flat = x.view(-1)
    flat[5], flat[700], flat[-1], flat[77], flat[78] = math.nan, -math.inf, 3e4, -0.0, 0.0
    flat[12800:14000:100] += 200
    bound = Bound(torch.full([x.shape[axis] for axis in axes], 0.2, dtype=torch.float64), axes)
    off, row = (Sz(coder="rans", rounding=rounding, predict=predict) for predict in ("off", "row"))
    plain, payload = (codec.encode(x, bound, seed=3) for codec in (off, row))
    assert payload.meta["alphabet"]["predicted"] is True and "predicted" not in plain.meta["alphabet"]
    found = rans_format.content(payload)
    assert found.escapes and (found.escaped_codes or dtype.itemsize == 2) and len(found.raw) < x.numel() / 10
    assert payload.nbytes < (0.85 if dtype.itemsize > 2 or not axes else 0.9) * plain.nbytes
    assert bit_equal(row.decode(payload), off.decode(plain))
    assert bit_equal(Sz().decode(Encoded.from_bytes(payload.to_bytes())), off.decode(plain))


def test_what_prediction_does_not_help_is_not_predicted() -> None:
    """White noise, and whatever has a code for zero: payloads are those of a codec that was not asked to."""
    bound = Bound.absolute(0.3)
    for x, keep in ((torch.randn(1 << 16), False), (make_map(torch.float32).relu(), False), (torch.randn(9999), True)):
        off, row = (Sz(coder="rans", keep_zeros=keep, predict=predict) for predict in ("off", "row"))
        assert row.encode(x, bound).to_bytes() == off.encode(x, bound).to_bytes()
    last = make_map(torch.float32, 32).contiguous(memory_format=torch.channels_last)
    assert not Sz(coder="rans", predict="row").plan(last, bound).model.alphabet.predicted, "neighbours are channels"


def test_what_can_be_asked_of_prediction() -> None:
    with pytest.raises(UnknownNameError, match="unknown prediction of sz 'plane'; known: off, row"):
        Sz(predict="plane")
    with pytest.raises(
        PolicyError, match=r"sz predicts values for the coder rans alone; .* take coder='rans' or 'auto'"
    ):
        Sz(coder="blocks", predict="row")
    assert Sz(predict="row").encode(make_map(torch.float32), Bound.absolute(0.2)).meta["kind"] == "blocks"


def test_auto_is_blocks_on_the_cpu() -> None:
    x = torch.randn(2000)
    assert Sz().encode(x, Bound.absolute(0.5)).to_bytes() == BLOCKS.encode(x, Bound.absolute(0.5)).to_bytes()
    assert RANS.encode(x, Bound.absolute(0.5)).meta["kind"] == "rans"


def test_codes_too_wide_for_an_alphabet_are_left_to_blocks() -> None:
    """Normal values with 400 steps to a standard deviation: 10.7 bits a value."""
    x = torch.randn(20000)
    assert RANS.plan(x, Bound.absolute(1 / 800)).model is None
    assert RANS.encode(x, Bound.absolute(1 / 800)).meta["kind"] == "blocks"


def test_a_plan_says_which_zeros_survive() -> None:
    x = make_activations(20480, torch.float32, relu=True)
    plan = RANS.plan(x, Bound.absolute(0.4))
    assert plan.zero_code
    assert RANS.plan(x, Bound.absolute(0.4), False).zero_code is False
    assert RANS.plan(x + 1, Bound.absolute(0.4), True).zero_code
    payload = RANS.encode(x, plan=plan)
    assert torch.equal(RANS.nonzero(payload), (x != 0).float())
    assert torch.equal(RANS.decode(payload)[x == 0], torch.zeros(int((x == 0).sum())))
    without = RANS.encode(x, plan=RANS.plan(x, Bound.absolute(0.4), False))
    with pytest.raises(PayloadError, match="sz payload has no code for zero: encode with keep_zeros=True"):
        RANS.nonzero(without)
    assert float((RANS.decode(without) - x).abs().max()) <= 0.4


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_payloads_and_infinities_are_restored_bit_for_bit(dtype: torch.dtype) -> None:
    x = make_activations(5000, dtype, relu=False)
    number = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    quiet = torch.tensor(math.nan, dtype=dtype).view(number)
    x.view(number)[[3, 40, 999]] = torch.stack([quiet | 5, (quiet | 9) ^ torch.iinfo(number).min, quiet - 1])
    x[[7, 8]] = torch.tensor([math.inf, -math.inf], dtype=dtype)
    for codec in KINDS:
        encoded = codec.encode(x, Bound.absolute(0.5))
        assert encoded.meta["kind"] == "rans" and not rans_format.content(encoded).raw
        assert torch.equal(bits(codec.decode(encoded)[~x.isfinite()]), bits(x[~x.isfinite()]))


@pytest.mark.parametrize("count", [1, 2, 3, 31, 32, 33, 127, 128, 1001, 4095, 4097])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_short_and_odd_lengths(count: int, dtype: torch.dtype) -> None:
    x = make_activations(count, dtype, relu=True)
    encoded = RANS.encode(x, Bound.absolute(0.5), seed=5)
    assert encoded.meta["kind"] == "rans"
    error = (RANS.decode(encoded).double() - x.double()).abs()
    assert float(error.max()) <= 0.5
    assert bit_equal(RANS.decode(Encoded.from_bytes(encoded.to_bytes())), RANS.decode(encoded))


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2)])
def test_each_bound_governs_its_own_entries_in_any_layout(axes: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 500)
    sizes = [x.shape[axis] for axis in axes]
    value = torch.logspace(-1, 0.5, math.prod(sizes), dtype=torch.float64).view(sizes)
    promised = value.view([size if axis in axes else 1 for axis, size in enumerate(x.shape)]).expand(x.shape)
    for source in (x, x.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        encoded = RANS.encode(source, Bound.absolute(value, axes))
        assert encoded.meta["kind"] == "rans"
        error = (RANS.decode(encoded).double() - x.double()).abs()
        assert bool((error <= promised).all()) and float((error > promised / 10).double().mean()) > 0.5


def test_a_model_is_part_of_the_payload() -> None:
    """Decoding asks nothing of the plan: another one, or none, gives the same."""
    x = torch.randn(5000)
    plan = RANS.plan(x, Bound.absolute(0.4))
    assert plan.model is not None
    alphabet = rans.Alphabet(2, 16, -8, False, 8, 32)
    model = rans.Model(alphabet, torch.full((256,), 16, dtype=torch.int16), 4.0)
    wide = Plan(plan.grid, plan.zero_code, model)
    payloads = [RANS.encode(x, seed=2, plan=chosen) for chosen in (plan, wide)]
    assert payloads[0].meta["alphabet"] != payloads[1].meta["alphabet"]
    assert bit_equal(*(Sz().decode(Encoded.from_bytes(payload.to_bytes())) for payload in payloads))
