"""Bounds through the hooks, where a naive quantiser breaks its own: float32, bfloat16, infinities and NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import lowtide


@pytest.fixture
def saved(build, node):
    """``saved(h, bound)``: what the backward of tanh's neighbour gets for an activation h, coded under that bound."""

    def run(h: torch.Tensor, bound: object) -> torch.Tensor:
        model = build(lambda self, x: torch.sin(x + self.shift))
        model.shift = nn.Parameter(torch.zeros((), dtype=h.dtype))
        session = lowtide.attach(model, "fixed", pointwise=bound, check="full")
        output = model(h)
        assert [entry.codec for entry in session.report().sites] == ["sz"]
        return node(output, "SinBackward0")._saved_self

    return run


@pytest.mark.parametrize("bound", [1e-3, 1e-5])
def test_float32_arithmetic_does_not_break_the_bound(saved, bound):
    """Surprise 29: ``round(x / 2e) * 2e`` misses its bound by rounding, for one value in some hundred thousand."""
    h = torch.randn(1 << 20) * 8
    naive = (torch.round(h / (2 * bound)) * (2 * bound)).double() - h.double()
    assert (naive.abs() > bound).any()  # that this data shows it
    assert ((saved(h, bound).double() - h.double()).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_cast_back_does_not_break_the_bound(saved, dtype):
    """Surprise 30: rounding the decoded value to 16 bits can move it by more than the bound itself."""
    h, bound = (torch.randn(1 << 18) * 8).to(dtype), 1e-2
    naive = (torch.round(h.float() / (2 * bound)) * (2 * bound)).to(dtype)
    assert ((naive.double() - h.double()).abs() > bound).any()
    assert ((saved(h, bound).double() - h.double()).abs() <= bound).all()


def test_what_no_code_can_stand_for_comes_back_bit_for_bit(saved):
    """Surprise 31: inf, NaN and huge values turn into INT_MIN codes without a word."""
    h, bound = torch.randn(4096), 1e-2
    odd = torch.tensor([math.inf, -math.inf, math.nan, 1e38, -1e38, 3.4e38, 1e9])
    h[::64][: len(odd)] = odd
    decoded = saved(h, bound)
    strange = ~h.isfinite() | (h.abs() > 1e8)
    assert torch.equal(decoded[strange].view(torch.int32), h[strange].view(torch.int32))
    assert ((decoded[~strange].double() - h[~strange].double()).abs() <= bound).all()


@pytest.mark.parametrize("unit", ["std", "range", "absmax"])
def test_one_nan_does_not_poison_a_relative_bound(saved, unit):
    """Surprise 31: the statistic that sets the bound is one of the finite values."""
    h = torch.randn(4096)
    clean = saved(h, f"0.01 {unit}")
    h[7], h[9] = math.nan, math.inf
    dirty = saved(h, f"0.01 {unit}")
    limit = 0.01 * {"std": h[10:].std(), "range": h[10:].max() - h[10:].min(), "absmax": h[10:].abs().max()}[unit]
    assert ((clean - h)[10:].abs() <= 1.1 * limit).all()
    assert ((dirty - h)[10:].abs() <= 1.1 * limit).all()
    assert not torch.equal(dirty[10:], h[10:])  # still coded


def test_zeros_stay_zeros(saved):
    h = torch.randn(4096).relu()
    assert torch.equal(saved(h, 0.3) == 0, h == 0)


def test_a_constant_tensor_has_no_spread_and_comes_back_exact(saved):
    h = torch.full((4096,), 1.2345)
    assert torch.equal(saved(h, "0.4 std"), h)
