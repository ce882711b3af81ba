"""Division: its error, its mean, what it does to values that are not numbers, its format, and the published one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from codec_cases import bit_equal, lay_out, same_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codecs.division import Division
from lowtide.coding import dither
from lowtide.errors import PayloadError, PolicyError, UnknownNameError
from lowtide.records import Encoded

# Powers of ten from subnormal to the largest scale at which normal values stay finite.
SCALES = {torch.float32: (-44, 33), torch.bfloat16: (-39, 33), torch.float16: (-7, 4), torch.float64: (-310, 300)}
SHAPES = [
    (0,),
    (2, 0, 3),
    (),
    (1,),
    (31,),
    (5, 70),
    (2, 3, 5),
    (2, 3, 7, 7),
    (2, 2, 14, 14),
    (1, 3, 2, 19),
    (3, 2, 1, 9),
]
_SLACK = 2.0**-14  # of t = (r - low) / scale in float32, as in codec groups


def planes_of(x: Tensor) -> Tensor:
    """(planes, values) in the order of indices, in float64, by the letter of the format."""
    if x.dim() >= 4 and x.shape[-1] > 1 and x.shape[-2] > 1:
        return x.double().reshape(-1, x.shape[-2] * x.shape[-1])
    width = next((size for size in reversed(x.shape) if size > 1), 1)
    return x.double().reshape(-1, width)


@dataclasses.dataclass(frozen=True)
class Example:
    x: Tensor
    codec: Division
    seed: int


@st.composite
def examples(draw: st.DrawFn) -> Example:
    dtype = draw(st.sampled_from(list(SCALES)))
    shape = draw(st.sampled_from(SHAPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 40)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = {"normal": x, "positive": x.relu(), "offset": x + 1000}[draw(st.sampled_from(["normal", "positive", "offset"]))]
    x = (x * 10.0 ** draw(st.integers(*SCALES[dtype]) | st.integers(-2, 2))).to(dtype)
    for special in draw(st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -0.0]), max_size=1)):
        if x.numel():
            x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = special
    x = lay_out(x, tuple(draw(st.permutations(range(len(shape))))))
    rounding = draw(st.sampled_from(["stochastic", "nearest"]))
    codec = Division(draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([2, 8])), rounding)
    return Example(x, codec, draw(st.integers(0, (1 << 64) - 1)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(examples())
def test_every_promise_of_division(example: Example) -> None:
    x, codec = example.x, example.codec
    encoded = codec.encode(x, seed=example.seed)
    decoded = codec.decode(encoded)
    assert same_geometry(decoded, x)
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    scales = encoded.tensors["scale"].double()
    for values, restored, scale in zip(planes_of(x), planes_of(decoded), scales, strict=True):
        if not bool(values.isfinite().all()):
            assert bool(restored.isnan().all()) and bool(scale.isnan())
            continue
        # Mean, residual and sum are rounded in the working dtype, and the result once more to its own.
        peak = float(values.abs().amax())
        rounding = 8 * peak * torch.finfo(work).eps + torch.finfo(work).smallest_normal * torch.finfo(work).eps
        rounding += torch.finfo(x.dtype).eps * peak + torch.finfo(x.dtype).smallest_normal
        share = 1.0 if codec.rounding == "stochastic" else 0.5 + _SLACK
        assert bool(((restored - values).abs() <= float(scale) * share + rounding).all())


def test_the_scale_is_no_larger_than_it_has_to_be() -> None:
    """What a user gets: the range of the residual over 2**bits - 1, to a few hundredths."""
    x = torch.randn(4, 8, 24, 24)
    means = F.avg_pool2d(x, 8).repeat_interleave(8, 2).repeat_interleave(8, 3)
    residual = (x - means).flatten(2)
    span = (residual.amax(2) - residual.amin(2)).flatten()
    for bits in (1, 2, 4, 8):
        scale = Division(bits).encode(x).tensors["scale"].float() * ((1 << bits) - 1)
        assert bool((scale >= span * 0.99).all()) and bool((scale <= span * 1.03).all())


def test_smooth_maps_gain_by_their_means() -> None:
    """Where neighbours are alike the means carry most: the scale shrinks with what is left."""
    x = F.interpolate(torch.randn(2, 4, 4, 4), scale_factor=16, mode="bicubic")
    plain = (x.flatten(2).amax(2) - x.flatten(2).amin(2)).mean() / 3
    assert Division().encode(x).tensors["scale"].float().mean() < plain / 2


def test_the_error_has_no_mean() -> None:
    """200 seeds of 3072 values: the mean error is below 3 standard deviations, scale / sqrt(6 * 614,400)."""
    x = torch.randn(1, 3, 32, 32)
    decoded = [Division().decode(Division().encode(x, seed=seed)) for seed in range(200)]
    error = (torch.stack(decoded) - x).double()
    scale = float(Division().encode(x).tensors["scale"].float().mean())
    assert abs(float(error.mean())) < 3 * scale / math.sqrt(6 * error.numel())
    assert abs(float(error.mean(0).abs().mean())) < 0.1 * scale
    assert 0.1 < float(error.square().mean()) / scale**2 < 0.2  # 1/6 if residuals were spread evenly over the steps


def test_bits_and_bytes() -> None:
    """2 bits, a mean for 64 values, a low and a scale for each plane: 2 + 16/64 + 32/(H W)."""
    x = torch.randn(2, 5, 56, 56)
    assert 8 * Division().encode(x).nbytes / x.numel() == 2 + 16 / 64 + 32 / 56**2
    assert 8 * Division(bits=4, block=4).encode(x).nbytes / x.numel() == 4 + 16 / 16 + 32 / 56**2
    rows = torch.randn(6, 640)
    assert 8 * Division().encode(rows).nbytes / rows.numel() == 2 + 16 / 64 + 32 / 640


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_by_the_letter_of_the_format(bits: int) -> None:
    """A plane of 15 values in 4 parts (8 for 1 bit): neighbouring parts share bytes, four of them a word of dither."""
    x = torch.randn(2, 2, 3, 5)
    encoded = Division(bits).encode(x, seed=77)
    count, per_byte = max(4, 8 // bits), 8 // bits
    places = -(-15 // count)
    nbytes = places * count // per_byte
    packed, stored = encoded.tensors["codes"].tolist(), {name: t.float() for name, t in encoded.tensors.items()}
    for plane, values in enumerate(x.flatten(0, 1).flatten(1)):
        for at in range(15):
            part, place = divmod(at, places)
            row, lane = divmod(part, per_byte)
            code = packed[plane * nbytes + row * places + place] >> lane * bits & (1 << bits) - 1
            word = plane * places * count // 4 + part // 4 * places + place
            index = 4 * word + part % 4
            u = dither.offsets(77, index, index + 1, dtype=torch.float64, device=x.device)
            residual = (values[at] - stored["mean"][plane]).double() - stored["low"][plane].double()
            assert code == int(torch.round(residual / stored["scale"][plane].double() + u))
    assert len(packed) == 4 * nbytes


def test_a_plane_that_is_not_finite_does_not_touch_its_neighbours() -> None:
    x = torch.randn(2, 3, 9, 9)
    clean = Division().decode(Division().encode(x))
    for special in (math.nan, math.inf, 3e38):
        x[1, 1, 4, 4] = special
        decoded = Division().decode(Division().encode(x))
        assert bool(decoded[1, 1].isnan().all())
        decoded[1, 1] = clean[1, 1]
        assert bit_equal(decoded, clean)


def test_zeros_come_back_as_zeros_where_nothing_else_is() -> None:
    x = torch.zeros(1, 2, 10, 10)
    x[0, 1, 3, 3] = 1.0
    decoded = Division().decode(Division().encode(x))
    assert not decoded[0, 0].any() and bool(decoded[0, 1].any())


def test_half_precision_does_not_overflow() -> None:
    x = torch.full((1, 1, 8, 8), 65504.0, dtype=torch.float16)
    x[0, 0, 0, :] = -65504.0
    for seed in range(20):
        decoded = Division().decode(Division().encode(x, seed=seed))
        assert bool(decoded.isfinite().all())


def test_payloads_do_not_depend_on_strides() -> None:
    x = torch.randn(2, 6, 9, 11)
    plain = Division().encode(x, seed=5)
    other = Division().encode(x.contiguous(memory_format=torch.channels_last), seed=5)
    assert all(bit_equal(part, other.tensors[name]) for name, part in plain.tensors.items())


def test_faithful_is_worse_where_the_published_blocks_do_not_fit() -> None:
    """14 is no multiple of 8: one mean of the first 8 x 8 values stands for the whole map."""
    x = F.interpolate(torch.randn(4, 8, 3, 3), size=(14, 14), mode="bicubic")
    error = {}
    for faithful in (False, True):
        codec = Division(faithful=faithful)
        encoded = codec.encode(x)
        assert encoded.tensors["mean"].numel() == 32 * (1 if faithful else 4)
        error[faithful] = float((codec.decode(encoded) - x).square().mean())
    assert error[False] < 0.9 * error[True]


def test_faithful_codes_with_other_extremes_than_it_stores() -> None:
    """8 bits: low and scale rounded after coding move values by more than a step; ours stay within one."""
    x = torch.randn(64, 1, 16, 16) + 3
    worst = {}
    for faithful in (False, True):
        codec = Division(8, faithful=faithful)
        encoded = codec.encode(x)
        error = (codec.decode(encoded) - x).abs().flatten(1).amax(1)
        worst[faithful] = float((error / encoded.tensors["scale"].float()).max())
    assert worst[False] <= 1.01 < worst[True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 3}, "division has codes of 1, 2, 4, 8 bits, got 3"),
        ({"block": 6}, "division has blocks with a side of 2, 4, 8, 16, got 6"),
    ],
)
def test_options_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Division(**options)
    encoded = Division().encode(torch.randn(3, 4))
    with pytest.raises(PayloadError, match=r"division payload: its options cannot be: .*: corrupted"):
        Division().decode(dataclasses.replace(encoded, meta={**encoded.meta, **options}))


def test_an_unknown_rounding_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown rounding 'dither'; known: nearest, stochastic"):
        Division(rounding="dither")


def test_decoding_needs_no_options_but_those_of_the_payload() -> None:
    encoded = Division(4, 2, "nearest").encode(torch.randn(2, 3, 9, 9))
    assert isinstance(encoded, Encoded) and bit_equal(Division().decode(encoded), Division(4, 2).decode(encoded))
