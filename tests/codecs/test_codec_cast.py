"""``cast``: the error its docstring states, and what happens where the narrow type has no room."""

from __future__ import annotations

import math
import re

import pytest
import torch
from codec_cases import bit_equal, bits

from lowtide.codecs.cast import Cast
from lowtide.records import Encoded

TARGETS = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# Half a unit in the last place of a significand of 8, 4 and 3 bits, relative to the power of two below the value.
ROUNDING = {"bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
WIDE = [torch.float32, torch.float64]


def scale_of(encoded: Encoded) -> float:
    return 2.0 ** int(encoded.tensors["exponent"])


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 7e4, 1e30])
def test_error_is_half_a_unit_of_the_target_or_half_its_smallest_step(
    to: str, scale: float, dtype: torch.dtype
) -> None:
    x = (torch.randn(4000, dtype=torch.float64) * scale * 10 ** (-6 * torch.rand(4000))).to(dtype)
    encoded = Cast(to).encode(x)
    error = (Cast(to).decode(encoded).double() - x.double()).abs()
    info = torch.finfo(TARGETS[to])
    smallest_step = info.smallest_normal * info.eps * scale_of(encoded)
    allowed = torch.maximum(x.double().abs() * ROUNDING[to], torch.tensor(smallest_step / 2, dtype=torch.float64))
    assert bool((error <= allowed).all())
    assert encoded.nbytes == x.numel() * TARGETS[to].itemsize + 4


def test_the_docstring_states_an_error_that_holds() -> None:
    """Its three figures, in order, against the worst value: just above a power of two plus half a unit."""
    stated = [2.0 ** -int(figure) for figure in re.findall(r"2\*\*-(\d+)", Cast.__doc__ or "")[:3]]
    assert len(stated) == 3
    for to, share in zip(TARGETS, stated, strict=True):
        x = torch.tensor([1 + ROUNDING[to], 1 + 3 * ROUNDING[to], 1.9])
        error = (Cast(to).decode(Cast(to).encode(x)).double() - x.double()).abs()
        assert bool((error <= x.double() * share).all()), f"{to}: stated {share} |x|, seen {(error / x).max().item()}"


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("peak", [5e-324, 1e-300, 1e-45, 1e-38, 1e38, 1e300])
def test_the_ends_of_float64_keep_their_relative_error(to: str, peak: float) -> None:
    """bf16 has float32's range: below it everything is rounded to zero, above it stored apart."""
    x = torch.tensor([peak, -peak / 2, 0.0], dtype=torch.float64)
    decoded = Cast(to).decode(Cast(to).encode(x))
    if to == "bf16" and peak < 1e-37:
        assert bool(((decoded - x).abs() <= 2.0**-134).all())
    else:
        assert bool(((decoded - x).abs() <= x.abs() * ROUNDING[to]).all())


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("to", TARGETS)
def test_what_the_target_cannot_hold_is_restored_bit_for_bit(to: str, dtype: torch.dtype) -> None:
    x = torch.randn(100).to(dtype)
    x[[1, 50, 99]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype)
    decoded = Cast(to).decode(Cast(to).encode(x))
    assert torch.equal(bits(decoded[~x.isfinite()]), bits(x[~x.isfinite()]))
    assert bool(decoded[x.isfinite()].isfinite().all())


def test_a_value_that_bf16_would_round_to_infinity_is_stored_apart() -> None:
    x = torch.tensor([1.0, torch.finfo(torch.float32).max, torch.finfo(torch.float32).min])
    encoded = Cast("bf16").encode(x)
    assert encoded.tensors["escape_index"].tolist() == [1, 2]
    assert bit_equal(Cast("bf16").decode(encoded), x)


@pytest.mark.parametrize("to", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_value_that_decodes_to_infinity_is_stored_apart(to: str, dtype: torch.dtype) -> None:
    """fp8 is scaled, so it holds the largest value rounded up to a power of two, which the wide dtype cannot."""
    x = torch.tensor([torch.finfo(dtype).max, 1.0, torch.finfo(dtype).min, torch.finfo(dtype).max / 2], dtype=dtype)
    encoded = Cast(to).encode(x)
    decoded = Cast(to).decode(encoded)
    assert encoded.tensors["escape_index"].tolist() == [0, 2]
    assert bit_equal(decoded[[0, 2]], x[[0, 2]])
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("values", [[], [0.0], [1.5, -300.0], [math.nan]])
def test_a_payload_has_the_same_parts_whatever_it_holds(to: str, values: list[float]) -> None:
    """bf16 is not scaled: its exponent is there and zero."""
    encoded = Cast(to).encode(torch.tensor(values))
    assert list(encoded.tensors) == ["values", "exponent", "escape_index", "escape_value"]
    dtypes = [part.dtype for part in encoded.tensors.values()]
    assert dtypes == [TARGETS[to], torch.int32, torch.int64, torch.float32]
    assert encoded.tensors["exponent"].numel() == 1
    assert to != "bf16" or encoded.tensors["exponent"].item() == 0


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("values", [[], [0.0, -0.0], [0.0, 5.0], [math.nan, math.inf], [math.nan, 0.0]])
def test_zeros_stay_zeros_and_nothing_else_is_needed(to: str, values: list[float]) -> None:
    x = torch.tensor(values)
    decoded = Cast(to).decode(Cast(to).encode(x))
    assert torch.equal(decoded == 0, x == 0)
    assert torch.equal(decoded.isnan(), x.isnan())


@pytest.mark.parametrize(
    ("to", "accepted"),
    [
        ("bf16", {torch.float32, torch.float64}),
        ("fp8_e4m3", {torch.float32, torch.float64, torch.float16, torch.bfloat16}),
        ("fp8_e5m2", {torch.float32, torch.float64, torch.float16, torch.bfloat16}),
    ],
)
def test_only_wider_floats_are_accepted(to: str, accepted: set[torch.dtype]) -> None:
    every = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool]
    assert {dtype for dtype in every if Cast(to).accepts(dtype)} == accepted
