"""cusz: the bound over everything that sz is tried on, and that neither prediction nor coder changes a value."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from codec_cases import bit_equal, same_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec_sz_properties import Example, examples
from torch import Tensor

from lowtide.codecs.cusz import CuSz
from lowtide.errors import BoundError, UnknownNameError
from lowtide.records import Bound


def smooth(*shape: int) -> Tensor:
    """Maps that change little from one pixel to the next."""
    return F.interpolate(torch.randn(shape), scale_factor=8, mode="bicubic")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(examples(), st.sampled_from(["auto", "lorenzo", "none"]))
def test_every_promise_of_cusz(example: Example, prediction: str) -> None:
    """No slack: in float64, against the bound of each element."""
    rounding = "dither" if example.codec.rounding == "dither" else "nearest"
    codec = CuSz(rounding=rounding, prediction=prediction)
    encoded = codec.encode(example.x, example.bound, seed=example.seed)
    decoded = codec.decode(encoded)
    assert same_geometry(decoded, example.x)
    finite = example.x.isfinite()
    error = (decoded.double() - example.x.double()).abs()
    assert bool((error <= example.promised)[finite].all())
    assert bit_equal(decoded[~finite], example.x[~finite])
    if codec.rounding == "nearest":
        assert bool((decoded == 0)[example.x == 0].all())
    assert bit_equal(codec.decode(encoded), decoded)


@pytest.mark.parametrize("rounding", ["nearest", "dither"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prediction_and_coder_change_sizes_alone(rounding: str, dtype: torch.dtype) -> None:
    x = smooth(2, 8, 6, 6).to(dtype)
    sizes = {}
    values = []
    for prediction in ("lorenzo", "none", "auto"):
        for coder in ("blocks", "rans"):
            codec = CuSz(rounding, prediction, coder)
            encoded = codec.encode(x, Bound.absolute(0.05), seed=3)
            sizes[prediction, coder] = encoded.nbytes
            values.append(codec.decode(encoded))
    assert all(bit_equal(value, values[0]) for value in values)
    assert sizes["lorenzo", "rans"] < 0.8 * sizes["none", "rans"]
    assert sizes["auto", "blocks"] == sizes["lorenzo", "blocks"] > sizes["lorenzo", "rans"]


def test_maps_without_smoothness_are_not_predicted() -> None:
    """Noise behind a ReLU: a prediction would turn zeros into something."""
    encoded = CuSz().encode(torch.randn(4, 8, 16, 16).relu(), Bound.absolute(0.3))
    assert encoded.meta["predicted"] is False
    assert CuSz().encode(smooth(2, 8, 6, 6), Bound.absolute(0.05)).meta["predicted"] is True


def test_a_bound_for_each_channel_is_kept_in_every_layout() -> None:
    bound = Bound.absolute(torch.tensor([0.5, 0.01, 0.1]), (1,))
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 9, 9).contiguous(memory_format=memory_format)
        decoded = CuSz().decode(CuSz().encode(x, bound))
        worst = (decoded.double() - x.double()).abs().amax((0, 2, 3))
        assert bool((worst <= bound.value).all()) and bool((worst > 0.8 * bound.value).all())


def test_channels_under_a_bound_of_zero_are_exact_and_zeros_cost_nothing() -> None:
    """The standard deviation of a dead channel is zero; its zeros have code 0 like any other."""
    x = torch.randn(4, 8, 16, 16)
    x[:, 0] = 0.0
    value = torch.full((8,), 0.1, dtype=torch.float64)
    value[0] = 0.0
    encoded = CuSz().encode(x, Bound(value, (1,)))
    assert encoded.tensors["escape_index"].numel() == 0
    assert not CuSz().decode(encoded)[:, 0].any()
    x[:, 0] = 0.3
    encoded = CuSz().encode(x, Bound(value, (1,)))
    assert encoded.tensors["escape_index"].numel() == 4 * 256
    assert bool((CuSz().decode(encoded)[:, 0] == 0.3).all())


def test_what_would_be_mostly_escapes_is_stored_as_it_is() -> None:
    x = torch.randn(1000)
    encoded = CuSz().encode(x, Bound.absolute(1e-9))
    assert encoded.meta["kind"] == "raw" and encoded.nbytes == x.nbytes
    assert bit_equal(CuSz().decode(encoded), x)


def test_nan_payloads_survive() -> None:
    x = torch.randn(64)
    x.view(torch.int32)[5] = 0x7FC12345
    x[9] = -math.inf
    decoded = CuSz().decode(CuSz().encode(x, Bound.absolute(0.1)))
    assert decoded.view(torch.int32)[5] == 0x7FC12345 and decoded[9] == -math.inf


def test_dither_is_unbiased_and_nearest_is_not() -> None:
    """Mean error over 60 seeds and 2000 elements: 0.1 / sqrt(3 * 120,000) = 0.00017."""
    x = torch.full((2000,), 0.03)
    error = {}
    for rounding in ("dither", "nearest"):
        codec = CuSz(rounding)
        decoded = [codec.decode(codec.encode(x, Bound.absolute(0.1), seed=seed)) for seed in range(60)]
        error[rounding] = float((torch.stack(decoded).double() - x.double()).mean().abs())
    assert error["dither"] < 7e-4 < 0.02 < error["nearest"]


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown prediction 'lorentz'; known: auto, lorenzo, none"):
        CuSz(prediction="lorentz")
    with pytest.raises(UnknownNameError, match="unknown rounding 'down'"):
        CuSz("down")
    with pytest.raises(UnknownNameError, match="unknown coder 'auto'"):
        CuSz(coder="auto")
    with pytest.raises(BoundError, match="does not fit a tensor of shape"):
        CuSz().encode(torch.randn(2, 3), Bound.absolute(torch.ones(2), (1,)))
