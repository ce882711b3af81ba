"""The quantiser of ``sz``: its proof, tried at the values that are hardest for it, and its expectation, exactly."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch
from codec_cases import bound_of
from torch import Tensor

from lowtide.coding import dither, grid
from lowtide.coding.grid import Grid
from lowtide.records import Bound, TensorSpec

CPU = torch.device("cpu")
FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ROUNDINGS = ["dither", "nearest"]
SEED = 5
# What a step may lack of twice its bound: a mantissa of 8 bits, and room for the roundings of its dtype.
LOSS = {torch.float32: 2.0**-6, torch.float64: 2.0**-6, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-3}
# Powers of two that bounds are scaled by, from the smallest for which there is a grid to the largest.
POWERS = {torch.float32: (-98, 112), torch.bfloat16: (-98, 112), torch.float16: (-10, 9), torch.float64: (-98, 112)}


def make_grid(bound: float, dtype: torch.dtype, rounding: str) -> Grid:
    return Grid.of(Bound.absolute(bound), dtype, CPU, rounding)


def every_byte() -> Tensor:
    """Elements of stream SEED whose dither bytes are 0, 1, .. 255."""
    byte = dither.bytes_at(SEED, torch.arange(8192))
    return torch.tensor([int((byte == value).nonzero()[0]) for value in range(256)])


def shifts(made: Grid, index: Tensor) -> Tensor:
    return dither.bytes_at(SEED, index) if made.rounding == "dither" else torch.full_like(index, 128).int()


def hard_bounds(dtype: torch.dtype, rounding: str) -> list[float]:
    """The smallest bounds of steps: no room is left by the cut mantissa. Mantissas with few and with many bits; powers
    of two down to the first that have no step any more."""
    low, high = POWERS[dtype]
    hard = [bound_of(1 + mantissa / 128, dtype, rounding) for mantissa in (*range(0, 128, 9), 1, 64, 85, 127)]
    bounds = hard + [math.ldexp(bound, power) for bound in hard[::6] for power in (*range(low - 14, low + 1), high)]
    kept = [bound for bound in bounds if float(make_grid(bound, dtype, rounding).step) > 0]
    assert len(hard) < len(kept) < len(bounds), "the smallest step was not among them"
    return kept


def hard_values(made: Grid, dtype: torch.dtype, codes: list[int]) -> tuple[Tensor, Tensor]:
    """Around both ends of the interval of every code, for every dither byte, and one ulp to each side.

    Gives elements and values. In units of s the ends of code q are 256 q - b and 256 q + 255 - b, and what rounds to
    them reaches half a unit further; the float32 inverse moves that a little.
    """
    index = every_byte()
    byte = shifts(made, index).double()
    unit = float(made.step.double()) / 256
    near = [
        offset + nudge for offset in (-0.5, 0.0, 127.0, 128.0, 255.0, 255.5) for nudge in (-0.03, -1e-6, 0, 1e-6, 0.03)
    ]
    places = 256.0 * torch.tensor(codes).double().unsqueeze(1) + torch.tensor(near).double()
    x = ((places.flatten().unsqueeze(1) - byte) * unit).to(dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    x = torch.cat([(x.view(integers) + ulp).view(dtype) for ulp in (-1, 0, 1)])
    finite = x.isfinite()  # what is one below the bits of zero is not
    return index.expand(x.shape)[finite], x[finite]


def codes_of(made: Grid, x: Tensor, index: Tensor) -> Tensor:
    """floor((rint(x / s) + b) / 256), in float64, as long as it is in range."""
    units = (x.double() * made.inverse.double()).round()
    return ((units + shifts(made, index)) / 256).floor()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_codes_within_the_reach_keep_their_promise(dtype: torch.dtype, rounding: str) -> None:
    """Kernels do not compare there. Nothing near the ends of the intervals is lost, up to the last code within it."""
    reach = grid.reach(dtype)
    codes = [0, 1, -1, reach // 2, -reach // 2, reach, -reach]
    worst = 0.0
    for bound in hard_bounds(dtype, rounding):
        made = make_grid(bound, dtype, rounding)
        index, x = hard_values(made, dtype, codes)
        spec = TensorSpec.of(x)
        q, lost = made.quantise(x, index, spec, SEED)
        wanted = codes_of(made, x, index)
        inside = wanted.abs() <= reach
        assert int(inside.sum()) > x.numel() / 2
        assert not bool((lost & inside).any()), f"bound {bound!r}: {x[lost & inside][:3].tolist()}"
        assert torch.equal(q[inside].double(), wanted[inside])
        error = (made.value(q, index, spec, SEED).double() - x.double()).abs()[inside]
        worst = max(worst, float(error.max()) / bound)
    assert 0.9 < worst <= 1, "the search did not come near the bound"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)  # float32 needs none
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_comparison_is_exact(dtype: torch.dtype, rounding: str) -> None:
    """Kept or lost is decided by |x' - x| <= bound as it is in rational numbers, within the reach and beyond."""
    made = make_grid(1.0, dtype, rounding)
    index, x = hard_values(made, dtype, [0, 3, 9, 77, -1021, 2046])
    index, x = index[::97], x[::97]
    spec, wanted = TensorSpec.of(x), codes_of(made, x, index)
    restored = made.value(wanted.clamp(-2047, 2047).int(), index, spec, SEED)
    errors = [abs(Fraction(a) - Fraction(b)) for a, b in zip(restored.tolist(), x.tolist(), strict=True)]
    for promised in sorted(errors)[:: len(errors) // 5]:
        for nearby in (promised, promised * (1 - Fraction(1, 1 << 23)), promised * (1 + Fraction(1, 1 << 23))):
            bound = Fraction(float(torch.tensor(float(nearby))))
            stricter = dataclasses.replace(made, promised=torch.tensor([float(bound)]))
            q, lost = stricter.quantise(x, index, spec, SEED)
            fits = [abs(code) <= 2046 and error <= bound for code, error in zip(wanted.tolist(), errors, strict=True)]
            assert lost.tolist() == [not fit for fit in fits]
            assert torch.equal(q[~lost].double(), wanted[~lost]) and not bool(q[lost].any())
    lost = made.quantise(x, index, spec, SEED)[1]
    assert bool(lost[wanted.abs() > grid.reach(dtype)].any()), "beyond the reach nothing was in danger"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_2046_steps_have_a_code_and_2047_do_not(dtype: torch.dtype, rounding: str) -> None:
    """What is lost below is lost to its dtype's own rounding alone, which float32 and float64 do not notice."""
    made = make_grid(1.0, dtype, rounding)
    index, x = hard_values(made, dtype, [-2047, -2046, -2045, 2045, 2046, 2047])
    q, lost = made.quantise(x, index, TensorSpec.of(x), SEED)
    beyond = codes_of(made, x, index).abs() > 2046
    assert int(beyond.sum()) > 1000 and int((~beyond).sum()) > 1000
    assert bool(lost[beyond].all()) and int(q.abs().max()) <= 2046
    if dtype in (torch.float32, torch.float64):
        assert torch.equal(lost, beyond)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_no_code_carries_is_lost(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    x = torch.tensor([math.nan, math.inf, -math.inf, info.max, info.min], dtype=dtype)
    for rounding in ROUNDINGS:
        for bound in (1.0, 1e-3):
            q, lost = make_grid(bound, dtype, rounding).quantise(x, torch.arange(5), TensorSpec.of(x), SEED)
            assert bool(lost.all()) and not bool(q.any())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bound", [0.0, math.nan, -1.0, 1e-45, 2.0**-102])
def test_without_a_step_everything_is_lost(dtype: torch.dtype, bound: float) -> None:
    made = Grid.of(Bound(torch.tensor(bound, dtype=torch.float64)), dtype, CPU, "dither")
    assert made.step.tolist() == [0.0] and made.inverse.tolist() == [math.inf]
    x = torch.tensor([0.0, -0.0, 1.0, -3.0, torch.finfo(dtype).smallest_normal], dtype=dtype)
    assert bool(made.quantise(x, torch.arange(5), TensorSpec.of(x), SEED)[1].all())


def test_the_expectation_over_all_dither_bytes_is_exact() -> None:
    """E[x'] = X * s, and X * s is within s / 2 of x: in float64 every x' is exact, and so is the sum of all 256.

    The 2**-23 is what the inverse, rounded to float32, may move x / s by, relative to x / s."""
    index = every_byte()
    for bound in (1.0, 0.3, 1e-3, 7.7):
        made = make_grid(bound, torch.float64, "dither")
        unit = float(made.step.double()) / 256
        for x in (torch.randn(300, dtype=torch.float64) * 20 * bound).tolist():
            column = torch.full((256,), x, dtype=torch.float64)
            q, lost = made.quantise(column, index, TensorSpec.of(column), SEED)
            assert not bool(lost.any())
            total = sum(Fraction(value) for value in made.value(q, index, TensorSpec.of(column), SEED).tolist())
            units = round(Fraction(x) * Fraction(float(made.inverse)))
            assert total / 256 == units * Fraction(unit)
            assert abs(float(total / 256) - x) <= unit * (0.5 + abs(x) / unit * 2.0**-23)


def test_the_error_over_all_dither_bytes_is_uniform() -> None:
    """(x' - X s) / s takes each of -127.5, -126.5, .. 127.5 once, whatever x is: a variance of step**2 / 12."""
    index = every_byte()
    made = make_grid(bound_of(1.0, torch.float64, "dither"), torch.float64, "dither")
    assert float(made.step) == 1.0
    for x in (0.0, 0.4999, -17.3, 1000.001):
        column = torch.full((256,), x, dtype=torch.float64)
        q, _ = made.quantise(column, index, TensorSpec.of(column), SEED)
        error = made.value(q, index, TensorSpec.of(column), SEED) * 256 - round(x * 256)
        assert error.sort().values.tolist() == [place - 127.5 for place in range(256)]


def test_nearest_rounding_restores_multiples_of_the_step() -> None:
    made = make_grid(0.3, torch.float32, "nearest")
    x = torch.randn(4096)
    q, lost = made.quantise(x, torch.arange(4096), TensorSpec.of(x), SEED)
    value = made.value(q, torch.arange(4096), TensorSpec.of(x), SEED)
    assert not bool(lost.any())
    assert torch.equal(value, q * made.step.float())
    assert float(made.value(torch.zeros(1, dtype=torch.int32), torch.zeros(1).long(), TensorSpec.of(x), SEED)) == 0.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_step_is_nearly_twice_its_bound(dtype: torch.dtype, rounding: str) -> None:
    """Never more, and eight bits of mantissa; bounds just below a number of few bits are not rounded up to it."""
    low, high = POWERS[dtype]
    bounds = [*torch.logspace(low, high, 97, base=2.0, dtype=torch.float64).tolist(), 1.0, 1 - 1e-10, 1 + 2.0**-30]
    for bound in bounds:
        step = float(make_grid(bound, dtype, rounding).step)
        assert 2 * bound * (1 - LOSS[dtype]) < step < 2 * bound
        mantissa = math.frexp(step)[0] * 2**8
        assert mantissa == int(mantissa)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_bound_that_the_host_knows_has_the_same_grid(dtype: torch.dtype, rounding: str) -> None:
    for bound in (0.1, 1 - 1e-10, 1e300, 3e-46, 2.0**-101, 1 + 2.0**-30, 7e4):
        made, known = make_grid(bound, dtype, rounding), Grid.uniform(bound, dtype, CPU, rounding)
        assert known.axes == () and known.rounding == rounding and known.centre is None
        for name in ("step", "inverse", "promised"):
            one, other = getattr(made, name), getattr(known, name)
            assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf])
def test_bounds_that_statistics_may_have_are_no_harm(value: float) -> None:
    """All is stored exactly under what is no bound; an infinite one is as good as the largest."""
    made = Grid.of(Bound(torch.tensor([value, 1.0], dtype=torch.float64), (0,)), torch.float32, CPU, "dither")
    assert float(made.step[0]) == (2.0**115 * (1 - 2.0**-8) if value == math.inf else 0)
    assert torch.equal(made.step[1:], make_grid(1.0, torch.float32, "dither").step)
    lost = made.quantise(torch.tensor([0.5, 0.5]), range(2), TensorSpec.of(torch.zeros(2)), SEED)[1]
    assert lost.tolist() == [value != math.inf, False]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_promise_is_never_rounded_up(dtype: torch.dtype) -> None:
    """What elements are compared with is a float32, at most the bound."""
    for bound in (0.1, 1 - 1e-10, 1e300, 3e-46, 1 + 2.0**-30):
        promised = float(make_grid(bound, dtype, "dither").promised)
        assert promised <= bound
        assert promised > bound * (1 - 2.0**-23) or not 1e-37 < bound < 1e38
    assert float(make_grid(1e300, dtype, "dither").promised) == torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_centre_moves_codes_and_not_values(dtype: torch.dtype, rounding: str) -> None:
    """By whole steps, few enough for 16-bit values to stay within the reach; none where there is no mean or no step."""
    mean = torch.tensor([0.0, 0.4, 3.0, -7.0, 100.0, -1e9, math.inf, math.nan, 5.0])
    value = torch.full((9,), 0.5, dtype=torch.float64)
    value[8] = 0
    bound = Bound(value, (1,))
    plain, centred = (Grid.of(bound, dtype, CPU, rounding, about) for about in (None, mean))
    assert plain.centre is None and centred.centre is not None and torch.equal(plain.step, centred.step)
    step, most = float(plain.step[0]), 256 if dtype.itemsize > 2 else 4
    wanted = [0, 0, 3.0, -7.0, 100.0, -1e9, 0, 0, 0]
    assert centred.centre.tolist() == [max(-most, min(most, round(about / step))) for about in wanted]
    x = (torch.randn(200, 9) * 2 + mean.nan_to_num(0.0, 0.0).clamp(-300, 300)).to(dtype)
    index, spec = torch.arange(1800), TensorSpec.of(x)
    q, lost = plain.quantise(x.flatten(), index, spec, SEED)
    near, missed = centred.quantise(x.flatten(), index, spec, SEED)
    assert torch.equal(lost, missed)
    centre = centred.centre.int().repeat(200)
    assert torch.equal(near[~lost], (q - centre)[~lost])
    values = [made.value(code, index, spec, SEED)[~lost] for made, code in ((plain, q), (centred, near))]
    assert torch.equal(values[0], values[1])


def test_codes_are_within_range_before_and_after_they_are_centred() -> None:
    """2046 steps from zero, and 2046 steps from the centre."""
    made = Grid.of(
        Bound(torch.full((2,), 0.5, dtype=torch.float64), (1,)),
        torch.float32,
        CPU,
        "nearest",
        torch.tensor([100.0, -100.0]),
    )
    step, centre = float(made.step[0]), int(made.centre[0])
    codes = torch.tensor([-2046 + centre - 1, -2046 + centre, 0, 2046, 2047])
    x = (codes * step).unsqueeze(1).expand(5, 2) * torch.tensor([1.0, -1.0])
    q, lost = made.quantise(x.flatten().contiguous(), torch.arange(10), TensorSpec.of(torch.empty(5, 2)), SEED)
    assert lost.view(5, 2).tolist() == [[True] * 2, [False] * 2, [False] * 2, [False] * 2, [True] * 2]
    assert q.view(5, 2)[1:4, 0].tolist() == [-2046, -centre, 2046 - centre]


@pytest.mark.parametrize("axes", [(), (0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_every_element_finds_its_own_step(axes: tuple[int, ...]) -> None:
    x = torch.randn(3, 4, 5).permute(2, 0, 1).contiguous().permute(1, 2, 0)
    sizes = [x.shape[axis] for axis in axes]
    value = torch.logspace(-3, 3, math.prod(sizes), dtype=torch.float64).view(sizes)
    made = Grid.of(Bound.absolute(value, axes), x.dtype, CPU, "nearest")
    spec = TensorSpec.of(x)
    steps = made.value(torch.ones(60, dtype=torch.int32), torch.arange(60), spec, SEED)
    shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
    expected = made.step.float().view(shape).expand(x.shape)
    assert torch.equal(steps.as_strided(spec.shape, spec.stride), expected)
