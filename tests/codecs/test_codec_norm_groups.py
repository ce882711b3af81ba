"""norm_groups: narrow channels and rows survive beside wide ones, in every layout; elsewhere it is codec groups."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from codec_cases import bit_equal
from torch import Tensor

from lowtide.codecs.groups import Groups
from lowtide.codecs.norm_groups import NormGroups
from lowtide.errors import PayloadError, PolicyError


def mixed_channels(dtype: torch.dtype = torch.float32) -> Tensor:
    """Spreads from 0.01 to 100 and means as large, channel by channel; channels_last, where groups mix them."""
    x = torch.randn(4, 32, 12, 12) * torch.logspace(-2, 2, 32).view(1, -1, 1, 1)
    x += torch.linspace(-100, 100, 32).view(1, -1, 1, 1) * torch.logspace(-2, 0, 32).view(1, -1, 1, 1)
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def relative_error(codec: Groups | NormGroups, x: Tensor, over: tuple[int, ...]) -> Tensor:
    """Of each channel or row, the mean squared error in units of its variance."""
    error = (codec.decode(codec.encode(x)).double() - x.double()).square().mean(over)
    return error / x.double().var(over, correction=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_narrow_channels_survive_beside_wide_ones(dtype: torch.dtype) -> None:
    """4 bits of a range of six deviations: an error of (6 / 15)**2 / 6 = 0.03 variances; in plain groups thousands."""
    x = mixed_channels(dtype)
    ours = relative_error(NormGroups(4), x, (0, 2, 3))
    assert float(ours.max()) < (0.2 if dtype == torch.bfloat16 else 0.1)
    assert float(relative_error(Groups(4), x, (0, 2, 3)).max()) > 1e3


def test_narrow_rows_survive_beside_wide_ones() -> None:
    x = torch.randn(6, 5, 40) * torch.logspace(-4, 0, 30).view(6, 5, 1)
    codec = NormGroups(4, per="row")
    assert float(relative_error(codec, x, (2,)).max()) < 0.1
    over_two = NormGroups(4, per="row", row_dims=2)
    assert over_two.encode(x).tensors["unit"].numel() == 6 and codec.encode(x).tensors["unit"].numel() == 30


def test_channels_of_each_sample() -> None:
    x = torch.randn(5, 6, 4, 4) * torch.logspace(-3, 0, 30).view(5, 6, 1, 1)
    assert float(relative_error(NormGroups(4, per="sample_channel"), x, (2, 3)).max()) < 0.15


@pytest.mark.parametrize(
    ("shape", "per"),
    [((2, 4, 16, 16), "channel"), ((8, 256), "row"), ((2, 3, 16, 16), "sample_channel"), ((4, 9), "tensor")],
)
def test_where_groups_do_not_mix_it_is_codec_groups(shape: tuple[int, ...], per: str) -> None:
    x = torch.randn(shape)
    encoded = NormGroups(2, per=per).encode(x, seed=4)
    plain = Groups(2).encode(x, seed=4)
    assert encoded.tensors.keys() == plain.tensors.keys()
    assert bit_equal(NormGroups().decode(encoded), Groups().decode(plain))


def test_units_are_powers_of_two_above_the_deviation() -> None:
    x = mixed_channels()
    encoded = NormGroups().encode(x)
    unit, spread = encoded.tensors["unit"].float(), x.std((0, 2, 3), correction=0)
    assert bool((torch.frexp(unit).mantissa == 0.5).all())
    assert bool((unit > spread * 0.999).all()) and bool((unit <= 2.001 * spread).all())
    assert torch.allclose(encoded.tensors["centre"].float(), x.mean((0, 2, 3)), rtol=0.01, atol=0.01)


def test_averages_between_two_widths() -> None:
    encoded = NormGroups(3.0).encode(mixed_channels())
    assert "mask" in encoded.tensors and bool(NormGroups().decode(encoded).isfinite().all())


def test_channels_without_a_spread_have_the_unit_one() -> None:
    x = torch.tensor([1.5, -2.0, 0.0]).view(1, 3, 1, 1).expand(2, 3, 4, 4).clone()
    encoded = NormGroups().encode(x)
    assert encoded.tensors["unit"].tolist() == [1, 1, 1]
    assert bit_equal(NormGroups().decode(encoded), x)


@pytest.mark.parametrize("special", [math.nan, math.inf])
def test_values_that_are_not_finite_spoil_their_channel_and_no_payload(special: float) -> None:
    x = mixed_channels()
    x[1, 2, 3, 3] = special
    decoded = NormGroups().decode(NormGroups().encode(x))
    assert not bool(decoded[1, 2, 3, 3].isfinite())
    assert bool(decoded[2:].isfinite().all()), "another sample's groups are not touched"


def test_half_precision_does_not_overflow() -> None:
    x = torch.full((2, 4, 3, 3), 65504.0, dtype=torch.float16)
    x[1] = 60000.0
    assert bool(NormGroups(1).decode(NormGroups(1).encode(x)).isfinite().all())


def test_options_that_cannot_be() -> None:
    with pytest.raises(PolicyError, match="norm_groups goes by tensor, channel, sample_channel, row; got 'column'"):
        NormGroups(per="column")
    with pytest.raises(PolicyError, match="1 to 8 bits on average, got 12"):
        NormGroups(12)
    encoded = NormGroups().encode(torch.randn(3, 4))
    with pytest.raises(PayloadError, match=r"norm_groups payload: its options cannot be: .*: corrupted"):
        NormGroups().decode(dataclasses.replace(encoded, meta={**encoded.meta, "per": "column"}))
