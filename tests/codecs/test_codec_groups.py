"""Min-max quantisation in groups: its error, its mean, what it does to values that are not numbers, its format."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from codec_cases import bit_equal, lay_out, same_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codecs import create, groups
from lowtide.codecs.groups import Groups
from lowtide.coding import dither
from lowtide.errors import PayloadError, PolicyError, UnknownNameError
from lowtide.records import Encoded

# Powers of ten from subnormal to the largest scale at which normal values stay finite.
SCALES = {
    torch.float32: (-44, 37),
    torch.bfloat16: (-39, 37),
    torch.float16: (-7, 4),
    torch.float64: (-310, 300),
}
DTYPES = list(SCALES)
BITS = (1, 2, 4, 8)
SHAPES = [(0,), (2, 0, 3), (), (1,), (31,), (33, 2), (257,), (3, 5, 7, 11), (40, 40), (2, 3, 24, 24), (1023,)]
# Of float32: t = (x - min) / scale has an error of at most 255 * 2**-22 (of float64: less).
_SLACK = 2.0**-14


def in_groups(x: Tensor, group: int) -> list[Tensor]:
    """The values in memory order, group by group, in float64."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset()).double()
    return list(flat.split(group)) if x.numel() else []


def read_codes(encoded: Encoded) -> list[Tensor]:
    """The codes of every group, by the letter of the format."""
    bits, group = encoded.meta["bits"], encoded.meta["group"]
    parts, per_byte = max(4, 8 // bits), 8 // bits
    places = group // parts
    packed = encoded.tensors["codes"].tolist()
    codes: list[list[int]] = [[] for _ in range(encoded.tensors["low"].numel())]
    for index in range(encoded.spec.numel):
        owner, rest = divmod(index, group)
        part, place = divmod(rest, places)
        row, lane = divmod(part, per_byte)
        byte = packed[owner * group * bits // 8 + row * places + place]
        codes[owner].append(byte >> lane * bits & (1 << bits) - 1)
    return [torch.tensor(found, dtype=torch.float64) for found in codes]


def dither_of(seed: int, owner: int, rest: int, *, bits: int, group: int) -> float:
    """The offset of one element of one group, by the letter of the format."""
    places = group // max(4, 8 // bits)
    part, place = divmod(rest, places)
    at = 4 * (owner * group // 4 + part // 4 * places + place) + part % 4
    stream = dither.offsets(seed, at // 4 * 4, at + 1, dtype=torch.float64, device=torch.device("cpu"))
    return float(stream[-1])


@dataclasses.dataclass(frozen=True)
class Example:
    x: Tensor
    codec: Groups
    seed: int


@st.composite
def examples(draw: st.DrawFn) -> Example:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 40)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    kind = draw(st.sampled_from(["normal", "positive", "offset", "few"]))
    x = {"normal": x, "positive": x.relu(), "offset": x + 1000, "few": x.round()}[kind]
    x = (x * 10.0 ** draw(st.integers(*SCALES[dtype]) | st.integers(-2, 2))).to(dtype)
    info = torch.finfo(dtype)
    specials = [math.nan, math.inf, -math.inf, info.max, info.min, info.smallest_normal, -0.0]
    for special in draw(st.lists(st.sampled_from(specials), max_size=2)) if x.numel() else []:
        x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = special
    x = lay_out(x, tuple(draw(st.permutations(range(len(shape))))))
    options = {"bits": draw(st.sampled_from(BITS)), "group": draw(st.sampled_from([32, 96, 256]))}
    codec = Groups(**options, rounding=draw(st.sampled_from(["stochastic", "nearest"])))
    return Example(x, codec, draw(st.integers(0, (1 << 64) - 1)))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(examples())
def test_every_promise_of_groups(example: Example) -> None:
    x, codec = example.x, example.codec
    encoded = codec.encode(x, seed=example.seed)
    decoded = codec.decode(encoded)
    assert same_geometry(decoded, x)
    work = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32)
    pieces = zip(
        in_groups(x, codec.group),
        in_groups(decoded, codec.group),
        encoded.tensors["low"].double(),
        encoded.tensors["scale"].double(),
        read_codes(encoded),
        strict=True,
    )
    for values, restored, low, scale, codes in pieces:
        span = values.amax() - values.amin()
        if not bool(span.to(x.dtype if x.dtype == torch.float64 else torch.float32) < 1 / work.smallest_normal):
            assert bool(restored.isnan().all()) and bool(scale.isnan()) and low == 0 and not bool(codes.any())
            continue
        assert low == values.amin()
        exact = span / ((1 << codec.bits) - 1)
        largest = max(exact * (1 + 2.0**-7), work.smallest_normal)
        assert (exact * (1 - 2.0**-20) <= scale <= largest) if span > 0 else scale == 0
        points = low + codes * scale
        error = (points - values).abs()
        share = 1.0 if codec.rounding == "stochastic" else 0.5 + _SLACK
        assert bool((error <= scale * share).all())
        rounding = torch.finfo(x.dtype).eps * points.abs() + torch.finfo(x.dtype).tiny * torch.finfo(x.dtype).eps
        clipped = points.clamp(max=torch.finfo(x.dtype).max)
        assert bool(((restored - clipped).abs() <= rounding).all())
        assert bool(restored.isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_codes_are_those_of_the_formula(bits: int, dtype: torch.dtype) -> None:
    """Recomputed for single elements in float64; where that is within a rounding of a tie, either code will do."""
    x = torch.randn(700).to(dtype)
    encoded = Groups(bits).encode(x, seed=9)
    for owner, (values, codes) in enumerate(zip(in_groups(x, 256), read_codes(encoded), strict=True)):
        low, scale = (float(encoded.tensors[name][owner]) for name in ("low", "scale"))
        for rest in range(0, values.numel(), 7):
            t = (float(values[rest]) - low) / scale + dither_of(9, owner, rest, bits=bits, group=256)
            assert abs(float(codes[rest]) - t) <= 0.5 + _SLACK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_all_dither_is_the_value(bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all 256 offsets, each as often as the others: not a sample."""
    x = torch.randn(256).to(dtype)
    codec = Groups(bits)
    codes = torch.zeros(256, dtype=torch.float64)
    for byte in range(256):
        offset = (byte + 0.5) / 256 - 0.5
        monkeypatch.setattr(dither, "offsets", lambda *_, dtype, device, u=offset: torch.full((256,), u, dtype=dtype))
        encoded = codec.encode(x)
        codes += read_codes(encoded)[0]
    low, scale = (encoded.tensors[name].double() for name in ("low", "scale"))
    error = low + scale * codes / 256 - x.double()
    assert float(error.abs().max()) <= float(scale) * (1 / 512 + _SLACK)


@pytest.mark.parametrize("bits", BITS)
def test_the_mean_over_a_tensor_is_kept(bits: int) -> None:
    """n = 2**18 values with their own dither: within four standard errors, and the variance is that of two points."""
    x = torch.rand(1 << 18)
    codec = Groups(bits)
    encoded = codec.encode(x, seed=4)
    error = codec.decode(encoded).double() - x.double()
    low, scale = (encoded.tensors[name].double().repeat_interleave(256) for name in ("low", "scale"))
    fraction = ((x.double() - low) / scale).frac()
    variance = scale**2 * fraction * (1 - fraction)
    assert abs(float(error.sum())) <= 4 * float(variance.sum()) ** 0.5
    # The error of the mean of n squares: below sqrt(E[error**4] / n), and |error| <= scale.
    spread = 4 * float((scale**2 * variance).mean() / x.numel()) ** 0.5
    assert abs(float((error**2 - variance).mean())) <= spread


def test_neighbouring_elements_and_other_seeds_have_other_dither() -> None:
    """Between two levels: half of the codes go either way, and agree with another seed, or a neighbour, by chance."""
    x = torch.full((1 << 14,), 0.5)
    x[::32], x[1::32] = 0.0, 1.0
    codec = Groups(1)
    chosen = x == 0.5
    first, second = (codec.decode(codec.encode(x, seed=seed))[chosen] for seed in (0, 1))
    # n = 15360 coins: four standard deviations are 0.0162.
    for coins in (first == 1, first == second, first[1:] == first[:-1], first[64:] == first[:-64]):
        assert abs(float(coins.double().mean()) - 0.5) < 0.0162


def test_nearest_rounding_asks_for_no_seed() -> None:
    x, codec = torch.randn(1000), Groups(4, rounding="nearest")
    assert codec.encode(x, seed=1).to_bytes() == codec.encode(x, seed=2).to_bytes()
    assert Groups(4).encode(x, seed=1).to_bytes() != Groups(4).encode(x, seed=2).to_bytes()


def test_order_within_a_group_matters_to_no_statistic_and_order_of_groups_to_no_group() -> None:
    x, codec = torch.randn(8, 256), Groups(4, rounding="nearest")
    within, across = torch.randperm(256), torch.randperm(8)
    encoded = codec.encode(x)
    shuffled = codec.encode(x[:, within].contiguous())
    assert all(bit_equal(encoded.tensors[name], shuffled.tensors[name]) for name in ("low", "scale"))
    assert bit_equal(codec.decode(shuffled), codec.decode(encoded)[:, within])
    assert bit_equal(codec.decode(codec.encode(x[across])), codec.decode(encoded)[across])


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_group_with_a_special_value_is_nan_and_its_neighbours_are_as_without_it(
    dtype: torch.dtype, special: float
) -> None:
    x, codec = torch.randn(1000).to(dtype), Groups()
    clean = codec.decode(codec.encode(x, seed=3))
    x[300] = special
    encoded = codec.encode(x, seed=3)
    decoded = codec.decode(encoded)
    assert bool(decoded[256:512].isnan().all())
    assert bit_equal(decoded[:256], clean[:256]) and bit_equal(decoded[512:], clean[512:])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_constant_group_comes_back_exactly(dtype: torch.dtype, bits: int) -> None:
    info = torch.finfo(dtype)
    for value in (0.1, 0.0, -7.3, info.max, info.min, info.smallest_normal * info.eps):
        x = torch.full((300,), value, dtype=torch.float64).to(dtype)
        codec = Groups(bits)
        assert bit_equal(codec.decode(codec.encode(x, seed=1)), x)


@pytest.mark.parametrize("bits", BITS)
def test_values_on_the_grid_come_back_exactly(bits: int) -> None:
    """For every scale that bfloat16 can hold between 1 and 2, and at far ends of its range."""
    levels = (1 << bits) - 1
    codes = torch.arange(256) % (levels + 1)
    for exponent in (-100, -7, 100):
        scale = torch.ldexp(torch.arange(128, 256).float(), torch.tensor(exponent))
        x = scale.unsqueeze(1) * codes
        encoded = Groups(bits).encode(x, seed=2)
        assert bit_equal(encoded.tensors["scale"].float(), scale)
        assert bit_equal(Groups(bits).decode(encoded), x)


def test_zeros_that_are_the_minimum_stay_zeros() -> None:
    x = torch.randn(4096).relu()
    x[::5] = -0.0
    decoded = Groups().decode(Groups().encode(x, seed=5))
    assert bool((decoded[x == 0] == 0).all())
    assert not bool(decoded.signbit().any())
    assert not bool(Groups().encode(-torch.zeros(300)).tensors["low"].signbit().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_next_to_the_largest_stay_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = (largest * (1 - torch.rand(256, dtype=torch.float64) / 64)).to(dtype)
    x[0] = largest
    for bits in BITS:
        assert bool(Groups(bits).decode(Groups(bits).encode(x, seed=1)).isfinite().all())


def test_work_is_cut_into_slabs_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5000)
    for codec in (Groups(), Groups(1, 96), Groups(8, 4096)):
        whole = codec.encode(x, seed=6)
        decoded = codec.decode(whole)
        monkeypatch.setattr(groups, "_SLAB_CPU", 700)
        assert codec.encode(x, seed=6).to_bytes() == whole.to_bytes()
        assert bit_equal(codec.decode(whole), decoded)
        monkeypatch.undo()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_sizes(bits: int, dtype: torch.dtype) -> None:
    """Whole groups take their bits and two statistics; of a short one, no byte without a value is stored."""
    statistics = dtype.itemsize + (8 if dtype == torch.float64 else 2)
    assert Groups(bits).encode(torch.zeros(2048, dtype=dtype)).nbytes == 8 * (256 * bits // 8 + statistics)
    for count in range(1, 256, 5):
        encoded = Groups(bits).encode(torch.randn(count).to(dtype))
        places, per_byte = 256 // max(4, 8 // bits), 8 // bits
        taken = {(index // places // per_byte, index % places) for index in range(count)}
        assert encoded.nbytes == len(taken) + statistics


@pytest.mark.parametrize("bits", [0, 3, 16, "2"])
def test_other_widths_are_refused(bits: object) -> None:
    with pytest.raises(PolicyError, match=rf"groups has codes of 1, 2, 4, 8 bits, got {bits!r}"):
        create("groups", bits=bits)


@pytest.mark.parametrize("group", [0, -32, 48, 16, 256.0])
def test_other_groups_are_refused(group: object) -> None:
    with pytest.raises(PolicyError, match=rf"groups has a positive multiple of 32 values in a group, got {group!r}"):
        create("groups", group=group)


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown rounding 'dither'; known: nearest, stochastic"):
        create("groups", rounding="dither")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"meta": {"bits": 3, "group": 256}}, "its options cannot be: groups has codes of"),
        ({"meta": {"bits": 2, "group": 100}}, "its options cannot be: groups has a positive multiple"),
        ({"meta": {"bits": 2}}, "its options cannot be: 'group'"),
        ({"meta": {"bits": 4, "group": 256}}, "part 'codes' is 256 x torch.uint8, expected 512 x torch.uint8"),
        ({"meta": {"bits": 2, "group": 128}}, "part 'low' is 4 x torch.float32, expected 8 x torch.float32"),
        ({"tensors": {}}, "lacks its part 'low'"),
    ],
)
def test_a_payload_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    encoded = dataclasses.replace(Groups().encode(torch.randn(1000)), **change)
    with pytest.raises(PayloadError, match=message):
        create("groups").decode(encoded)
