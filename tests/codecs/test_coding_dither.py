"""Dither as random numbers. All seeds are fixed, so a test either always passes or always fails.

Tolerances: a mean of n values of standard deviation s lies within 4 s / sqrt(n) of its expectation (one in 16 000
would not); a correlation of n independent pairs has s = 1. Where the largest of k comparisons counts, 5 takes the
place of 4 (one in 1.7 million, times k). The offsets are odd multiples of 1/512, which documents a mean error of up to
step / 512 and changes the variance by one part in 65 536.
"""

from __future__ import annotations

import pytest
import torch
from blocks_format import escapes, raw_chunks
from torch import Tensor

from lowtide.codecs.sz import Plan, Sz
from lowtide.coding import dither
from lowtide.coding.dither import mix64
from lowtide.records import Bound

CPU = torch.device("cpu")
BOUND = 0.05


def draw(seed: int, count: int, *, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return dither.offsets(seed, start, start + count, dtype=dtype, device=CPU)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1])


def quantisation_error(x: Tensor, seed: int, plan: Plan | None = None) -> tuple[Tensor, float]:
    """Decoded minus original, in steps; float32 rounds it by less than 1e-5 of a step at these values."""
    encoded = Sz(coder="blocks").encode(x, seed=seed, plan=plan or Sz().plan(x, Bound.absolute(BOUND)))
    assert not escapes(encoded) and not raw_chunks(encoded), "exact values have no error and would bias the statistics"
    step = float(encoded.tensors["step"])
    return (Sz().decode(encoded).double() - x.double()) / step, step


def reference(seed: int, position: int) -> int:
    """512 times the offset of one element: a 64-bit hash of the seed keys a 32-bit hash of position // 4."""
    mixed = (seed + 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 64)
    mixed ^= mixed >> 31
    word = (position // 4 + mixed) % (1 << 32)
    word = (word ^ word >> 16) * 0x7FEB352D % (1 << 32)
    word ^= mixed >> 32
    word = (word ^ word >> 15) * 0x846CA68B % (1 << 32)
    word ^= word >> 16
    return 2 * (word >> 8 * (position % 4) & 0xFF) - 255


def test_offsets_are_the_256_odd_multiples_of_a_512th_equally_often() -> None:
    """n = 2**18, 1024 expected in each of 256 cells; chi-square with 255 degrees of freedom has s = sqrt(510)."""
    n = 1 << 18
    level = (draw(mix64(3), n) * 512).double()
    assert torch.equal(level.unique(), torch.arange(-255.0, 256.0, 2.0).double())
    counts = torch.bincount(((level + 255) / 2).long(), minlength=256)
    chi_square = float(((counts - n / 256) ** 2 / (n / 256)).sum())
    assert abs(chi_square - 255) < 4 * 510**0.5


def test_offsets_are_a_function_of_seed_and_position_alone() -> None:
    whole = draw(77, 4096)
    assert torch.equal(draw(77, 4096), whole)
    assert torch.equal(draw(77, 1001, start=2048), whole[2048:3049])
    assert torch.equal(draw(77, 4096, dtype=torch.float64), whole.double())
    assert not torch.equal(draw(78, 4096), whole)
    assert not torch.equal(draw(77 + (1 << 32), 4096), whole)


def test_known_offsets() -> None:
    """Written down once: another device, or a rewrite, has to give the same."""
    assert (draw(0, 8) * 512).int().tolist() == [-113, -33, -135, 87, -83, 253, 65, -45]
    assert (draw(0x123456789ABCDEF0, 8, start=1 << 20) * 512).int().tolist() == [
        -53,
        7,
        -239,
        229,
        -201,
        -185,
        223,
        -235,
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0])
@pytest.mark.parametrize("start", [0, 1020, (1 << 33) - 16])
def test_offsets_are_those_of_the_hash_written_out(seed: int, start: int) -> None:
    """Positions up to the last words of a 32-bit counter, and keys that carry beyond them."""
    seen = (draw(seed, 37, start=start, dtype=torch.float64) * 512).int().tolist()
    assert seen == [reference(seed, position) for position in range(start, start + 37)]


def test_keys_are_the_halves_of_the_mixed_seed() -> None:
    """Counted seeds have unrelated keys; taken as they are, they would give streams that are each other moved by 4."""
    for seed in (0, 1, 77, 2**64 - 1):
        low, high = dither.keys(seed)
        assert (low % (1 << 32)) | (high % (1 << 32)) << 32 == mix64(seed)
        assert -(1 << 31) <= low < 1 << 31 and -(1 << 31) <= high < 1 << 31


def test_unbiased_over_seeds_for_fixed_values() -> None:
    """256 fixed values, n = 1000 seeds. The error has s = step / sqrt(12); per value 5 s / sqrt(n), for the mean over
    all values 4 s / sqrt(256 n), each beside the documented 1/512."""
    x = torch.linspace(-3, 3, 256)
    n, plan = 1000, Sz().plan(x, Bound.absolute(BOUND))
    mean = torch.stack([quantisation_error(x, mix64(1, seed), plan)[0] for seed in range(n)]).mean(0)
    deviation = (1 / 12) ** 0.5
    assert float(mean.abs().max()) < 5 * deviation / n**0.5 + 1 / 512
    assert abs(float(mean.mean())) < 4 * deviation / (256 * n) ** 0.5 + 1 / 512


def test_error_is_uniform_and_independent_of_the_values() -> None:
    """n = 2**20. Of n uniform values the variance has a relative s of sqrt(0.8 / n) = 0.0009, and chi-square over 512
    cells s = sqrt(1022). Half a step is not quite the largest error: 256 / step and x' are each rounded to float32, by
    2**-24 of what they are. So |error| <= 1/2 + 2 (|x| / step + 1) 2**-24.
    """
    n = 1 << 20
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    error, step = quantisation_error(x, mix64(5))
    assert BOUND < step <= 2 * BOUND
    assert float(error.abs().max()) * step <= BOUND
    assert bool((error.abs() <= 0.5 + 2 * (x.double().abs() / step + 1) * 2.0**-24).all())
    assert float(error.var()) == pytest.approx(1 / 12, rel=4 * (0.8 / n) ** 0.5)
    assert abs(float(error.mean())) < 4 * (1 / 12 / n) ** 0.5
    counts = torch.histc(error, 512, min=-0.5, max=0.5)
    assert abs(float((counts - n / 512).square().sum()) / (n / 512) - 511) < 4 * 1022**0.5
    for statistic in (x, x.abs(), x.square(), (x / step).frac()):
        assert abs(correlation(error, statistic)) < 4 / n**0.5
    assert abs(correlation(error.square(), x.abs())) < 4 / n**0.5


def test_nearest_rounding_is_biased_where_dither_is_not() -> None:
    """What the statistics above would show if dither did nothing."""
    x = torch.full((1024,), 0.03)
    nearest = Sz(rounding="nearest")
    assert torch.equal(nearest.decode(nearest.encode(x, Bound.absolute(BOUND))), torch.zeros(1024))
    error, _ = quantisation_error(x, mix64(9))
    assert abs(float(error.mean())) < 4 * (1 / 12 / 1024) ** 0.5 + 1 / 512


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 7, 8, 16, 32, 1024])
def test_neighbouring_elements_are_uncorrelated(lag: int) -> None:
    """n = 2**20: 4 / sqrt(n) = 0.004. Lags 1 to 3 share a hash word, 4 and 5 are in the next one."""
    offsets = draw(mix64(7), (1 << 20) + lag)
    assert abs(correlation(offsets[lag:], offsets[:-lag])) < 4 / (1 << 20) ** 0.5


@pytest.mark.parametrize("half", ["low", "high"])
def test_seeds_that_differ_in_one_bit_give_unrelated_offsets(half: str) -> None:
    """n = 2**16, the largest of 32 comparisons: 5 / sqrt(n) = 0.02."""
    seed, n = mix64(11), 1 << 16
    base = draw(seed, n)
    flipped = [draw(seed ^ (1 << bit << (32 if half == "high" else 0)), n) for bit in range(32)]
    assert max(abs(correlation(base, other)) for other in flipped) < 5 / n**0.5
    assert max(float((base == other).double().mean()) for other in flipped) < 2 / 256


def test_consecutive_seeds_are_uncorrelated_at_every_shift() -> None:
    """A caller may count seeds 0, 1, 2: no stream may be another one moved by a few elements. n = 2**14, 65 shifts."""
    n = 1 << 14
    first, second = draw(0, n), draw(1, n)
    worst = max(abs(correlation(first[shift:], second[: n - shift])) for shift in range(65))
    assert worst < 5 / (n - 65) ** 0.5


def test_errors_of_two_steps_are_uncorrelated() -> None:
    """Seeds as training makes them: a hash of the base seed, step, site and call. n = 2**18."""
    x = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    errors = [quantisation_error(x, mix64(0, step, 12345, 0))[0] for step in range(3)]
    for a, b in [(0, 1), (1, 2), (0, 2)]:
        assert abs(correlation(errors[a], errors[b])) < 4 / (1 << 18) ** 0.5


def test_mix64_is_splitmix64() -> None:
    """The first outputs of the published generator for seeds 0 and 1234567."""
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(1234567) == 6457827717110365317


def test_mix64_avalanche() -> None:
    """Flipping one input bit flips each of 64 output bits with probability 1/2. n = 64 bits x 100 words: the mean of
    64 x n flips has s = 0.5 / sqrt(64 n); each output bit, the worst of 64, lies within 5 x 0.5 / sqrt(n)."""
    words = [mix64(31, word) for word in range(100)]
    flips = [mix64(4, word) ^ mix64(4, word ^ (1 << bit)) for word in words for bit in range(64)]
    n = len(flips)
    share = torch.tensor([[flip >> bit & 1 for bit in range(64)] for flip in flips]).double()
    assert abs(float(share.mean()) - 0.5) < 4 * 0.5 / (64 * n) ** 0.5
    assert float((share.mean(0) - 0.5).abs().max()) < 5 * 0.5 / n**0.5


def test_mix64_tells_words_their_order_and_their_number_apart() -> None:
    seen = {mix64(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seen) == 8000
    assert len({mix64(1, 2), mix64(2, 1), mix64(1), mix64(2), mix64(1, 2, 0), mix64(0, 1, 2)}) == 6
    assert mix64(-1) == mix64((1 << 64) - 1)
    assert all(0 <= value < 1 << 64 for value in seen)


def test_fractions_have_an_even_spread_and_owe_nothing_to_each_other_or_to_the_bytes() -> None:
    """n = 2**18 in 512 cells: chi-square with 511 degrees of freedom has s = sqrt(1022)."""
    n = 1 << 18
    fractions = dither.fractions_between(mix64(3), 0, n, CPU)
    assert float(fractions.min()) >= 0 and float(fractions.max()) < 1
    assert torch.equal((fractions.double() * 2**24).frac(), torch.zeros(n).double())
    counts = torch.bincount((fractions * 512).long(), minlength=512).double()
    assert abs(float(((counts - n / 512) ** 2 / (n / 512)).sum()) - 511) < 4 * 1022**0.5
    for distance in (1, 2, 4, 50257):
        assert abs(correlation(fractions[distance:], fractions[:-distance])) < 5 / (n - distance) ** 0.5
    assert abs(correlation(fractions, draw(mix64(4), n))) < 5 / n**0.5
    assert abs(correlation(fractions, dither.fractions_between(mix64(4), 0, n, CPU))) < 5 / n**0.5
    assert torch.equal(fractions[1000:1100], dither.fractions_between(mix64(3), 1000, 1100, CPU))
    number = torch.tensor([1000 - (1 << 32)])
    assert torch.equal(fractions[1000:1100], dither.fractions_between(mix64(3), 0, 100, CPU, number))
