"""What a user may say about error, what is refused, and the statistics against numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lowtide.bounds import CONSTANT, UNITS, BoundRule
from lowtide.errors import BoundError, UnknownNameError
from lowtide.records import Bound, Kind, Need, Per, TensorSpec

STATISTICS: dict[str, Callable[[np.ndarray], float]] = {
    "std": lambda values: float(values.std()) if values.size else 0.0,
    "range": lambda values: float(values.max() - values.min()) if values.size else 0.0,
    "absmax": lambda values: float(np.abs(values).max()) if values.size else 0.0,
}
NEEDS = {
    "tensor": Need(Kind.VALUES, ""),
    "channel": Need(Kind.VALUES, "", per=Per.CHANNEL),
    "row": Need(Kind.VALUES, "", per=Per.ROW),
    "row_of_two": Need(Kind.VALUES, "", per=Per.ROW, row_dims=2),
    "sample_channel": Need(Kind.VALUES, "", per=Per.SAMPLE_CHANNEL),
}


def expected(x: Tensor, axes: tuple[int, ...], unit: str) -> np.ndarray:
    """The statistic of the finite non-zero values of every slice, one slice at a time."""
    values = x.double().numpy()
    table = np.zeros([x.shape[axis] for axis in axes])
    for index in np.ndindex(*table.shape):
        chosen: list[Any] = [slice(None)] * x.dim()
        for axis, at in zip(axes, index, strict=True):
            chosen[axis] = at
        part = values[tuple(chosen)]
        table[index] = STATISTICS[unit](part[np.isfinite(part) & (part != 0)])
    return table


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (0.01, BoundRule(0.01)),
        (1, BoundRule(1.0)),
        ("0.01", BoundRule(0.01)),
        (" 1e-3 ", BoundRule(1e-3)),
        ("0.01 absolute", BoundRule(0.01)),
        ("0.4 std", BoundRule(0.4, "std")),
        ("0.4   std ", BoundRule(0.4, "std")),
        ("2 range", BoundRule(2.0, "range")),
        ({"absmax": 0.5}, BoundRule(0.5, "absmax")),
        ({"std": "0.4"}, BoundRule(0.4, "std")),
        (BoundRule(3.0, "std"), BoundRule(3.0, "std")),
        ("0.12345678901234567 std", BoundRule(0.12345678901234567, "std")),
        (1e-300, BoundRule(1e-300)),
    ],
    ids=str,
)
def test_parse_reads_numbers_units_and_mappings(text: Any, rule: BoundRule) -> None:
    assert BoundRule.parse(text) == rule
    assert BoundRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (0, r"bound must be finite and greater than zero, got 0\.0"),
        ("0 std", r"bound must be finite and greater than zero, got 0\.0"),
        (-0.1, r"bound must be finite and greater than zero, got -0\.1"),
        ({"std": -2}, r"bound must be finite and greater than zero, got -2\.0"),
        (math.nan, "bound must be finite and greater than zero, got nan"),
        ("inf", "bound must be finite and greater than zero, got inf"),
        ("1e400 std", "bound must be finite and greater than zero, got inf"),
        ("much", r"cannot read 'much' as a bound; write a number, or one with a unit: '0\.4 std'"),
        ("std 0.4", "cannot read 'std 0.4' as a bound"),
        ("0.4std", "cannot read '0.4std' as a bound"),
        ("", "cannot read '' as a bound"),
        (None, "cannot read None as a bound"),
        ({"std": None}, r"cannot read \{'std': None\} as a bound"),
        ({0.4: "std"}, r"cannot read \{0\.4: 'std'\} as a bound"),
        (
            {"std": 0.4, "range": 0.1},
            r"a bound has one unit, as in \{'std': 0\.4\}; got \{'std': 0\.4, 'range': 0\.1\}",
        ),
        ({}, r"a bound has one unit, as in \{'std': 0\.4\}; got \{\}"),
    ],
    ids=str,
)
def test_parse_refuses_what_is_not_a_bound(text: Any, message: str) -> None:
    with pytest.raises(BoundError, match=message):
        BoundRule.parse(text)


@pytest.mark.parametrize("text", ["0.4 sdt", {"sdt": 0.4}])
def test_an_unknown_unit_is_refused_with_the_known_ones(text: Any) -> None:
    message = r"unknown unit of a bound 'sdt'; known: absmax, absolute, probability, range, std\. Did you mean 'std'\?"
    with pytest.raises(UnknownNameError, match=message):
        BoundRule.parse(text)
    with pytest.raises(UnknownNameError, match="unknown unit of a bound 'std range'"):
        BoundRule.parse("0.4 std range")
    with pytest.raises(
        UnknownNameError, match=r"unknown unit of a bound '0\.4'; known: absmax, absolute, probability, range, std"
    ):
        BoundRule.parse({0.4: 1})


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_rule_cannot_be_built_wrongly_either(value: float) -> None:
    with pytest.raises(BoundError, match="bound must be finite and greater than zero"):
        BoundRule(value, "std")


def std_of_all(x: Tensor, axes: tuple[int, ...]) -> Any:
    """Of every value of a row; none where one is not finite."""
    over = tuple(axis for axis in range(x.dim()) if axis not in axes)
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(x.double().numpy().std(over), nan=0.0)


@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "zeros_and_nan"])
@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("unit", sorted(STATISTICS))
def test_statistics_are_those_of_numpy_in_float64(unit: str, need: str, zeros: bool) -> None:
    """Values all above 1 for half of the channels, so that a zero taken for a value would show in range and std."""
    x = torch.randn(3, 4, 5, 6) * 3
    x[:, ::2] = x[:, ::2].abs() + 1
    if zeros:
        x[torch.rand(x.shape) < 0.4] = 0.0
        x[torch.rand(x.shape) < 0.05] = math.nan
        x[torch.rand(x.shape) < 0.05] = -math.inf
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        values = x.to(dtype)
        bound = BoundRule(0.5, unit).resolve(values, NEEDS[need])
        assert bound.axes == NEEDS[need].axes(4)
        assert bound.value.dtype == torch.float64
        bound.check_shape(TensorSpec.of(values))
        by_row = unit == "std" and 0 in bound.axes
        wanted = std_of_all(values, bound.axes) if by_row else expected(values, bound.axes, unit)
        # Of 16-bit rows the deviation itself has 16 bits.
        precision = 2.0**-8 if by_row and dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(bound.value.numpy(), 0.5 * wanted, rtol=precision)


@pytest.mark.parametrize("scale", [1e-25, 1e-3, 1e3, 1e25])
@pytest.mark.parametrize("unit", sorted(STATISTICS))
def test_statistics_hold_at_any_scale(unit: str, scale: float) -> None:
    """A bound of zero would be safe, but stores everything exactly."""
    x = torch.randn(4, 300) * scale
    bound = BoundRule(1.0, unit).resolve(x, NEEDS["tensor"])
    np.testing.assert_allclose(bound.value.numpy(), expected(x, (), unit), rtol=1e-5)


def test_a_large_mean_does_not_drown_the_spread() -> None:
    x = torch.randn(10_000, dtype=torch.float64).float() + 1000
    bound = BoundRule(1.0, "std").resolve(x, NEEDS["tensor"])
    np.testing.assert_allclose(bound.value.numpy(), expected(x, (), "std"), rtol=1e-3)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 4), (1, 1), (), (7,)], ids=str)
@pytest.mark.parametrize("need", NEEDS)
def test_any_shape_gets_a_bound_that_fits_it(unit: str, shape: tuple[int, ...], need: str) -> None:
    x = torch.randn(shape)
    bound = BoundRule(0.5, unit).resolve(x, NEEDS[need])
    bound.check_shape(TensorSpec.of(x))
    assert bool((bound.value >= 0).all())
    if unit not in CONSTANT:
        np.testing.assert_allclose(bound.value.numpy(), 0.5 * expected(x, bound.axes, unit), rtol=1e-5)


@pytest.mark.parametrize(("fill", "absmax"), [(2.5, 2.5), (0.0, 0.0), (math.nan, 0.0), (math.inf, 0.0)])
def test_constant_and_hopeless_tensors_give_zero(fill: float, absmax: float) -> None:
    x = torch.full((4, 8), fill)
    for unit, value in {"std": 0.0, "range": 0.0, "absmax": absmax}.items():
        for need in NEEDS.values():
            assert BoundRule(1.0, unit).resolve(x, need).value.unique().tolist() == [value]


def test_range_is_that_of_what_is_not_zero() -> None:
    """ReLU leaves many zeros: values from 5 to 7 beside them span 2, not 7. Nor do NaN and infinity count."""
    x = torch.tensor([[0.0, 5.0, 7.0, 0.0], [-5.0, 0.0, -7.0, math.nan], [0.0, math.inf, 3.0, -math.inf], [0.0] * 4])
    assert BoundRule(1.0, "range").resolve(x, NEEDS["row"]).value.tolist() == [2.0, 2.0, 0.0, 0.0]
    assert BoundRule(1.0, "range").resolve(x, NEEDS["tensor"]).value.item() == 14.0


def test_a_statistic_that_overflows_promises_nothing() -> None:
    x = torch.tensor([3e38, -3e38])
    assert BoundRule(1.0, "range").resolve(x, NEEDS["tensor"]).value.item() == 0.0


def test_an_absolute_rule_is_the_same_everywhere() -> None:
    bound = BoundRule(0.25).resolve(torch.randn(3, 4, 5), NEEDS["sample_channel"])
    assert (bound.axes, bound.value.tolist()) == ((0, 1), [[0.25] * 4] * 3)


@pytest.mark.parametrize("value", [0.0, -1e-9, math.nan, math.inf, [1.0, 0.0], [1.0, math.nan]])
def test_a_stated_bound_must_be_finite_and_positive(value: Any) -> None:
    axes = (0,) if isinstance(value, list) else ()
    with pytest.raises(BoundError, match="bound must be finite and greater than zero, got "):
        Bound.absolute(torch.tensor(value), axes)


def test_a_stated_bound_has_one_number_per_index() -> None:
    with pytest.raises(BoundError, match=r"bound has shape \(3,\) but 0 axes \(\): one number per index"):
        Bound.absolute(torch.ones(3))
    with pytest.raises(BoundError, match=r"bound has shape \(\) but 1 axes \(1,\)"):
        Bound.absolute(0.1, (1,))
    assert Bound.absolute(0.1).value.dtype == torch.float64
    assert Bound.absolute([0.1, 0.2], (1,)).value.tolist() == [0.1, 0.2]


def test_a_bound_has_to_fit_its_tensor() -> None:
    spec = TensorSpec.of(torch.zeros(2, 3))
    for axis in (2, -1):
        with pytest.raises(BoundError, match=rf"bound axes \({axis},\) do not exist in a tensor of shape \(2, 3\)"):
            Bound.absolute(torch.ones(3), (axis,)).check_shape(spec)
    message = r"bound of shape \(2,\) along axes \(1,\) does not fit a tensor of shape \(2, 3\): expected \(3,\)"
    with pytest.raises(BoundError, match=message):
        Bound.absolute(torch.ones(2), (1,)).check_shape(spec)
    Bound.absolute(torch.ones(3), (1,)).check_shape(spec)


def test_the_statistics_of_a_large_tensor_are_those_of_evenly_spaced_entries() -> None:
    x = torch.randn(64, 3, 300, 300)
    for need in ("tensor", "channel"):
        bound = BoundRule(1.0, "std").resolve(x, NEEDS[need])
        assert torch.equal(bound.value, BoundRule(1.0, "std").resolve(x[::4].clone(), NEEDS[need]).value)
        np.testing.assert_allclose(bound.value.numpy(), 1.0, rtol=0.01)
