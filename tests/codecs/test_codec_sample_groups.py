"""sample_groups: who gets more bits, that it pays, and that the rest is codec groups."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from codec_cases import bit_equal
from torch import Tensor

from lowtide.codecs.groups import Groups
from lowtide.codecs.sample_groups import SampleGroups, count_samples
from lowtide.errors import PayloadError, PolicyError
from lowtide.records import TensorSpec


def uneven(samples: int) -> Tensor:
    """Sample k is k + 1 times as large as the first, in no order."""
    size = torch.randperm(samples).float() + 1
    return torch.randn(samples, 3, 16, 16) * size.view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("bits", "chosen", "widths"),
    [
        (1, 0, (1, 1)),
        (1.5, 4, (1, 2)),
        (2, 0, (2, 2)),
        (3, 4, (2, 4)),
        (2.5, 2, (2, 4)),
        (7, 6, (4, 8)),
        (8, 0, (8, 8)),
    ],
)
def test_the_samples_with_the_largest_ranges_get_more_bits(bits: float, chosen: int, widths: tuple[int, int]) -> None:
    x = uneven(8)
    codec = SampleGroups(bits)
    assert tuple(coder.bits for coder in codec.coders()) == widths
    mask = codec.encode(x).tensors["mask"]
    assert int(mask.sum()) == chosen
    order = x.flatten(1).square().sum(1).argsort(descending=True)[:chosen]
    assert sorted(order.tolist()) == mask.nonzero().flatten().tolist()


def test_the_average_is_what_was_asked_for() -> None:
    x = torch.randn(16, 4096)
    for bits in (1.25, 1.5, 3.0, 2.5, 6.0):
        metadata = (32 + 16) / 256 + 16 / x.numel() * 8
        assert 8 * SampleGroups(bits).encode(x).nbytes / x.numel() == pytest.approx(bits + metadata, rel=0.01)


def test_more_bits_where_they_count_beat_more_bits_anywhere() -> None:
    """Against the same widths given to samples at random: that is what an average of their errors amounts to."""
    x = uneven(16)
    mixed = SampleGroups(3.0)
    error = float((mixed.decode(mixed.encode(x)) - x).square().mean())
    few, many = (float((codec.decode(codec.encode(x)) - x).square().mean()) for codec in mixed.coders())
    assert error < 0.5 * (few + many) / 2


def test_one_width_is_codec_groups() -> None:
    x = torch.randn(6, 500)
    codec = SampleGroups(4, rounding="nearest")
    plain = Groups(4, rounding="nearest")
    assert bit_equal(codec.decode(codec.encode(x)), plain.decode(plain.encode(x)))


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((4, 3, 2, 2), (12, 4, 2, 1), 4),
        ((4, 3, 2, 2), (12, 1, 6, 3), 4),
        ((4, 6), (1, 4), 1),
        ((6,), (1,), 1),
        ((), (), 1),
        ((0, 3), (3, 1), 1),
        ((1, 6), (1, 1), 1),
    ],
)
def test_what_a_sample_is(shape: tuple[int, ...], stride: tuple[int, ...], expected: int) -> None:
    spec = TensorSpec(shape, stride, torch.float32, torch.device("cpu"))
    assert count_samples(spec) == expected


def test_a_sample_that_is_not_finite_comes_back_as_nan_and_gets_no_extra_bits() -> None:
    x = uneven(8)
    x[2] *= 1e6
    x[2, 0, 0, 0] = torch.nan
    encoded = SampleGroups(3.0).encode(x)
    assert encoded.tensors["mask"][2] == 0
    decoded = SampleGroups().decode(encoded)
    assert bool(decoded[2].isnan().any()) and bool(decoded[[0, 1, 3, 4, 5, 6, 7]].isfinite().all())


def test_a_mask_that_was_damaged_still_decodes_to_something_of_the_right_shape() -> None:
    """Its ones are not as many as they were: samples are mixed up, none is read past the end."""
    encoded = SampleGroups(3.0).encode(uneven(8))
    damaged = dataclasses.replace(encoded, tensors={**encoded.tensors, "mask": torch.ones(8, dtype=torch.uint8)})
    assert SampleGroups().decode(damaged).shape == (8, 3, 16, 16)


@pytest.mark.parametrize("bits", [0, 9, "2", None])
def test_bits_that_cannot_be(bits: object) -> None:
    with pytest.raises(PolicyError, match="sample_groups has codes of 1 to 8 bits on average, got"):
        SampleGroups(bits)
    encoded = SampleGroups().encode(torch.randn(3, 4))
    with pytest.raises(PayloadError, match=r"sample_groups payload: its options cannot be: .*: corrupted"):
        SampleGroups().decode(dataclasses.replace(encoded, meta={**encoded.meta, "bits": bits}))
