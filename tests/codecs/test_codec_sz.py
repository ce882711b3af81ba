"""``sz`` at chosen inputs: which path an element takes, and what it costs to the byte."""

from __future__ import annotations

import math

import blocks_format
import pytest
import torch
from blocks_format import BLOCKS, bits_of, escapes, raw_chunks
from codec_cases import bit_equal, bits, bound_of
from torch import Tensor

from lowtide import codecs
from lowtide.codecs import sz as module
from lowtide.codecs.sz import Sz
from lowtide.coding import blocks, dither
from lowtide.errors import BoundError, DtypeError, PayloadError, UnknownNameError
from lowtide.records import Bound, Encoded, TensorSpec

NEAREST, DITHER = Sz(rounding="nearest"), Sz()
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def escaped(encoded: Encoded) -> list[int]:
    """Positions of the escapes of a payload that has no raw chunks, in which escapes would not show."""
    assert raw_chunks(encoded) == []
    return list(escapes(encoded))


def overhead(count: int, steps: int = 1) -> int:
    """Bytes beside the words: 16 of headers and 4 of offset a chunk, 4 for the last offset, 2 a step."""
    return (16 + 4) * -(-count // 1024) + 4 + 2 * steps


def test_options_have_names() -> None:
    with pytest.raises(UnknownNameError, match="unknown rounding 'up'; known: dither, nearest"):
        Sz(rounding="up")
    with pytest.raises(UnknownNameError, match="unknown coder 'zip'; known: auto, blocks, rans"):
        Sz(coder="zip")


def test_nearest_takes_the_nearest_multiple_of_the_step() -> None:
    x = torch.tensor([0.0, 0.49, 0.51, 1.0, 1.49, -0.51, -3.2, 100.4]).repeat(128)
    encoded = NEAREST.encode(x, Bound.absolute(bound_of(1.0)))
    assert encoded.tensors["step"].tolist() == [1.0]
    assert NEAREST.decode(encoded)[:8].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, -1.0, -3.0, 100.0]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("codec", [DITHER, NEAREST], ids=["dither", "nearest"])
def test_bounds_beyond_every_value_keep_them_finite(codec: Sz, dtype: torch.dtype) -> None:
    """The largest values themselves are many steps from zero: a step stays far enough below them to be of use."""
    x = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, 1.0, -1.0], dtype=dtype)
    for bound in (1e39, 1e300):
        step = float(codec.step(Bound.absolute(bound), TensorSpec.of(x)))
        assert 1024 <= step <= float(torch.finfo(dtype).max) / 8
        decoded = codec.decode(codec.encode(x, Bound.absolute(bound)))
        assert bool(decoded.isfinite().all()) and bit_equal(decoded[:2], x[:2])


@pytest.mark.parametrize("codec", [DITHER, NEAREST, Sz(keep_zeros=True)], ids=["dither", "nearest", "keep_zeros"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_payload_read_by_hand_decodes_alike(codec: Sz, dtype: torch.dtype) -> None:
    """x' = (q - u) * step; with a code for zero, code 0 is zero and code c is q = c - 1; what is exact is itself."""
    x = torch.randn(3, 1100).to(dtype)
    x[:, ::9], x[0, 5], x[2, 1099] = 0.0, math.nan, -6e4
    x[1] *= 1e4  # the second chunk is nearly all of it
    encoded = codec.encode(x, Bound.absolute([0.3, 0.1, 0.02], (0,)), seed=21)
    content = blocks_format.content(encoded)
    assert content.escapes and content.raw and len(content.escapes | content.raw) < x.numel()
    code = torch.tensor(content.codes)
    q = torch.where(code < 0, code + 1, code - 1) if encoded.meta["zero_code"] else code
    work = torch.float64 if dtype == torch.float64 else torch.float32
    u = 0 if codec.rounding == "nearest" else dither.offsets(21, 0, 3300, dtype=work, device=torch.device("cpu"))
    expected = ((q - u) * encoded.tensors["step"].to(work).repeat_interleave(1100)).to(dtype)
    if encoded.meta["zero_code"]:
        expected[code == 0] = 0
    exact = content.escapes | content.raw
    decoded = codec.decode(encoded).flatten()
    assert bits_of(decoded) == [exact.get(at, value) for at, value in enumerate(bits_of(expected))]


def test_cost_to_the_byte() -> None:
    """Blocks of zeros have no words. The one block with values holds codes up to 5 of both signs: 3 planes and the
    signs, 4 bytes each."""
    x = torch.zeros(3000)
    x[BLOCKS[2]] = torch.arange(-5.0, 5.0).repeat(4)[:32]
    bound = Bound.absolute(bound_of(1.0))
    encoded = NEAREST.encode(x, bound)
    assert encoded.nbytes == overhead(3000) + 4 * 4 == 3 * 20 + 4 + 2 + 16
    assert torch.equal(NEAREST.decode(encoded), x)
    assert NEAREST.encode(x.abs(), bound).nbytes == encoded.nbytes - 4


@pytest.mark.parametrize("codec", [NEAREST, Sz(rounding="nearest", keep_zeros=True)], ids=["nearest", "keep_zeros"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_beyond_2046_steps_escape_and_come_back_bit_for_bit(codec: Sz, dtype: torch.dtype) -> None:
    """The largest codes, one less and one more; bfloat16 rounds 2046 and 2047 steps to 2048 and keeps 2040."""
    step = 16.0 if dtype == torch.bfloat16 else 2.0
    x = torch.zeros(2048, dtype=dtype)
    x[:6] = torch.tensor([2040, -2040, 2046, -2046, 2047, -2047], dtype=dtype) * step
    x[1500] = 60000
    bound = bound_of(step, dtype)
    encoded = codec.encode(x, Bound.absolute(bound))
    assert encoded.tensors["step"].tolist() == [step]
    beyond = x.double().abs() > 2046 * step
    assert escaped(encoded) == beyond.nonzero().flatten().tolist()
    assert list(escapes(encoded).values()) == bits_of(x[beyond])
    decoded = codec.decode(encoded)
    assert bit_equal(decoded[beyond], x[beyond])
    assert bool(((decoded.double() - x.double()).abs() <= bound).all())


def test_a_bound_just_below_a_float32_is_not_taken_for_it() -> None:
    """Between 128 and 255 bfloat16 has the integers, so errors are 0 or 1; float32 would round the bound to 1."""
    x = torch.zeros(1024, dtype=torch.bfloat16)
    x[:128] = torch.arange(128, 256)
    encoded = NEAREST.encode(x, Bound.absolute(1 - 1e-10))
    assert len(escaped(encoded)) > 10, "no value was ever in danger"
    assert torch.equal(NEAREST.decode(encoded), x)
    assert not torch.equal(NEAREST.decode(NEAREST.encode(x, Bound.absolute(1.0))), x)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_payloads_and_infinities_are_restored_bit_for_bit(dtype: torch.dtype) -> None:
    """A quiet NaN, a negative one and a signalling one, each with bits of its own."""
    x = torch.randn(2048).to(dtype)
    number = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    infinity = torch.tensor(math.inf, dtype=dtype).view(number).long()
    quiet = torch.tensor(math.nan, dtype=dtype).view(number).long()
    x.view(number)[[3, 40, 999]] = torch.stack([quiet | 5, (quiet | 9) ^ torch.iinfo(number).min, infinity | 1]).to(
        number
    )
    x[[7, 8]] = torch.tensor([math.inf, -math.inf], dtype=dtype)
    assert int(x.isnan().sum()) == 3
    for codec in (DITHER, NEAREST, Sz(keep_zeros=True)):
        encoded = codec.encode(x, Bound.absolute(0.1))
        assert encoded.meta["kind"] == "blocks"
        assert torch.equal(bits(codec.decode(encoded)[~x.isfinite()]), bits(x[~x.isfinite()]))


def test_zeros_get_a_code_of_their_own_where_there_are_enough_of_them() -> None:
    """More than one in 64 of a sample, which of 6144 values is all of them. Then they come back as zeros; with nearest
    rounding they do anyway, and else they are values like others, within the bound."""
    x = torch.rand(6144) + 1
    x[::64] = 0
    few = DITHER.encode(x, Bound.absolute(0.1))
    x[5] = 0
    many = DITHER.encode(x, Bound.absolute(0.1))
    assert (few.meta["zero_code"], many.meta["zero_code"]) == (False, True)
    assert escaped(few) == escaped(many) == []
    seen = codecs.decode(few)[::64]
    assert float(seen.abs().max()) <= 0.1 and int(seen.count_nonzero()) > 90
    assert torch.equal(codecs.decode(many)[x == 0], torch.zeros(97))
    nearest = NEAREST.encode(x, Bound.absolute(0.1))
    assert not nearest.meta["zero_code"]
    assert torch.equal(codecs.decode(nearest)[x == 0], torch.zeros(97))
    assert Sz(keep_zeros=True).encode(torch.ones(9), Bound.absolute(0.1)).meta["zero_code"]


def test_the_zeros_of_a_small_tensor_count_as_often_as_its_other_values() -> None:
    """The sample goes round and round; 1 zero in 60 is enough, 1 in 70 is not, wherever it stands."""
    for count, expected in ((60, True), (70, False)):
        for at in (0, count - 1):
            x = torch.ones(count)
            x[at] = 0
            assert DITHER.plan(x, Bound.absolute(0.1)).zero_code == expected


@pytest.mark.parametrize("bound", [0.0, math.nan])
def test_a_bound_that_no_grid_can_keep_stores_the_values_exactly(bound: float) -> None:
    x = torch.randn(8, 256)
    encoded = DITHER.encode(x, Bound(torch.tensor(bound)))
    assert (encoded.tensors["step"].tolist(), raw_chunks(encoded)) == ([0.0], [0, 1])
    assert bit_equal(DITHER.decode(encoded), x)
    rows = torch.full((8,), 0.1, dtype=torch.float64)
    rows[2] = bound
    encoded = DITHER.encode(x, Bound(rows, (0,)))
    assert escaped(encoded) == list(range(512, 768))
    assert bit_equal(DITHER.decode(encoded)[2], x[2])


def test_zeros_with_a_code_never_escape_and_escapes_leave_no_signs() -> None:
    x = torch.zeros(2, 2048)
    x[1, 64:96] = -1e30
    encoded = Sz(keep_zeros=True).encode(x, Bound(torch.tensor([0.0, 0.1]), (0,)))
    assert escaped(encoded) == list(range(2048 + 64, 2048 + 96))
    assert encoded.tensors["words"].numel() == 32 * 2, "32 escapes of two words each, and not one plane"


def test_an_escape_with_a_negative_code_in_range_leaves_no_sign() -> None:
    """-1004 / 6 is nearest to -167, and bfloat16 rounds -1002 to -1000, 4 away. A sign plane without magnitudes in the
    first block would make a header of 8, which says that the chunk is raw."""
    x = torch.zeros(1024, dtype=torch.bfloat16)
    x[5] = -1004
    encoded = NEAREST.encode(x, Bound.absolute(bound_of(6.0, torch.bfloat16)))
    assert (encoded.tensors["step"].tolist(), escaped(encoded)) == ([6.0], [5])
    assert (encoded.tensors["headers"].tolist(), encoded.tensors["words"].numel()) == ([0] * 16, 1)
    assert bit_equal(NEAREST.decode(encoded), x)


@pytest.mark.parametrize("codec", [DITHER, NEAREST, Sz(keep_zeros=True)], ids=["dither", "nearest", "keep_zeros"])
def test_a_tensor_of_several_slabs_has_the_payload_of_one(codec: Sz, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 1305)
    x[:, ::5], x[0, 3], x[2, 1000], x[3, 1304] = 0.0, math.nan, math.inf, 1e30
    bound = Bound.absolute([0.1, 0.01, 0.5, 0.1], (0,))
    whole = codec.encode(x, bound, seed=3)
    decoded = codec.decode(whole)
    calls = []
    sizes = [name for name in vars(module) if name.startswith("_SLAB")]
    for name in sizes:
        monkeypatch.setattr(module, name, 2048)
    write = blocks.write
    monkeypatch.setattr(blocks, "write", lambda *args: calls.append(args) or write(*args))
    assert codec.encode(x, bound, seed=3).to_bytes() == whole.to_bytes()
    assert len(calls) == 3, f"{sizes} are no longer the sizes of a slab: this test compared nothing"
    assert bit_equal(codec.decode(whole), decoded)
    if codec.keep_zeros:
        assert torch.equal(codec.nonzero(whole), (x != 0).float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("count", [1, 1023, 2048, 2051])
def test_raw_is_the_way_out_and_costs_what_the_values_cost(count: int, dtype: torch.dtype) -> None:
    """Whole words: an odd number of 16-bit values is filled up by two bytes."""
    x = torch.randn(count).to(dtype)
    encoded = DITHER.encode(x, Bound.absolute(1e-20))
    assert raw_chunks(encoded) == list(range(-(-count // 1024)))
    assert encoded.nbytes == -(-x.nbytes // 4) * 4 + overhead(count)
    assert bit_equal(DITHER.decode(encoded), x)


def test_only_chunks_that_need_it_are_raw() -> None:
    x = torch.randn(3, 1024)
    x[1] *= 1e6
    encoded = DITHER.encode(x, Bound.absolute(0.1))
    assert raw_chunks(encoded) == [1]
    decoded = DITHER.decode(encoded)
    assert bit_equal(decoded[1], x[1])
    assert not torch.equal(decoded[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("codec", [DITHER, NEAREST, Sz(keep_zeros=True)], ids=["dither", "nearest", "keep_zeros"])
def test_nothing_costs_nothing(codec: Sz) -> None:
    x = torch.zeros(3, 0, 2)
    encoded = codec.encode(x, Bound.absolute(0.1))
    assert (encoded.meta, dict(encoded.tensors), encoded.nbytes) == ({"kind": "empty"}, {}, 0)
    assert codec.decode(encoded).shape == codec.nonzero(encoded).shape == (3, 0, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("bound", [1e6, 1e39, 1e300])
def test_a_bound_far_above_the_range_costs_next_to_nothing(dtype: torch.dtype, rounding: str, bound: float) -> None:
    x = torch.randn(4096).to(dtype)
    assert Sz(rounding=rounding).encode(x, Bound.absolute(bound)).nbytes < 200


def test_nonzero_needs_a_code_for_zero() -> None:
    x = torch.randn(2048).relu()
    with pytest.raises(PayloadError, match="sz payload has no code for zero: encode with keep_zeros=True"):
        NEAREST.nonzero(NEAREST.encode(x, Bound.absolute(0.1)))
    keeper = Sz(rounding="nearest", keep_zeros=True)
    x[3] = 1e-30  # far below the bound, decodes to zero, and still was not zero
    encoded = keeper.encode(x, Bound.absolute(0.1))
    assert keeper.decode(encoded)[3] == 0
    assert torch.equal(keeper.nonzero(encoded), (x != 0).float())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nonzero_sees_through_escapes_and_raw_chunks(dtype: torch.dtype) -> None:
    """Chunk 0 has escapes, chunk 1 is raw with zeros of both signs in it, chunk 2 is short."""
    keeper = Sz(keep_zeros=True)
    x = torch.randn(2500).relu().to(dtype)
    x[5], x[6], x[7] = math.nan, -math.inf, 6e4
    x[1024:2048] = torch.randn(1024).to(dtype) * 1e4
    x[1030], x[1031] = 0.0, -0.0
    encoded = keeper.encode(x, Bound.absolute(0.1))
    assert (raw_chunks(encoded), list(escapes(encoded))) == ([1], [5, 6, 7])
    assert torch.equal(keeper.nonzero(encoded), (x != 0).to(dtype))


def test_channels_far_from_zero_cost_no_more_than_others() -> None:
    """Their codes are counted from near their means. One number for the tensor, or for each row, has none."""
    x = torch.randn(8, 3, 20, 20)
    bound = Bound.absolute(torch.full((3,), 0.2), (1,))
    moved = x + torch.tensor([0.0, 20.0, -20.0]).view(3, 1, 1)
    near, far = DITHER.encode(x, bound, seed=1), DITHER.encode(moved, bound, seed=1)
    assert far.nbytes <= near.nbytes * 1.02
    assert far.tensors["centre"].dtype == torch.bfloat16
    assert float((far.tensors["centre"] * far.tensors["step"]).abs().max()) > 19
    assert float((DITHER.decode(far).double() - moved.double()).abs().max()) <= 0.2
    for axes in ((), (0,), (0, 1)):
        value = torch.full([x.shape[axis] for axis in axes], 0.2, dtype=torch.float64)
        assert "centre" not in DITHER.encode(x, Bound(value, axes)).tensors


def test_a_bound_is_needed_and_has_to_fit() -> None:
    with pytest.raises(BoundError, match="sz needs an error bound"):
        DITHER.encode(torch.zeros(3))
    with pytest.raises(BoundError, match=r"bound of shape \(4,\) along axes \(1,\) does not fit .* expected \(3,\)"):
        DITHER.encode(torch.zeros(2, 3), Bound.absolute(torch.ones(4), (1,)))
    with pytest.raises(DtypeError, match=r"sz with rounding 'dither' stores torch.float32, .*; got torch.int64"):
        DITHER.encode(torch.zeros(3, dtype=torch.int64), Bound.absolute(0.1))


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_each_bound_governs_its_own_entries_in_any_layout(axes: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 200)
    value = torch.logspace(-3, 0, math.prod(x.shape[a] for a in axes), dtype=torch.float64)
    value = value.view([x.shape[a] for a in axes])
    promised = value.view([n if a in axes else 1 for a, n in enumerate(x.shape)]).expand(x.shape)
    for source in (x, x.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        error = (NEAREST.decode(NEAREST.encode(source, Bound.absolute(value, axes))).double() - x.double()).abs()
        assert bool((error <= promised).all())
        assert _is_used(error, promised), "bounds this generous should show as errors"


def _is_used(error: Tensor, promised: Tensor) -> bool:
    """Loose entries have large errors: half of them above a tenth of the bound (uniform errors: nine in ten)."""
    return bool(((error > promised / 10).double().mean()) > 0.5)
