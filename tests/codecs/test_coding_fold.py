"""A norm's input folded with what ReLU made of its output: the bounds of both, the mask, odd channels."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.codecs.sz import Sz
from lowtide.coding import fold
from lowtide.coding.fold import Norm
from lowtide.records import Bound

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Folded:
    """What a norm read, what ReLU made, and what comes back of both through the codec."""

    x: Tensor
    y: Tensor
    t: Tensor
    table: Tensor
    norm: Norm
    stored: Tensor
    nbytes: int

    @property
    def source(self) -> Tensor:
        return fold.source(self.stored, self.table, self.x.dtype)

    @property
    def made(self) -> Tensor:
        return fold.made(self.stored, self.table, self.x.dtype)


def run(
    x: Tensor, weight: Tensor, bias: Tensor, *, source: float = 0.5, made: float | None = 0.2, seed: int = 0
) -> Folded:
    """``source`` in standard deviations of a channel, ``made`` as it is."""
    work = fold.working(x.dtype)
    out, mean, inverse_std = torch.native_batch_norm(x, weight.to(work), bias.to(work), None, None, True, 0.1, 1e-5)
    norm = Norm(mean, inverse_std, weight.to(work), bias.to(work))
    y, bound = F.relu(out), Bound(source / inverse_std.double(), (1,))
    table = fold.table(norm, bound, None if made is None else Bound.absolute(made), x.dtype)
    t, codec = fold.fold(x, y, table), Sz(coder="rans")
    encoded = codec.encode(t, Bound.absolute(fold.limit(x.dtype)), seed=seed)
    return Folded(x, y, t, table, norm, codec.decode(encoded), encoded.nbytes)


def columns(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1)


def make(channels: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = 3 * torch.randn(8, channels, 12, 12) + 4 * torch.randn(1, channels, 1, 1)
    return x.to(dtype), torch.randn(channels), torch.randn(channels)


def excess(got: Tensor, expected: Tensor, bound: Tensor | float) -> float:
    """The largest error beyond the bound and two roundings of the dtype, one of each tensor."""
    rounding = torch.finfo(expected.dtype).eps * expected.double().abs()
    return float(((got.double() - expected.double()).abs() - bound - rounding).max())


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_keep_their_bounds_and_the_mask_is_exact(dtype, order):
    x, weight, bias = make(dtype=dtype)
    found = run(x.contiguous(memory_format=order), weight, bias)
    assert torch.equal(found.stored > 0, found.y > 0) and torch.equal(found.made != 0, found.y > 0)
    assert excess(found.made, found.y, 0.2) <= 0
    assert excess(found.source, x, columns(0.5 / found.norm.inverse_std.double())) <= 0
    for tensor in (found.t, found.source, found.made, fold.mask(found.stored, dtype)):
        assert tensor.stride() == found.x.stride()
    assert found.source.dtype == found.made.dtype == fold.mask(found.stored, dtype).dtype == dtype
    assert torch.equal(fold.mask(found.stored, dtype) > 0, found.y > 0)


def test_in_float32_bounds_are_kept_with_nothing_to_spare_for_roundings():
    x, weight, bias = make()
    found = run(x, weight, bias)
    assert 0.19 < float((found.made - found.y).abs().max()) <= 0.2
    error = (found.source - x).abs() * columns(found.norm.inverse_std)
    assert 0.49 < float(error[found.y == 0].max()) <= 0.5


@settings(max_examples=60, deadline=None)
@given(
    st.floats(-6, 2), st.floats(-6, 2), st.floats(-4, 4), st.floats(-20, 2), st.floats(-20, 20), st.integers(0, 2**32)
)
def test_bounds_are_kept_whatever_they_are(source, made, mean, scale, shift, seed):
    """Bounds, means, scales and shifts over many orders of magnitude, in one of the channels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 8, 8, generator=generator)
    x[:, 1] += 10.0**mean
    weight, bias = torch.tensor([1.0, 10.0**scale, -0.5]), torch.tensor([0.1, shift, -0.3])
    found = run(x, weight, bias, source=10.0**source, made=10.0**made, seed=seed)
    assert torch.equal(found.stored > 0, found.y > 0)
    # Torch computes y with an error of a few roundings of its terms, x' is rounded, and so is where it is counted from.
    eps = torch.finfo(torch.float32).eps
    terms = (found.norm.weight * found.norm.inverse_std).abs() * x.abs().amax((0, 2, 3)) + bias.abs()
    assert excess(found.made, found.y, 10.0**made + columns(8 * eps * terms.double())) <= 0
    spread = 1 / found.norm.inverse_std.double()
    reach = x.double().abs().amax((0, 2, 3)) + 8 * spread
    assert excess(found.source, x, columns(10.0**source * spread + 4 * eps * reach)) <= 0


def test_errors_have_mean_zero_where_relu_is_on():
    """y' is not cut off at zero. 64 draws of 4600 values: the mean of errors has a standard deviation of 2e-4."""
    x, weight, bias = make()
    made = run(x, weight, bias).y
    errors = torch.stack([run(x, weight, bias, seed=seed).made for seed in range(64)]) - made
    on = made > 0
    assert abs(float(errors[:, on].mean())) < 1e-3
    near = on & (made < 0.1)
    assert abs(float(errors[:, near].mean())) < 4e-3 and float(errors[:, near].min()) < -0.15
    assert float(errors[:, on].var()) == pytest.approx(0.2**2 / 3, rel=0.03)
    assert not bool(errors[:, ~on].any())


def test_channels_that_are_always_on_or_never():
    """Their threshold is far away, or nowhere; some values are farther from it than it may be from the mean."""
    x = torch.randn(16, 6, 16, 16)
    x[0, :, 0, 0] = torch.tensor([60.0, -60.0, 60.0, -60.0, 60.0, 60.0])
    weight = torch.tensor([1e-30, 1e-30, 1e-30, -1e-30, 0.0, 0.0])
    bias = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 2.0])
    found = run(x, weight, bias)
    assert found.y.amin((0, 2, 3)).tolist() == found.y.amax((0, 2, 3)).tolist() == [1, 1, 0, 0, 0, 2]
    assert torch.equal(found.made, found.y)
    assert excess(found.source, x, columns(0.5 / found.norm.inverse_std.double())) <= 0
    assert float(found.t.abs().amax()) > 2.0**40, "some were told apart from all others"
    assert found.nbytes < 0.2 * x.nbytes, "they are few"


def test_a_scale_below_zero():
    x, weight, bias = make()
    one, other = run(x, weight, bias), run(-x, -weight, bias)
    assert torch.equal(one.t, other.t) and torch.equal(one.made, other.made)
    assert torch.allclose(one.source, -other.source, rtol=0, atol=1e-5)


def test_a_constant_channel_comes_back_nearly_exactly():
    """Its bound is zero."""
    x, weight, bias = make()
    x[:, 3] = 7.25
    found = run(x, weight, bias, source=0.5)
    table = fold.table(found.norm, Bound(torch.zeros(8, dtype=torch.float64), (1,)), None, torch.float32)
    t = fold.fold(x, found.y, table)
    assert bool(t.isfinite().all())
    assert float((fold.source(t, table, torch.float32) - x).abs().max()) < 1e-5


def test_values_that_are_none_stay_none():
    x, weight, bias = make()
    x[0, 2, 0, 0] = torch.nan
    found = run(x, weight, bias)
    assert bool(found.y[:, 2].isnan().all())
    assert bool(found.made[:, 2].isnan().all()) and bool(found.source[:, 2].isnan().all())
    rest = [channel for channel in range(8) if channel != 2]
    assert not bool(found.source[:, rest].isnan().any()) and not bool(found.made[:, rest].isnan().any())


def test_one_tensor_takes_fewer_bytes_than_two():
    """For bounds that a net in training has: by a fifth at least."""
    x, weight, bias = make(channels=16)
    weight, bias = weight.sign() * (0.5 + weight.abs()), 0.3 * bias
    codec = Sz(coder="rans")
    for source, made in ((0.5, 0.2), (1.5, 0.3)):
        found = run(x, weight, bias, source=source, made=made)
        alone = codec.encode(x, Bound(source / found.norm.inverse_std.double(), (1,))).nbytes
        second = Sz(coder="rans", keep_zeros=True).encode(found.y, Bound.absolute(made)).nbytes
        assert found.nbytes + found.table.nbytes < 0.8 * (alone + second)


def test_variances_are_those_of_the_errors():
    x, weight, bias = make()
    found = run(x, weight, bias, source=1.0)
    errors = torch.stack([run(x, weight, bias, source=1.0, seed=seed).source for seed in range(40)]) - x
    variance = (errors * columns(found.norm.inverse_std)).var(0) * 3  # of the bound's own: 1
    expected = fold.variances(found.stored, found.table)
    assert expected.shape == x.shape and bool((expected[found.y == 0] == 1).all())
    for channel in range(8):
        for side in (found.y[:, channel] > 0, found.y[:, channel] == 0):
            if int(side.sum()) > 100:
                got, wanted = variance[:, channel][side].mean(), expected[:, channel][side].mean()
                assert float(got) == pytest.approx(float(wanted), rel=0.05)
