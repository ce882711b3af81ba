"""Planes of tensors and the means of their blocks: which values belong together, at the border too."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from codec_cases import lay_out
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.coding import lorenzo, planes
from lowtide.coding.block_means import Blocks
from lowtide.coding.planes import Planes
from lowtide.records import TensorSpec


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 3, 5, 7), (6, 5, 7)),
        ((2, 3, 4, 5, 7), (24, 5, 7)),
        ((1, 1, 2, 2), (1, 2, 2)),
        ((2, 3, 1, 7), (6, 1, 7)),
        ((2, 3, 7, 1), (6, 1, 7)),
        ((2, 3, 1, 1), (2, 1, 3)),
        ((4, 6, 5), (24, 1, 5)),
        ((4, 6), (4, 1, 6)),
        ((6,), (1, 1, 6)),
        ((1, 1), (1, 1, 1)),
        ((), (1, 1, 1)),
        ((3, 0, 2), (0, 1, 1)),
    ],
)
def test_where_planes_end(shape: tuple[int, ...], expected: tuple[int, int, int]) -> None:
    found = Planes.of(shape)
    assert (found.count, found.height, found.width) == expected


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)])
def test_planes_follow_indices_and_join_restores_strides(order: tuple[int, ...]) -> None:
    plain = torch.randn(2, 3, 4, 5)
    x = lay_out(plain, order)
    split = Planes.of(x.shape).split(x)
    assert torch.equal(split, plain.view(6, 4, 5))
    joined = planes.join(split.contiguous(), TensorSpec.of(x))
    assert torch.equal(joined, plain) and joined.stride() == x.stride()


def test_slabs_cover_all_planes_once() -> None:
    found = list(Planes(1000, 30, 30).slabs(torch.device("cpu")))
    assert len(found) > 1 and found[0][0] == 0 and found[-1][1] == 1000
    assert all(before[1] == after[0] for before, after in pairwise(found))


def means_by_hand(plane: Tensor, tall: int, wide: int) -> Tensor:
    rows = [[part.double().mean() for part in band.split(wide, 1)] for band in plane.split(tall, 0)]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("shape", [(1, 2, 8, 8), (1, 2, 14, 14), (1, 2, 7, 7), (2, 1, 16, 9), (3, 1, 2, 40)])
def test_a_mean_is_that_of_the_values_in_its_block(shape: tuple[int, ...]) -> None:
    """14 = 8 + 6: the published method averages the first 8 rows and stretches them over all 14."""
    x = torch.randn(shape)
    blocks = Blocks.of(shape, 8)
    means = blocks.means(blocks.planes.split(x))
    for plane, found in zip(x.flatten(0, 1), means, strict=True):
        assert torch.allclose(found.double(), means_by_hand(plane, 8, 8), atol=1e-6)


def test_a_row_has_blocks_of_as_many_values_as_an_image() -> None:
    x = torch.randn(3, 150)
    blocks = Blocks.of(x.shape, 8)
    assert (blocks.tall, blocks.wide, blocks.per_plane) == (1, 64, 3)
    means = blocks.means(blocks.planes.split(x))
    expected = torch.stack([x[:, :64].mean(1), x[:, 64:128].mean(1), x[:, 128:].mean(1)], 1)
    assert torch.allclose(means[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize("size", [8, 14, 28, 7, 20])
def test_stretched_blocks_are_pooling_and_interpolation(size: int) -> None:
    """What DIVISION does: avg_pool2d without padding, then nearest-neighbour upsampling."""
    x = torch.randn(2, 3, size, size)
    blocks = Blocks.of(x.shape, 8, stretched=True)
    side = min(8, size)
    pooled = F.avg_pool2d(x, side)
    means = blocks.means(blocks.planes.split(x))
    assert torch.allclose(means, pooled.flatten(0, 1), atol=1e-6)
    stretched = F.interpolate(pooled, size=(size, size), mode="nearest").flatten(0, 1)
    assert torch.allclose(blocks.spread(means), stretched, atol=1e-6)


def test_spread_gives_each_value_the_mean_of_its_own_block() -> None:
    blocks = Blocks.of((1, 1, 10, 19), 8)
    spread = blocks.spread(torch.arange(6.0).view(1, 2, 3))[0]
    assert spread[0, 0] == 0 and spread[7, 8] == 1 and spread[7, 18] == 2 and spread[8, 0] == 3 and spread[9, 18] == 5


def test_sums_do_not_depend_on_how_many_planes_are_summed_at_once() -> None:
    """A kernel works on one plane at a time and has to get the same bits."""
    x = torch.randn(50, 13, 21)
    blocks = Blocks(Planes(50, 13, 21), 8, 8)
    assert torch.equal(blocks.means(x), torch.cat([blocks.means(plane[None]) for plane in x]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.tuples(*[st.integers(1, 12)] * 3), st.integers(0, 1 << 30))
def test_lorenzo_is_undone_exactly(shape: tuple[int, int, int], seed: int) -> None:
    x = torch.randint(-2046, 2047, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    residuals = lorenzo.difference(x)
    assert residuals.dtype == torch.int16 and residuals.shape == x.shape
    assert torch.equal(lorenzo.accumulate(residuals).to(torch.int16), x)


def test_lorenzo_leaves_nothing_of_a_plane_that_rises_evenly_along_each_axis() -> None:
    """Left plus upper less upper left is exact for a(i) + b(j): only the first row and column remain."""
    x = (torch.arange(6).view(6, 1) ** 2 + 3 * torch.arange(7)).to(torch.int16).unsqueeze(0)
    residuals = lorenzo.difference(x)
    assert not residuals[:, 1:, 1:].any() and residuals[0, 0, 1:].tolist() == [3] * 6
