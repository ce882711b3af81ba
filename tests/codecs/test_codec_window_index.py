"""Max-pooling indices against real pooling: exact, and as small as the window allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from codec_cases import bit_equal, same_geometry
from swapped_saves import run
from torch import Tensor

from lowtide.codecs import Codec, create
from lowtide.errors import DtypeError
from lowtide.records import Need

POOLS: dict[int, Callable[..., Any]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}

# kernel, stride, padding, dilation, ceil_mode, plane, bits an index
GEOMETRIES = [
    ((2,), (2,), (0,), (1,), False, (16,), 1),
    ((3,), (2,), (1,), (1,), False, (17,), 2),
    ((5,), (1,), (2,), (2,), False, (23,), 4),
    ((4,), (3,), (2,), (1,), True, (19,), 2),
    ((2, 2), (2, 2), (0, 0), (1, 1), False, (8, 10), 2),
    ((3, 3), (2, 2), (1, 1), (1, 1), False, (15, 9), 4),
    ((3, 3), (1, 1), (0, 0), (1, 1), False, (7, 7), 4),
    ((3, 3), (2, 2), (1, 1), (1, 1), True, (14, 16), 4),
    ((2, 5), (1, 3), (1, 2), (1, 1), False, (9, 20), 4),
    ((3, 2), (2, 1), (1, 0), (2, 3), False, (13, 11), 4),
    ((4, 4), (4, 4), (0, 0), (1, 1), True, (9, 10), 4),
    ((1, 3), (1, 2), (0, 1), (1, 1), False, (6, 13), 2),
    ((1, 1), (2, 2), (0, 0), (1, 1), False, (6, 6), 1),
    ((5, 5), (3, 3), (2, 2), (1, 1), False, (12, 12), 8),
    ((16, 16), (4, 4), (0, 0), (1, 1), False, (24, 20), 8),
    ((2, 2, 2), (2, 2, 2), (0, 0, 0), (1, 1, 1), False, (4, 6, 8), 4),
    ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1), True, (7, 8, 9), 8),
    ((2, 3, 1), (1, 2, 1), (1, 1, 0), (2, 1, 1), False, (6, 7, 5), 4),
]
FALLBACKS = [
    ((17, 17), (4, 4), (0, 0), (1, 1), False, (40, 40), 32),
    ((257,), (100,), (0,), (1,), False, (600,), 32),
    ((7, 7, 7), (3, 3, 3), (0, 0, 0), (1, 1, 1), False, (10, 10, 10), 32),
]


def pool(x: Tensor, geometry: Sequence[Any]) -> Tensor:
    kernel, stride, padding, dilation, ceil_mode = geometry[:5]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": ceil_mode}
    indices: Tensor = POOLS[len(kernel)](x, kernel, return_indices=True, **options)[1]
    return indices


def codec_for(geometry: Sequence[Any]) -> Codec:
    kernel, stride, padding, dilation, _, plane = geometry[:6]
    return create("window_index", kernel=kernel, stride=stride, padding=padding, dilation=dilation, plane=plane)


@pytest.mark.parametrize("geometry", GEOMETRIES + FALLBACKS, ids=lambda g: "-".join(map(str, g[:6])).replace(" ", ""))
def test_indices_of_real_pooling_come_back_exactly_and_in_few_bits(geometry: Sequence[Any]) -> None:
    plane, bits = geometry[5], geometry[6]
    indices = pool(torch.randn(2, 3, *plane), geometry)
    codec = codec_for(geometry)
    encoded = codec.encode(indices)
    assert bit_equal(codec.decode(encoded), indices)
    assert same_geometry(codec.decode(encoded), indices)
    assert encoded.nbytes == -(-indices.numel() * bits // 8)


@pytest.mark.parametrize("fill", [0.0, float("-inf"), float("nan")])
def test_ties_padding_and_nan_choose_indices_that_are_in_the_window(fill: float) -> None:
    """Where all values are equal the first place counts; NaN is chosen wherever it is."""
    geometry = GEOMETRIES[5]
    x = torch.full((2, 3, *geometry[5]), fill)
    x[:, :, 3::4] = 1.0
    indices = pool(x, geometry)
    encoded = codec_for(geometry).encode(indices)
    assert bit_equal(codec_for(geometry).decode(encoded), indices)
    assert encoded.nbytes == -(-indices.numel() * 4 // 8)


@pytest.mark.parametrize("geometry", [GEOMETRIES[4], GEOMETRIES[5], GEOMETRIES[8]], ids=str)
def test_channels_last(geometry: Sequence[Any]) -> None:
    x = torch.randn(2, 5, *geometry[5]).to(memory_format=torch.channels_last)
    indices = pool(x, geometry)
    assert not indices.is_contiguous()
    codec = codec_for(geometry)
    encoded = codec.encode(indices)
    assert bit_equal(codec.decode(encoded), indices)
    assert same_geometry(codec.decode(encoded), indices)
    assert encoded.nbytes == -(-indices.numel() * geometry[6] // 8)


def test_without_a_batch_axis() -> None:
    geometry = GEOMETRIES[5]
    indices = pool(torch.randn(3, *geometry[5]), geometry)
    encoded = codec_for(geometry).encode(indices)
    assert bit_equal(codec_for(geometry).decode(encoded), indices)
    assert "codes" in encoded.tensors


@pytest.mark.parametrize("size", [(7, 7), (3, 5), (4, 4)])
def test_adaptive_pooling_falls_back_to_int32(size: tuple[int, int]) -> None:
    indices = F.adaptive_max_pool2d(torch.randn(2, 3, 11, 13), size, return_indices=True)[1]
    encoded = create("window_index").encode(indices)
    assert encoded.nbytes == 4 * indices.numel() == indices.nbytes // 2
    assert bit_equal(create("window_index").decode(encoded), indices)


@pytest.mark.parametrize("change", ["kernel", "stride", "padding", "dilation", "plane"])
def test_indices_of_another_window_fall_back_and_stay_exact(change: str) -> None:
    """The encoder checks its own work: a window that does not explain the indices is not used."""
    geometry = ((3, 3), (2, 2), (1, 1), (1, 1), False, (15, 15))
    indices = pool(torch.randn(2, 3, 15, 15), geometry)
    wrong = {"kernel": (2, 2), "stride": (3, 2), "padding": (0, 0), "dilation": (2, 2), "plane": (15, 14)}
    options = dict(zip(("kernel", "stride", "padding", "dilation", "plane"), (*geometry[:4], (15, 15)), strict=True))
    codec = create("window_index", **{**options, change: wrong[change]})
    encoded = codec.encode(indices)
    assert bit_equal(codec.decode(encoded), indices)
    assert encoded.nbytes == 4 * indices.numel()


@pytest.mark.parametrize("value", [(1 << 31) - 1, 1 << 31, -1, -(1 << 31) - 1, (1 << 62) + 1])
def test_indices_that_int32_cannot_hold_are_kept_as_they_are(value: int) -> None:
    indices = torch.tensor([0, 5, value])
    encoded = create("window_index").encode(indices)
    assert encoded.nbytes == (12 if -(1 << 31) <= value < 1 << 31 else 24)
    assert bit_equal(create("window_index").decode(encoded), indices)


def test_other_integers_are_refused() -> None:
    with pytest.raises(DtypeError, match=r"window_index stores int64 indices, got torch.int32"):
        create("window_index").encode(torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("op", "shape", "bits"),
    [
        (lambda x: F.max_pool1d(x, 3, 2, 1), (2, 3, 17), 2),
        (lambda x: F.max_pool2d(x, 2), (2, 3, 8, 8), 2),
        (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 3, 15, 15), 4),
        (lambda x: F.max_pool2d(x, (2, 4), (1, 3), (0, 1), (2, 1), ceil_mode=True), (2, 3, 12, 15), 4),
        (lambda x: F.max_pool2d(x, 17, 4), (2, 3, 40, 40), 32),
        (lambda x: F.max_pool3d(x, 2), (2, 3, 4, 6, 8), 4),
        (lambda x: F.adaptive_max_pool2d(x, (4, 5)), (2, 3, 11, 13), 32),
    ],
    ids=["pool1d", "2x2", "3x3", "ceil_dilated", "17x17", "pool3d", "adaptive"],
)
def test_the_window_that_autograd_tells_gives_the_gradient(
    op: Callable[[Tensor], Tensor], shape: tuple[int, ...], bits: int
) -> None:
    swapped = run(op, torch.randn(shape), _make_index, "result1")
    assert bit_equal(swapped.got, swapped.expected)
    assert swapped.codec.encode(swapped.saved).nbytes == -(-swapped.saved.numel() * bits // 8)


def _make_index(need: Need) -> Codec:
    window = need.window
    if window is None:
        return create("window_index")
    assert prod(window.plane) > 0
    fields = ("kernel", "stride", "padding", "dilation", "plane")
    return create("window_index", **{name: getattr(window, name) for name in fields})
