"""The coder ``rans``: what it writes is read by its format written out in plain Python, whatever the model is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import rans_format
import torch
from blocks_format import bits_of
from codec_cases import bit_equal
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.coding import exact, rans, rans_fit
from lowtide.coding.rans import Alphabet, Model
from lowtide.errors import PayloadError

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
LARGEST = {1: 256, 2: 16, 3: 6, 4: 4}  # digits, for 1 to 4 values a symbol
NAMES = ("heads", "words", "freqs")


@dataclass(frozen=True)
class Example:
    """Codes, of which some stand for zero or for no value, and a model that need not fit them."""

    q: Tensor
    zero: Tensor | None
    lost: Tensor
    values: Tensor
    model: Model

    def write(self) -> dict[str, Tensor]:
        return rans.write(self.q, self.zero, self.lost, self.values, self.model)

    @property
    def expected(self) -> list[int]:
        q = self.q if self.zero is None else torch.where(self.zero, rans_format.ZERO, self.q)
        return q.tolist()


def draw_bits(count: int, dtype: torch.dtype) -> Tensor:
    """Random bytes: every kind of NaN, subnormals, both zeros."""
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype)


def make_model(alphabet: Alphabet, share: Tensor) -> Model:
    freqs = torch.tensor(
        rans_fit.normalise((share / share.sum()).tolist(), alphabet.fill_symbol, every=alphabet.predicted)
    )
    return Model(alphabet, freqs.to(torch.int16), 4.0)


def make_example(
    model: Model, count: int, dtype: torch.dtype, *, spread: float, centre: float, share_lost: float
) -> Example:
    """Codes around ``centre``; half of them zeros where those have a code of their own."""
    alphabet = model.alphabet
    lost = torch.rand(count) < share_lost
    zero = (torch.rand(count) < 0.5) & ~lost if alphabet.zero else None
    q = (torch.randn(count) * spread + centre).round().clamp(-2046, 2046).int()
    q = q.masked_fill(lost if zero is None else lost | zero, 0)
    return Example(q, zero, lost, draw_bits(count, dtype), model)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    torch.manual_seed(draw(st.integers(0, 1 << 40)))
    values = draw(st.integers(1, 4))
    size = draw(st.integers(2, LARGEST[values]))
    rows = draw(st.sampled_from([3, 6, 12] if values == 3 else [4, 8, 12]))
    low, zero = draw(st.integers(-40, 40) | st.sampled_from([-size // 2, 0])), draw(st.booleans())
    predicted = not zero and draw(st.booleans())
    alphabet = Alphabet(values, size, low, zero, draw(st.integers(0, size - 1)), rows, predicted)
    share = torch.rand(alphabet.symbols, dtype=torch.float64) ** draw(st.sampled_from([1, 8, 40]))
    share[torch.rand(alphabet.symbols) < draw(st.sampled_from([0.0, 0.0, 0.5, 0.95]))] = 0
    share[alphabet.fill_symbol] += 1e-3
    chunk = rows * 128
    count = draw(st.sampled_from([1, 2, 5, 31, 127, 129, chunk - 1, chunk, chunk + 1, 2 * chunk + 77]))
    return make_example(
        make_model(alphabet, share),
        count,
        draw(st.sampled_from(DTYPES)),
        spread=draw(st.sampled_from([0.0, 0.3, 1.0, size / 4, 600.0])),
        centre=draw(st.sampled_from([float(low), low + size / 2, 0.0, 1000.0])),
        share_lost=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0])),
    )


def check(example: Example) -> rans_format.Content:
    """Both readers give back what was written, to the bit; gives what the slow one found."""
    count, dtype, alphabet = example.q.numel(), example.values.dtype, example.model.alphabet
    parts = example.write()
    assert [parts[name].dtype for name in NAMES] == [torch.int32, torch.int32, torch.int16]
    assert parts["words"].numel() <= sum(exact.raw_counts(dtype, count, alphabet.chunk, example.q.device).tolist())
    found = rans_format.read(
        {name: parts[name].tolist() for name in NAMES}, alphabet.meta(), count=count, nbits=8 * dtype.itemsize
    )
    expected, lost, values = example.expected, example.lost.tolist(), bits_of(example.values)
    assert sorted([*found.codes, *found.exact]) == list(range(count))
    assert {at for at in found.codes if lost[at]} == set()
    assert {at for at in found.escapes if not lost[at]} == set()
    assert all(code == expected[at] for at, code in found.codes.items())
    assert all(bits == values[at] for at, bits in found.exact.items())

    q, zero = rans.read(parts, alphabet, dtype=dtype, count=count)
    coded = torch.tensor(sorted(found.codes), dtype=torch.int64)
    seen = q if zero is None else torch.where(zero, rans_format.ZERO, q)
    assert (zero is None) == (not alphabet.zero)
    assert torch.equal(seen[coded], torch.tensor(expected)[coded])
    flat = torch.full((count,), 9.0, dtype=dtype)
    rans.write_exact(parts, alphabet, flat)
    nine = bits_of(torch.full((1,), 9.0, dtype=dtype))[0]
    assert bits_of(flat) == [found.exact.get(at, nine) for at in range(count)]
    return found


@settings(max_examples=150, deadline=None, derandomize=True)
@given(examples())
def test_what_is_written_is_read_whatever_the_model(example: Example) -> None:
    """Alphabets that leave out all codes, symbols without a share, values without a code, chunks of every kind."""
    check(example)


@pytest.mark.parametrize("values", LARGEST)
@pytest.mark.parametrize("zero", [False, True], ids=["no_zero", "zero"])
def test_models_of_other_data(values: int, zero: bool) -> None:
    """A model of codes near 0 for such codes (next to no escapes), for codes two standard deviations away (many), and
    for codes far from all that it knows, which makes raw chunks of them. A short chunk is raw sooner."""
    spread = LARGEST[values] / 8
    codes = (torch.randn(16 * 1536) * spread).round().int()
    if zero:
        codes = torch.where(torch.rand(16 * 1536) < 0.5, rans.ZERO_CODE, codes)
    sample = rans_fit.Sample(codes, zero)
    model = sample.model(sample.alphabet(values, 1 << 14))
    assert model.alphabet.values == values
    count = 2 * model.alphabet.chunk + 333
    escaped, raw = [], []
    for centre in (0.0, 2 * spread, 1000.0):
        found = check(make_example(model, count, torch.float32, spread=spread, centre=centre, share_lost=0.01))
        escaped.append(len(found.escaped_codes))
        raw.append(len(found.raw))
    assert escaped[0] < count / 50 and escaped[1] > 2 * escaped[0]
    assert raw[0] in (0, 333) and raw[1] in (0, 333)
    assert zero or raw[2] == count


@pytest.mark.parametrize("values", LARGEST)
@pytest.mark.parametrize("zero", [False, True], ids=["no_zero", "zero"])
def test_a_single_symbol_costs_next_to_nothing(values: int, zero: bool) -> None:
    """A share of 4095 in 4096 is 0.00035 bits: a whole chunk fits what is left in the states."""
    alphabet = Alphabet(values, 2, 0, zero, 0, 12)
    share = torch.zeros(alphabet.symbols, dtype=torch.float64)
    share[0] = 1
    model = make_model(alphabet, share)
    assert model.freqs.max() == 4095
    count = 2 * alphabet.chunk
    codes = torch.zeros(count, dtype=torch.int32)
    nothing = torch.zeros(count, dtype=torch.bool)
    example = Example(codes, ~nothing if zero else None, nothing, torch.zeros(count), model)
    check(example)
    assert example.write()["words"].numel() <= 2 * 32 + 2


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 40), st.integers(2, 256), st.sampled_from([0.1, 1.0, 10.0, 100.0]), st.data())
def test_shares_sum_to_4096(seed: int, symbols: int, power: float, data: st.DataObject) -> None:
    """Whatever can occur has a share, within a factor of the one wanted, and none has all of it."""
    torch.manual_seed(seed)
    share = torch.rand(symbols, dtype=torch.float64) ** power
    share[torch.rand(symbols) < data.draw(st.sampled_from([0.0, 0.5, 0.99]))] = 0
    always = data.draw(st.integers(0, symbols - 1))
    assume(float(share.sum()) > 0)
    share /= share.sum()
    freqs = torch.tensor(rans_fit.normalise(share.tolist(), always))
    assert int(freqs.sum()) == 4096
    assert int(freqs.min()) >= 0 and int(freqs.max()) <= 4095 and int(freqs[always]) > 0
    assert bool((freqs[share > 2.0**-15] > 0).all())
    least = share[share > 2.0**-15].sum()
    assert bool((freqs >= (share * 4096 * float(least) * 0.5).floor() - 1)[share > 2.0**-15].all())


def entropy(codes: Tensor) -> float:
    """Order-0, in bits a value."""
    share = torch.unique(codes, return_counts=True)[1].double() / codes.numel()
    return float(-(share * share.log2()).sum())


def sample_of(codes: Tensor) -> Tensor:
    return codes[: codes.numel() // 1536 * 1536][: 64 * 1536]


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("relu", [False, True], ids=["signed", "relu"])
def test_a_fitted_model_says_what_it_costs(scale: float, relu: bool) -> None:
    """The estimate from a sample of 98304 iid codes, against the size of the next 2**18, within 2 % and half of the
    states of the chunks (how full those are is not known beforehand); and the size, within 4 % and those states of the
    entropy."""
    x = torch.randn(1 << 19) * scale
    codes = x.relu().round().int() if relu else x.round().int()
    zero = x <= 0 if relu else None
    sample = codes if zero is None else torch.where(zero, rans.ZERO_CODE, codes)
    model = rans_fit.fit(sample_of(sample), 1 << 18, zero_code=relu)
    coded, nothing = codes[1 << 18 :], torch.zeros(1 << 18, dtype=torch.bool)
    marked = coded if zero is None else torch.where(zero[1 << 18 :], rans_format.ZERO, coded)
    parts = rans.write(coded, None if zero is None else zero[1 << 18 :], nothing, torch.zeros(1 << 18), model)
    bits = parts["words"].numel() * 32 / (1 << 18)
    assert abs(bits - model.bits) <= 0.02 * bits + 32 * 16 / model.alphabet.chunk
    assert bits <= entropy(marked) * 1.04 + 32 * 32 / model.alphabet.chunk


def test_a_window_follows_the_codes() -> None:
    """Codes near 100 are not worse than codes near 0, and outliers do not widen the alphabet."""
    codes = (torch.randn(64 * 1536) * 1.5).round().int()
    near = rans_fit.fit(codes, 1 << 20, zero_code=False)
    far = rans_fit.fit(codes + 100, 1 << 20, zero_code=False)
    assert far.alphabet == replace(near.alphabet, low=near.alphabet.low + 100)
    assert torch.equal(far.freqs, near.freqs)
    codes[::5000] = 1500
    assert rans_fit.fit(codes, 1 << 20, zero_code=False).alphabet.size <= near.alphabet.size + 1


@pytest.mark.parametrize(
    "change",
    [
        {"values": 5},
        {"values": 0},
        {"size": 1},
        {"size": 17},
        {"fill": -1},
        {"fill": 4},
        {"rows": 0},
        {"rows": 516},
        {"rows": 6},
        {"values": 3, "rows": 4},
        {"zero": True, "predicted": True},
    ],
    ids=str,
)
def test_an_alphabet_that_no_encoder_makes_is_refused(change: dict[str, int]) -> None:
    alphabet = Alphabet(2, 4, 0, False, 0, 12)
    with pytest.raises(PayloadError, match="no alphabet of rans"):
        replace(alphabet, **change)


@pytest.fixture
def example() -> Example:
    """Three chunks, the second raw and the last short, with escapes of both kinds."""
    alphabet = Alphabet(2, 8, -4, True, 0, 12)
    model = make_model(alphabet, torch.rand(64, dtype=torch.float64))
    example = make_example(model, 2 * 1536 + 500, torch.float32, spread=2.0, centre=0.0, share_lost=0.01)
    example.lost[1536:3072] = True
    example.zero[1536:3072] = False
    example.q[1536:3072] = 0
    found = check(example)
    assert sorted(found.raw) == list(range(1536, 3072)) and found.escapes and found.escaped_codes
    return example


def refused(example: Example, parts: dict[str, Tensor], message: str) -> None:
    count, dtype = example.q.numel(), example.values.dtype
    with pytest.raises(PayloadError, match=message):
        rans.read(parts, example.model.alphabet, dtype=dtype, count=count)


def test_words_beyond_what_the_chunks_use_are_left_alone(example: Example) -> None:
    parts, longer = example.write(), example.write()
    longer["words"] = torch.cat([parts["words"], torch.full((99,), -1, dtype=torch.int32)])
    count, alphabet = example.q.numel(), example.model.alphabet
    for seen, expected in zip(
        *(rans.read(p, alphabet, dtype=torch.float32, count=count) for p in (longer, parts)), strict=True
    ):
        assert torch.equal(seen, expected)
    flat = [torch.zeros(count), torch.zeros(count)]
    rans.write_exact(longer, alphabet, flat[0])
    rans.write_exact(parts, alphabet, flat[1])
    assert bit_equal(*flat)


def test_parts_of_the_wrong_length_are_refused(example: Example) -> None:
    parts = example.write()
    for cut in (1, 3):
        refused(example, {**parts, "heads": parts["heads"][:-cut]}, "do not head 3 chunks of 3572 values: truncated")
    refused(example, {**parts, "heads": parts["heads"].repeat(2)}, "18 numbers do not head 3 chunks")
    for cut in (1, 40, parts["words"].numel()):
        refused(example, {**parts, "words": parts["words"][:-cut]}, "heads and .* words contradict each other")
    refused(example, {**parts, "freqs": parts["freqs"][:-1]}, "its shares do not sum to 4096: corrupted")


def test_chunks_may_lie_in_any_order(example: Example) -> None:
    parts = example.write()
    heads, words = parts["heads"].view(-1, 3).clone(), parts["words"]
    pieces = torch.tensor_split(words, heads[1:, 0].tolist())
    order = [2, 0, 1]
    lengths = torch.tensor([len(pieces[chunk]) for chunk in order])
    heads[order, 0] = (lengths.cumsum(0) - lengths).int()
    moved = {**parts, "heads": heads.flatten(), "words": torch.cat([pieces[chunk] for chunk in order])}
    assert not torch.equal(moved["words"], words)
    alphabet, count = example.model.alphabet, example.values.numel()
    coded = (heads[:, 1] >= 0).repeat_interleave(alphabet.chunk)[:count]  # raw chunks have no codes
    found, expected = (rans.read(parts, alphabet, dtype=example.values.dtype, count=count) for parts in (moved, parts))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours[coded], theirs[coded])
    assert int(coded.sum()) > alphabet.chunk
    heads[0, 0] = heads[1, 0]
    refused(example, {**moved, "heads": heads.flatten()}, "contradict each other")


@pytest.mark.parametrize("chunk", [0, 1, 2])
@pytest.mark.parametrize(("number", "change"), [(0, 1), (0, -1), (1, 2), (1, -2), (1, -5000), (2, 1), (2, 1 << 16)])
def test_heads_that_contradict_each_other_are_refused(example: Example, chunk: int, number: int, change: int) -> None:
    parts = example.write()
    parts["heads"][3 * chunk + number] += change
    refused(example, parts, "contradict each other: truncated or corrupted|does not end where its encoder began")


def test_shares_that_no_encoder_makes_are_refused(example: Example) -> None:
    parts = example.write()
    for change in ((0, 1), (0, -int(parts["freqs"][0]) - 1)):
        freqs = parts["freqs"].clone()
        freqs[change[0]] += change[1]
        refused(example, {**parts, "freqs": freqs}, "shares do not sum to 4096")
    freqs = parts["freqs"].clone()
    freqs[1] += freqs[0] + 1
    freqs[0] = -1
    refused(example, {**parts, "freqs": freqs}, "shares do not sum to 4096")


@pytest.mark.parametrize("values", LARGEST)
def test_every_symbol_of_a_predicted_alphabet_has_a_share(values: int) -> None:
    alphabet = Alphabet(values, LARGEST[values], -1, False, 1, 12, predicted=True)
    share = torch.rand(alphabet.symbols, dtype=torch.float64) ** 200
    model = make_model(alphabet, share)
    example = make_example(model, 3000, torch.float32, spread=1.0, centre=0.0, share_lost=0.0)
    parts = example.write()
    assert int(model.freqs.min()) == 1 and int(model.freqs.sum()) == 4096
    freqs = model.freqs.clone()
    freqs[int(freqs.argmin())] -= 1
    freqs[int(freqs.argmax())] += 1
    refused(example, {**parts, "freqs": freqs}, "predicted, but not every symbol has a share: corrupted")
    with pytest.raises(AssertionError, match="differences that have no symbol break off a row"):
        replace(example, model=replace(model, freqs=freqs)).write()


def test_differences_are_those_of_the_row() -> None:
    """Modulo the size, from the digit to fill with in every row of 128; sums undo them."""
    alphabet = Alphabet(1, 200, -100, False, 90, 4, predicted=True)
    digits = torch.randint(0, 200, (3 * 128,))
    row = digits.tolist()
    expected = [(digit - (row[at - 1] if at % 128 else 90)) % 200 for at, digit in enumerate(row)]
    assert alphabet.differences(digits).tolist() == expected
    assert torch.equal(alphabet.sums(torch.tensor(expected)), digits)


def test_an_alphabet_says_that_it_is_predicted_where_it_is() -> None:
    """Payloads without prediction are those of before, and those of before are read."""
    plain = Alphabet(2, 8, -4, False, 0, 12)
    assert "predicted" not in plain.meta() and Alphabet(**plain.meta()) == plain
    predicted = replace(plain, predicted=True)
    assert predicted.meta() == {**plain.meta(), "predicted": True} and Alphabet(**predicted.meta()) == predicted


def test_a_damaged_stream_does_not_end_where_it_should(example: Example) -> None:
    """Any bit of any state or word of the stream of the first chunk: a decoder that goes astray does not come back to
    32 states of 2**15 by chance. The last word may be half used."""
    parts = example.write()
    stream = 32 + int(parts["heads"][1]) // 2
    for at in [*range(32), *range(32, stream, 7)]:
        words = parts["words"].clone()
        words[at] ^= 1 << at % 31
        refused(example, {**parts, "words": words}, "a stream does not end where its encoder began: corrupted")
    freqs = parts["freqs"].clone()
    first, second = freqs.nonzero().flatten()[:2]
    freqs[first] += 1
    freqs[second] -= 1
    refused(example, {**parts, "freqs": freqs}, "a stream does not end where its encoder began")


def test_an_escape_outside_its_chunk_is_refused(example: Example) -> None:
    """A code at position 65535 of the first chunk, then a value there."""
    parts = example.write()
    first = 32 + (int(parts["heads"][1]) + 1) // 2
    codes = int(parts["heads"][2]) % 65536
    words = parts["words"].clone()
    words[first] = -1
    refused(example, {**parts, "words": words}, "an escape lies outside its chunk")
    words = parts["words"].clone()
    words[first + codes] = 1536
    with pytest.raises(PayloadError, match="an escape lies outside its chunk"):
        rans.write_exact({**parts, "words": words}, example.model.alphabet, torch.zeros(example.q.numel()))


def test_a_chunk_is_raw_once_it_would_not_be_smaller() -> None:
    """32 states cost what 32 values of 4 bytes do: 33 zeros are coded in less, 32 are not."""
    alphabet = Alphabet(1, 2, 0, False, 0, 4)
    model = make_model(alphabet, torch.tensor([1.0, 0.0], dtype=torch.float64))
    for count in (31, 32, 33, 40):
        codes = torch.zeros(count, dtype=torch.int32)
        found = check(Example(codes, None, codes.bool(), torch.ones(count), model))
        assert len(found.raw) == (count if count <= 32 else 0)


def test_entropy_of_the_test_is_the_entropy() -> None:
    assert entropy(torch.tensor([0, 1, 2, 3])) == 2.0
    assert math.isclose(entropy(torch.tensor([0, 0, 0, 1])), 0.8112781244591328)
