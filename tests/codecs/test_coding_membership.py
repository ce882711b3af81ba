"""Stand-ins against autograd itself: the gradient from the class of an element is the gradient from the element.

Bit for bit, at the thresholds, next to them, at zeros of both signs, infinities and NaN. NaN is laid down 41 times in
a row, to pass through the vector part of torch's CPU kernels and through their tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from codec_cases import DTYPES as EVERY_DTYPE
from codec_cases import bit_equal
from swapped_saves import run
from torch import Tensor

from lowtide.codecs import Codec, create
from lowtide.coding import membership
from lowtide.errors import DtypeError, UnknownNameError
from lowtide.records import Membership, Need

# Name: the op, the field it saves, its thresholds. All thresholds here are exact in every float type.
OPS: dict[str, tuple[Callable[[Tensor], Tensor], str, tuple[float, ...]]] = {
    "relu": (F.relu, "result", (0.0,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.25), "self", (0.0,)),
    "leaky_relu_steep": (lambda x: F.leaky_relu(x, 3.0), "self", (0.0,)),
    "threshold": (lambda x: F.threshold(x, 0.5, 7.0), "self", (0.5,)),
    "threshold_negative": (lambda x: F.threshold(x, -0.75, 7.0), "self", (-0.75,)),
    "hardtanh": (F.hardtanh, "self", (-1.0, 1.0)),
    "hardtanh_one_sided": (lambda x: F.hardtanh(x, 0.25, 0.75), "self", (0.25, 0.75)),
    "relu6": (F.relu6, "self", (0.0, 6.0)),
    "clamp_min_only": (lambda x: x.clamp(min=0.5), "self", (0.5,)),
    "clamp_max_only": (lambda x: x.clamp(max=-0.5), "self", (-0.5,)),
    "clamp": (lambda x: x.clamp(-0.5, 0.75), "self", (-0.5, 0.75)),
    "clamp_min": (lambda x: x.clamp_min(-0.25), "self", (-0.25,)),
    "clamp_max": (lambda x: x.clamp_max(0.25), "self", (0.25,)),
    "clamp_point": (lambda x: x.clamp(0.5, 0.5), "self", (0.5,)),
    "clamp_infinite": (lambda x: x.clamp(-math.inf, math.inf), "self", ()),
    "hardsigmoid": (F.hardsigmoid, "self", (-3.0, 3.0)),
    "hardshrink": (F.hardshrink, "self", (-0.5, 0.5)),
    "hardshrink_zero": (lambda x: F.hardshrink(x, 0.0), "self", (0.0,)),
    "softshrink": (F.softshrink, "self", (-0.5, 0.5)),
    "softshrink_wide": (lambda x: F.softshrink(x, 2.0), "self", (-2.0, 2.0)),
    "abs": (torch.abs, "self", (0.0,)),
}
# The gradient of these at NaN is undefined: torch's own CPU kernels give 0 in their vector part and pass the gradient
# in their tail, so what an element gets depends on where it lies, and no class of it could say.
UNDEFINED_AT_NAN = ("hardtanh", "relu6", "hardshrink", "softshrink")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_mask(need: Need) -> Codec:
    assert need.membership is not None, f"not a question of membership: {need}"
    question = need.membership
    return create("bitmask", test=question.test, params=question.params, values=question.values)


def points_near(thresholds: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """The thresholds rounded to ``dtype``, their neighbours, zeros, extremes, infinities and 50 ordinary values."""
    at = torch.tensor([*thresholds, 0.0], dtype=torch.float64).to(dtype)
    info, top = torch.finfo(dtype), torch.tensor(math.inf, dtype=dtype)
    ends = [0.0, -0.0, info.max, info.min, info.smallest_normal, -info.smallest_normal, math.inf, -math.inf]
    near = [at, -at, torch.nextafter(at, top), torch.nextafter(at, -top), torch.tensor(ends, dtype=dtype)]
    return torch.cat([*near, (torch.randn(50) * 3).to(dtype)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_the_gradient_is_that_of_the_original(name: str, dtype: torch.dtype, device: str) -> None:
    op, field, thresholds = OPS[name]
    x = points_near(thresholds, dtype).to(device)
    swapped = run(op, x, make_mask, field)
    assert bit_equal(swapped.got, swapped.expected), _differences(x, swapped.expected, swapped.got)
    two_classes = name.split("_")[0] in ("relu", "leaky", "threshold", "clamp", "hardsigmoid")
    assert swapped.codec.encode(swapped.saved).nbytes <= -(-x.numel() * (1 if two_classes else 2) // 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith(UNDEFINED_AT_NAN)])
def test_the_gradient_at_nan_is_that_of_the_original(name: str, device: str) -> None:
    op, field, _ = OPS[name]
    for dtype in DTYPES:
        x = torch.full((41,), math.nan, dtype=dtype, device=device)
        x[1::2] *= -1
        swapped = run(op, x, make_mask, field)
        assert bit_equal(swapped.got, swapped.expected), _differences(x, swapped.expected, swapped.got)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("op", "thresholds"),
    [
        (lambda x: F.threshold(x, 0.1, 7.0), (0.1,)),
        (lambda x: F.threshold(x, -0.3, 7.0), (-0.3,)),
        (lambda x: F.hardtanh(x, -0.1, 0.7), (-0.1, 0.7)),
        (lambda x: F.hardtanh(x, 0.3, 0.9), (0.3, 0.9)),
        (lambda x: x.clamp(-0.1, 0.3), (-0.1, 0.3)),
        (lambda x: x.clamp(min=0.7), (0.7,)),
        (lambda x: F.hardshrink(x, 0.1), (-0.1, 0.1)),
        (lambda x: F.softshrink(x, 0.3), (-0.3, 0.3)),
    ],
    ids=["threshold", "threshold_negative", "hardtanh", "hardtanh_positive", "clamp", "clamp_min", "hardsh", "softsh"],
)
def test_thresholds_that_the_dtype_rounds(
    op: Callable[[Tensor], Tensor], thresholds: tuple[float, ...], dtype: torch.dtype, device: str
) -> None:
    """Some kernels round the threshold to the dtype, some compare in float32; to refuse (DtypeError) is right too."""
    x = points_near(thresholds, dtype).to(device)
    try:
        swapped = run(op, x, make_mask, "self")
    except DtypeError:
        return
    assert bit_equal(swapped.got, swapped.expected), _differences(x, swapped.expected, swapped.got)


@pytest.mark.parametrize("op", [lambda x: x.clamp(0.5, -0.5), lambda x: F.hardshrink(x, -0.5)], ids=["clamp", "shrink"])
def test_an_empty_interval_has_no_stand_in_and_is_refused(op: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(DtypeError, match=r"bitmask [a-z_]+\(.*\) cannot stand in for torch.float32: keep this tensor"):
        run(op, torch.randn(20), make_mask, "self")


def test_a_dropout_mask_comes_back_exactly() -> None:
    for scale in (2.0, 1 / 0.9, 1.25):
        for dtype in (torch.float32, torch.float64):
            mask = (torch.rand(999, dtype=dtype) < 0.5) * torch.tensor(scale, dtype=dtype)
            other = float(mask.max())
            codec = create("bitmask", test="two_valued", params=(other,), values=(0.0, other))
            encoded = codec.encode(mask)
            assert encoded.nbytes == 125
            assert bit_equal(codec.decode(encoded), mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", sorted(membership.TESTS))
def test_stand_ins_fall_into_the_classes_they_stand_for(name: str, dtype: torch.dtype) -> None:
    params = {"truth": None, "sign": (), "not_le": (0.5,), "gt": (0.5,), "two_valued": (2.0,)}.get(name, (-1.0, 1.0))
    if params is None:
        assert membership.stands(Membership("truth", (), (0.0, 1.0)), torch.bool)
        return
    pool = torch.tensor([0.0, 0.25, 1.0, 2.0, -2.0, math.nan], dtype=torch.float64)
    classes = membership.classify(pool, Membership(name, params, ())).tolist()
    values = tuple(float(pool[classes.index(group)]) for group in range(max(classes) + 1))
    assert membership.stands(Membership(name, params, values), dtype)
    assert not membership.stands(Membership(name, params, values[::-1]), dtype)


def test_bitmask_takes_booleans_or_the_four_floats_that_compute() -> None:
    """float8 has no comparisons, and no op saves it for a question of membership."""
    taken = {dtype for dtype in EVERY_DTYPE if create("bitmask", test="not_le", params=(0.0,)).accepts(dtype)}
    assert taken == {torch.float32, torch.float16, torch.bfloat16, torch.float64}
    assert {dtype for dtype in EVERY_DTYPE if create("bitmask").accepts(dtype)} == {torch.bool}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "params"),
    [("not_le", (0.3,)), ("not_le", (-0.1,)), ("not_saturated", (0.1, 0.3)), ("not_saturated", (-0.3, 0.7))],
)
def test_sixteen_bits_are_compared_with_thresholds_that_are_not_rounded(
    name: str, params: tuple[float, ...], dtype: torch.dtype
) -> None:
    """Each threshold rounded to the dtype lies beside the threshold and belongs to the side it lies on."""
    x = torch.tensor(params, dtype=torch.float64).to(dtype)
    expected = [not value <= params[0] and not (len(params) > 1 and value >= params[1]) for value in x.tolist()]
    assert membership.classify(x, Membership(name, params, ())).bool().tolist() == expected


def test_a_stand_in_that_rounding_moves_is_refused() -> None:
    """0.50001 is inside (0.5, 1) until fp16 rounds it onto the edge."""
    codec = create("bitmask", test="inside_open", params=(0.5, 1.0), values=(0.0, 0.50001))
    assert [codec.accepts(dtype) for dtype in (torch.float64, torch.float32, torch.float16)] == [True, True, False]
    with pytest.raises(DtypeError, match=r"bitmask inside_open\(0.5, 1.0\) cannot stand in for torch.float16"):
        codec.encode(torch.zeros(3, dtype=torch.float16))


def test_an_unknown_test_is_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown membership test 'not_lee'; known: .*Did you mean 'not_le'\?"):
        membership.classify(torch.zeros(1), Membership("not_lee", (0.0,), (0.0, 1.0)))


def _differences(x: Tensor, expected: Tensor, got: Tensor) -> str:
    rows = [(a, b, c) for a, b, c in zip(x.tolist(), expected.tolist(), got.tolist(), strict=True) if b != c]
    return f"(x, gradient of the original, gradient of the stand-in): {rows[:5]} and {max(len(rows) - 5, 0)} more"
