"""Models against a slow count of a sample, symbol by symbol."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from lowtide.codecs.sz import Sz
from lowtide.coding import rans, rans_fit
from lowtide.coding.rans import Alphabet
from lowtide.records import Bound

COUNT = 1 << 26


def codes(scale: float, *, zeros: float = 0.0) -> Tensor:
    """Values that resemble their neighbours in a row, as those of images do."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(20 * rans_fit.PIECE, generator=generator)
    x[1:] += x[:-1].clone()
    q = (x * scale).round().to(torch.int16)
    return torch.where(torch.rand(q.shape, generator=generator) < zeros, rans.ZERO_CODE, q).to(torch.int16)


def symbols(sample: Tensor, alphabet: Alphabet) -> list[int]:
    """Lane after lane as the format has it: four values of each row in turn."""
    digits = []
    for code in sample.tolist():
        is_zero = code == rans.ZERO_CODE
        digit = (0 if is_zero else code) - alphabet.low + alphabet.zero
        fits = alphabet.zero <= digit < alphabet.size
        digits.append(0 if is_zero and alphabet.zero else digit if fits else alphabet.fill)
    if alphabet.predicted:
        before = [digits[at - 1] if at % rans.ROW else alphabet.fill for at in range(len(digits))]
        digits = [(digit - last) % alphabet.size for digit, last in zip(digits, before, strict=True)]
    lanes = torch.tensor(digits).view(-1, rans_fit.SAMPLE_ROWS, rans.LANES, 4)
    digits = lanes.transpose(1, 2).reshape(-1).tolist()
    turns = range(0, len(digits), alphabet.values)
    return [sum(digits[at + k] * alphabet.size**k for k in range(alphabet.values)) for at in turns]


@pytest.mark.parametrize("values", rans_fit.LARGEST)
@pytest.mark.parametrize("kind", ["no_zero", "zero", "predicted"])
@pytest.mark.parametrize("low", [-1, 0, 250, -260], ids=str)
def test_shares_are_those_of_the_symbols(values: int, kind: str, low: int) -> None:
    """But for 3 %, as if digits were independent; within two slots of 4096. The most common one has what is left."""
    sample, zero_code = codes(rans_fit.LARGEST[values] / 10, zeros=0.3), kind == "zero"
    size, predicted = rans_fit.LARGEST[values], kind == "predicted"
    alphabet = Alphabet(values, size, low, zero_code, 1, rans_fit.ROWS[values], predicted)
    model = rans_fit.Sample(sample, zero_code).model(alphabet)
    found = symbols(sample, alphabet)
    counted, freqs = Counter(found), model.freqs.tolist()
    digits = [[symbol // alphabet.size**k % alphabet.size for k in range(values)] for symbol in found]
    alone = Counter(digit for symbol in digits for digit in symbol)
    assert sum(freqs) == rans.SCALE and (min(freqs) > 0 or not predicted)
    for symbol, times in counted.most_common()[1:]:
        parts = [symbol // alphabet.size**k % alphabet.size for k in range(values)]
        independent = math.prod(alone[digit] / sample.numel() for digit in parts)
        wanted = 0.97 * times / len(found) + 0.03 * independent
        assert abs(freqs[symbol] - wanted * rans.SCALE) <= 2


@pytest.mark.parametrize("zero_code", [False, True], ids=["no_zero", "zero"])
@pytest.mark.parametrize("centre", [0, -9, 251, -252, 1500])
def test_an_alphabet_is_the_run_that_leaves_out_the_least(zero_code: bool, centre: int) -> None:
    """Against all runs of its size. Beside a code for zero, none has codes 256 steps from zero, or farther."""
    sample = codes(2.0, zeros=0.2)
    sample = torch.where(sample == rans.ZERO_CODE, sample, sample + centre)
    counted = Counter(sample.tolist())
    zeros = counted.pop(rans.ZERO_CODE)
    if not zero_code:
        counted[0] += zeros
    reached = range(-255, 256) if zero_code else range(-2046, 2047)
    for values in rans_fit.LARGEST:
        found = rans_fit.Sample(sample, zero_code).alphabet(values, COUNT)
        run = found.size - zero_code
        lows = sorted({found.low, *(code - k for code in counted for k in range(run))})
        kept = {low: sum(counted[code] for code in range(low, low + run) if code in reached) for low in lows}
        assert kept[found.low] == max(kept.values())
        inside = kept[found.low] + (zeros if zero_code else 0)
        assert rans_fit.Sample(sample, zero_code).outside(found) == pytest.approx(
            1 - inside / sample.numel(), abs=1e-12
        )


def fitted(sample: Tensor, before: rans.Model | None = None, *, predict: bool = True) -> rans.Model:
    return rans_fit.fit(sample, COUNT, before, zero_code=False, predict=predict)


def smooth(weight: float, *, scale: float = 4.0, seed: int = 1) -> Tensor:
    """Codes of rows in which each value has the share ``weight`` of the one before it; their spread is ``scale``."""
    drawn = torch.randn(64 * rans_fit.PIECE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x, last = [], 0.0
    for value in ((1 - weight**2) ** 0.5 * drawn).tolist():
        last = weight * last + value
        x.append(last)
    return (scale * torch.tensor(x)).round().short()


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 20.0])
def test_white_noise_is_never_predicted(scale: float) -> None:
    generator = torch.Generator().manual_seed(2)
    sample = (torch.randn(64 * rans_fit.PIECE, generator=generator) * scale).round().short()
    plain = fitted(sample, predict=False)
    found = fitted(sample)
    assert found.alphabet == plain.alphabet and torch.equal(found.freqs, plain.freqs)
    was = rans_fit._fit(rans_fit.Sample(sample, zero_code=False), COUNT, None, predicted=True)
    assert was.alphabet.predicted and not fitted(sample, was).alphabet.predicted


@pytest.mark.parametrize("scale", [1.5, 4.0, 20.0])
def test_smooth_rows_are_predicted_if_that_is_asked_for(scale: float) -> None:
    """Neighbours with a correlation of 0.98: where codes are fine, the differences have a fifth of the spread."""
    sample = smooth(0.98, scale=scale)
    plain, found = fitted(sample, predict=False), fitted(sample)
    assert found.alphabet.predicted and not plain.alphabet.predicted
    assert int(found.freqs.min()) > 0
    assert found.bits < 0.7 * plain.bits
    zeros = torch.where(sample == 0, rans.ZERO_CODE, sample)
    assert not rans_fit.fit(zeros, COUNT, zero_code=True, predict=True).alphabet.predicted


def test_prediction_is_chosen_for_5_percent_and_kept_for_2() -> None:
    """Between the two, what there was before decides; beyond them it does not."""
    for weight, fresh, after in ((0.55, False, False), (0.63, False, True), (0.80, True, True)):
        sample = smooth(weight)
        counted = rans_fit.Sample(sample, zero_code=False)
        plain, predicted = (rans_fit._fit(counted, COUNT, None, predicted=which) for which in (False, True))
        gain = 1 - predicted.bits / plain.bits
        assert fresh == (gain >= 0.05) and after == (gain >= 0.02), f"{weight}: {gain}"
        assert fitted(sample).alphabet.predicted == fitted(sample, plain).alphabet.predicted == fresh
        again = fitted(sample, predicted)
        assert again.alphabet == (predicted if after else plain).alphabet
        assert not fitted(sample, predicted, predict=False).alphabet.predicted


def test_an_alphabet_that_is_predicted_is_kept_like_any_other() -> None:
    """One that takes less than 1 % more than the best, though another sample would give another one."""
    model = fitted(smooth(0.98))
    for seed in range(2, 5):
        again = fitted(smooth(0.98, scale=4.0 * (1 + 0.01 * (seed - 3)), seed=seed), model)
        assert again.alphabet == model.alphabet
        model = again
    assert fitted(smooth(0.98, scale=12.0), model).alphabet.size > model.alphabet.size


@pytest.mark.parametrize("weight", [0.9, 0.98])
def test_bits_of_a_predicted_model_are_what_the_symbols_take(weight: float) -> None:
    sample = smooth(weight)
    model = fitted(sample)
    freqs = model.freqs.tolist()
    taken = sum(12 - math.log2(freqs[symbol]) for symbol in symbols(sample, model.alphabet)) / sample.numel()
    assert model.alphabet.predicted
    assert model.bits == pytest.approx(taken + 24 * rans.LANES / model.alphabet.chunk, rel=0.02)


@pytest.mark.parametrize("scale", [0.2, 0.6, 1.5, 8.0])
def test_no_number_of_values_that_was_passed_over_would_have_been_chosen(scale: float) -> None:
    """The rule, applied to all of them: the most values that cost at most 2 % over the least."""
    sample = rans_fit.Sample(codes(scale), zero_code=False)
    models = [sample.model(sample.alphabet(values, COUNT)) for values in rans_fit.LARGEST]
    least = min(model.bits for model in models)
    wanted = next(model for model in models if model.bits <= 1.02 * least + 0.002)
    assert rans_fit.fit(codes(scale), COUNT, zero_code=False).alphabet == wanted.alphabet


def test_bits_are_what_the_symbols_take() -> None:
    """The length of every symbol by its share, and for each value its part of what a chunk stores of its lanes."""
    sample = codes(1.0)
    model = rans_fit.fit(sample, COUNT, zero_code=False)
    freqs = model.freqs.tolist()
    taken = sum(12 - math.log2(freqs[symbol]) for symbol in symbols(sample, model.alphabet)) / sample.numel()
    assert model.bits == pytest.approx(taken + 24 * rans.LANES / model.alphabet.chunk, rel=0.02)


@pytest.mark.parametrize("middle", [0, -271, 900])
@pytest.mark.parametrize("scale", [6.0, 12.0])
def test_wide_alphabets_have_digits_to_spare(middle: int, scale: float) -> None:
    """Codes that have moved on by a spread take a bit or two more a value, not an escape each."""
    sample = (codes(scale) + middle).to(torch.int16)
    model = rans_fit.fit(sample, COUNT, zero_code=False)
    alphabet, freqs = model.alphabet, model.freqs.tolist()
    assert alphabet.values == 1 and min(freqs) > 0
    moved = sample.long() + round(1.4 * scale)
    assert rans_fit.Sample(moved.to(torch.int16), zero_code=False).outside(alphabet) < 1e-3
    taken = sum(12 - math.log2(freqs[min(code - alphabet.low, alphabet.size - 1)]) for code in moved.tolist())
    assert taken / moved.numel() < model.bits + 2


def test_log_probabilities_far_from_zero_have_a_table() -> None:
    """Those of 50,000 tokens lie 270 steps from zero under a bound of 0.02, for which blocks take 12 bits a value."""
    x = torch.log_softmax(torch.randn(8, 50257, generator=torch.Generator().manual_seed(4)), -1)
    codec = Sz(coder="rans")
    encoded = codec.encode(x, Bound.absolute(0.02))
    assert encoded.meta["kind"] == "rans" and encoded.meta["alphabet"]["low"] < -256
    assert 32 * encoded.nbytes / x.nbytes < 7.5
    assert float((codec.decode(encoded) - x).abs().max()) <= 0.02
