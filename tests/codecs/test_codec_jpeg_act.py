"""JPEG-ACT: the transform, the tables, unbiased rounding, and what was published about it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from codec_cases import bit_equal
from torch import Tensor

from lowtide.codecs.jpeg_act import JpegAct
from lowtide.coding import dct
from lowtide.errors import UnknownNameError

SIZES = [(8, 8), (16, 24), (14, 14), (9, 31), (8, 15), (1, 5)]


def smooth(*shape: int) -> Tensor:
    return F.interpolate(torch.randn(shape), scale_factor=8, mode="bicubic")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_transform_is_orthonormal(size: tuple[int, int]) -> None:
    """Also where blocks at the border are shorter than 8: energy is kept, and the inverse undoes it."""
    x = torch.randn(3, *size, dtype=torch.float64)
    coefficients = dct.forward(x)
    assert coefficients.shape == x.shape
    assert torch.allclose(coefficients.square().sum((1, 2)), x.square().sum((1, 2)))
    assert torch.allclose(dct.inverse(coefficients), x)
    assert not torch.allclose(coefficients, x)


def test_a_block_by_the_textbook() -> None:
    """The formula of JPEG: c(u) c(v) / 4 * sum of x * cos * cos, c(0) = 1 / sqrt(2)."""
    x = torch.randn(1, 8, 8, dtype=torch.float64)
    found = dct.forward(x)[0]
    for u, v in ((0, 0), (0, 3), (5, 2), (7, 7)):
        total = sum(
            float(x[0, i, j]) * math.cos((2 * i + 1) * u * math.pi / 16) * math.cos((2 * j + 1) * v * math.pi / 16)
            for i in range(8)
            for j in range(8)
        )
        factor = (math.sqrt(0.5) if u == 0 else 1) * (math.sqrt(0.5) if v == 0 else 1) / 4
        assert float(found[u, v]) == pytest.approx(factor * total)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bands_hold_every_coefficient_once_and_rise_in_frequency(size: tuple[int, int]) -> None:
    bands = dct.bands(*size)
    assert torch.cat(bands).sort().values.tolist() == list(range(size[0] * size[1]))
    diagonal = (dct.frequencies(size[0])[:, None] + dct.frequencies(size[1])).flatten()
    limits = [(0, 0), (1, 2), (3, 6), (7, 14)]
    for band, (low, high) in zip(bands, limits, strict=True):
        assert bool(((diagonal[band] >= low) & (diagonal[band] <= high)).all())


def test_frequencies_of_a_short_block() -> None:
    assert dct.frequencies(12).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 2, 4, 6]


def test_the_error_is_unbiased_and_as_large_as_the_table_says() -> None:
    """With dither, coefficient errors are uniform in +-table/2: their mean square is the mean of table**2 / 12."""
    x = torch.randn(2, 4, 24, 24)
    for table in ("optL", "optH"):
        codec = JpegAct(table)
        decoded = torch.stack([codec.decode(codec.encode(x, seed=seed)) for seed in range(30)])
        unit = x.abs().amax((0, 2, 3)).view(1, 4, 1, 1) / 127
        error = ((decoded - x) / unit).double()
        steps = dct.spread(torch.tensor(codec.steps(), dtype=torch.float64), 24, 24)
        expected = float(steps.square().mean()) / 12
        assert float(error.square().mean()) == pytest.approx(expected, rel=0.03)
        assert abs(float(error.mean())) < 4 * math.sqrt(expected / error.numel())


def test_smooth_maps_cost_less_than_noise_and_optl_more_than_opth() -> None:
    bits = {}
    for name, x in (("smooth", smooth(2, 8, 4, 4)), ("noise", torch.randn(2, 8, 32, 32))):
        for table in ("optL", "optH"):
            bits[name, table] = 8 * JpegAct(table, "nearest", "rans").encode(x).nbytes / x.numel()
    assert bits["smooth", "optH"] < bits["smooth", "optL"] < bits["noise", "optH"] < bits["noise", "optL"] < 6
    assert bits["smooth", "optH"] < 1.5


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (4, 40), (2, 3, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_nan_and_inf_come_back_and_the_rest_is_near(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    x.view(-1)[3], x.view(-1)[11], x.view(-1)[20] = math.nan, math.inf, -math.inf
    decoded = JpegAct("optL").decode(JpegAct("optL").encode(x))
    finite = x.isfinite()
    assert bit_equal(decoded[~finite], x[~finite])
    assert float((decoded - x)[finite].double().square().mean()) < 0.02


def test_channels_are_scaled_one_by_one() -> None:
    """A channel that is a thousand times smaller has a thousand times smaller error; of rows, a feature."""
    x = torch.randn(4, 2, 16, 16)
    x[:, 1] *= 1e-3
    error = (JpegAct().decode(JpegAct().encode(x)) - x).square().mean((0, 2, 3)).sqrt()
    assert float(error[1] / error[0]) == pytest.approx(1e-3, rel=0.3)
    rows = torch.randn(50, 2) * torch.tensor([1.0, 1e-3])
    error = (JpegAct().decode(JpegAct().encode(rows)) - rows).square().mean(0).sqrt()
    assert float(error[1] / error[0]) == pytest.approx(1e-3, rel=0.5)


def test_small_maps_and_rows_have_8_bits() -> None:
    """Half a step of 1/127 of the largest magnitude, with nearest rounding."""
    for shape in ((3, 2, 7, 7), (3, 2, 4, 20), (10, 30), (2, 5, 6)):
        x = torch.randn(shape)
        decoded = JpegAct(rounding="nearest").decode(JpegAct(rounding="nearest").encode(x))
        assert float((decoded - x).abs().max()) <= 0.5 / 127 * float(x.abs().max()) * 1.001


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e30], ids=str)
def test_any_scale(scale: float) -> None:
    x = torch.randn(2, 3, 16, 16) * scale
    decoded = JpegAct("optL").decode(JpegAct("optL").encode(x)).double() / scale
    assert float((decoded - x.double() / scale).square().mean()) < 0.05


def test_channels_of_zeros_stay_zeros() -> None:
    x = torch.randn(2, 3, 9, 9)
    x[:, 1] = 0
    assert not JpegAct().decode(JpegAct().encode(x))[:, 1].any()


def test_the_coder_changes_sizes_alone() -> None:
    x = smooth(2, 40, 5, 5)
    payloads = [JpegAct(coder=coder).encode(x, seed=9) for coder in ("blocks", "rans")]
    assert bit_equal(*(JpegAct().decode(payload) for payload in payloads))
    assert payloads[1].nbytes < payloads[0].nbytes
    assert {band["coder"] for band in payloads[1].meta["bands"]} == {"rans", "blocks"}


def test_faithful_clips_and_shrinks() -> None:
    """The largest values are clipped at 127/144, and truncation takes energy away; ours keeps both."""
    x = torch.randn(4, 4, 32, 32)
    ours = JpegAct().decode(JpegAct().encode(x))
    published = JpegAct(faithful=True).decode(JpegAct(faithful=True).encode(x))
    energy = x.square().sum()
    assert float((ours * x).sum() / energy) == pytest.approx(1, abs=0.01)
    assert float((published * x).sum() / energy) < 0.95
    rows = torch.full((4, 4), 2.0)
    assert float(JpegAct(faithful=True).decode(JpegAct(faithful=True).encode(rows)).max()) == pytest.approx(
        2 * 127 / 144
    )


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match="unknown table of jpeg_act 'opth'; known: optH, optL"):
        JpegAct("opth")
    with pytest.raises(UnknownNameError, match="unknown rounding 'truncate'; known: dither, nearest"):
        JpegAct(rounding="truncate")
    with pytest.raises(UnknownNameError, match="unknown coder 'huffman'"):
        JpegAct(coder="huffman")
