"""The promise of ``sz`` over dtypes, shapes, layouts, scales, bounds and special values: no slack anywhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import blocks_format
import torch
from codec_cases import bit_equal, bits, lay_out, same_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide import codecs
from lowtide.codecs.sz import Sz
from lowtide.coding import layout, rans
from lowtide.records import Bound, Encoded, Kind, Need, Per

# Powers of ten from subnormal to the largest scale at which normal values stay finite.
SCALES = {
    torch.float32: (-42, 30),
    torch.bfloat16: (-39, 30),
    torch.float16: (-7, 4),
    torch.float64: (-310, 300),
}
SMALL = [(0,), (4, 0, 3), (), (1,), (1, 1, 1), (7,), (31, 3), (2, 3, 5, 7), (2, 3, 4, 3, 2), (1, 5, 1, 1)]
# Chunks hold 1024 values: just below, just above, several, with axes of every kind.
LARGE = [(1023,), (1025,), (40, 40), (5, 7, 67), (2, 3, 24, 24), (4, 6, 3, 5, 7), (1, 1200), (300, 7, 1)]


@dataclass(frozen=True)
class Example:
    """One drawn input: ``promised`` is the bound of every element, in the shape of ``x``."""

    x: Tensor
    bound: Bound
    promised: Tensor
    codec: Sz
    seed: int


@st.composite
def examples(draw: st.DrawFn) -> Example:
    dtype = draw(st.sampled_from(list(SCALES)))
    shape = draw(_shapes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 40)))
    exponent = draw(st.integers(*SCALES[dtype]))
    x = _draw_values(draw, shape, generator) * 10.0**exponent
    # From far below the ulp (2**-8 to 2**-53 of the scale) to far above the range.
    size = 10.0 ** min(max(exponent + draw(st.integers(-18, 8) | st.integers(-3, 1)), -320), 300)
    if draw(st.booleans()):
        size = 2.0 ** max(math.floor(math.log2(size)), -1074)
        x = _put_on_edges(x, size, torch.finfo(dtype).eps, generator)
    x = _sprinkle(draw, x.to(dtype), generator)
    x = lay_out(x, tuple(draw(st.permutations(range(len(shape))))))
    bound, promised = _draw_bound(draw, x, size, generator)
    roundings = ["dither", "nearest", "stochastic"] if dtype == torch.float32 else ["dither", "nearest"]
    options = {"rounding": draw(st.sampled_from(roundings)), "keep_zeros": draw(st.booleans())}
    return Example(x, bound, promised, Sz(**options), draw(st.integers(0, (1 << 64) - 1)))


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    large = st.sampled_from(LARGE)
    return st.one_of(large, large, large, st.sampled_from(SMALL), st.lists(st.integers(1, 6), max_size=5).map(tuple))


def _draw_values(draw: st.DrawFn, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal values, non-negative or not, a share of them zeros of either sign."""
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        x = x.abs()
    share = draw(st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]))
    zero = torch.rand(shape, generator=generator) < share
    return torch.where(zero, x * 0.0, x)


def _put_on_edges(x: Tensor, size: float, ulp: float, generator: torch.Generator) -> Tensor:
    """Values half a step from the grid, an ulp more or less: with a bound of few bits, the hardest to keep."""
    edges = (x / size).round() * size
    nudged = edges * (1 + torch.randint(-2, 3, x.shape, generator=generator) * ulp)
    return torch.where(nudged.isfinite(), nudged, x)


def _sprinkle(draw: st.DrawFn, x: Tensor, generator: torch.Generator) -> Tensor:
    """NaN, infinities and huge or tiny outliers at random places."""
    info = torch.finfo(x.dtype)
    specials = [math.nan, math.inf, -math.inf, info.max, info.min, info.smallest_normal, -info.smallest_normal / 2]
    chosen = draw(st.lists(st.sampled_from(specials), max_size=3))
    for special in chosen if x.numel() else []:
        x.view(-1)[int(torch.randint(x.numel(), (), generator=generator))] = special
    return x


def _draw_bound(draw: st.DrawFn, x: Tensor, size: float, generator: torch.Generator) -> tuple[Bound, Tensor]:
    """One bound for the tensor, a channel, a row or a (sample, channel); entries differ, and a statistic may be 0."""
    need = Need(Kind.VALUES, "drawn", per=draw(st.sampled_from(list(Per))), row_dims=draw(st.integers(1, 2)))
    axes = need.axes(x.dim())
    sizes = [x.shape[axis] for axis in axes]
    value = size * 2.0 ** torch.randint(-3, 4, sizes, generator=generator).double()
    if draw(st.booleans()):
        value = value * torch.rand(sizes, generator=generator, dtype=torch.float64)
    if draw(st.booleans()) and value.numel():
        value.view(-1)[0] = draw(st.sampled_from([0.0, math.nan, 1e300]))
    shape = [x.shape[axis] if axis in axes else 1 for axis in range(x.dim())]
    return Bound(value, axes), value.nan_to_num(0.0).view(shape).expand(x.shape)


def _most_nbytes(x: Tensor, bound: Bound, encoded: Encoded) -> int:
    """Raw values in whole words and 2 bytes a step, 4 where it has a centre; for blocks 16 bytes of headers and 4 of
    offset a chunk, and the last offset; for rans 12 bytes of heads a chunk and 2 a symbol."""
    if not x.numel():
        return 0
    values = -(-x.nbytes // 4) * 4 + (4 if "centre" in encoded.tensors else 2) * bound.value.numel()
    if encoded.meta["kind"] == "blocks":
        return values + (16 + 4) * -(-x.numel() // 1024) + 4
    alphabet = rans.Alphabet(**encoded.meta["alphabet"])
    return values + 12 * -(-x.numel() // alphabet.chunk) + 2 * alphabet.symbols


def _check(example: Example, codec: Sz, encoded: Encoded) -> Tensor:
    """Everything that ``sz`` promises of a payload; gives the values."""
    x = example.x
    decoded = codec.decode(encoded)
    assert same_geometry(decoded, x)
    finite = x.isfinite()
    error = (decoded.double() - x.double()).abs()
    assert bool((error <= example.promised)[finite].all())
    if encoded.meta.get("zero_code") or codec.rounding != "dither":
        assert bool((decoded == 0)[x == 0].all())
    if codec.rounding == "stochastic":
        assert bool((decoded.sign() * x.sign() >= 0)[finite].all()), "a sign has changed"
    assert torch.equal(bits(decoded[~finite]), bits(x[~finite]))
    assert bit_equal(codecs.decode(encoded), decoded)
    assert encoded.nbytes <= _most_nbytes(x, example.bound, encoded)
    if codec.keep_zeros:
        nonzero = codec.nonzero(encoded)
        assert same_geometry(nonzero, x)
        assert torch.equal(nonzero, (x != 0).to(x.dtype))
    return decoded


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(examples())
def test_every_promise_of_sz(example: Example) -> None:
    _check(example, example.codec, example.codec.encode(example.x, example.bound, seed=example.seed))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(examples(), st.sampled_from([1.0, 1.0, 0.2, -3.0]), st.sampled_from([0.0, 0.0, 0.5]))
def test_rans_keeps_every_promise_and_gives_the_values_of_blocks(example: Example, scale: float, shift: float) -> None:
    """But in raw chunks, which are exact. The model is fitted to the values, or to others: scaled, or moved by so much
    of the largest."""
    x, codec = example.x, replace(example.codec, coder="rans")
    grid = codec.grid(x, example.bound)
    largest = x[x.isfinite()].double().abs().amax() if bool(x.isfinite().any()) else 0.0
    other = (x.double() * scale + largest * shift).to(x.dtype)
    plan = codec.fit(grid, codec.survey(other, grid), x.numel())
    encoded = codec.encode(x, seed=example.seed, plan=plan)
    decoded = _check(example, codec, encoded)
    if encoded.meta["kind"] != "rans":
        return
    plain = codec.encode(x, seed=example.seed, plan=replace(plan, model=None))
    exact = torch.zeros(x.numel(), dtype=torch.bool)
    for chunk in blocks_format.raw_chunks(plain):
        exact[1024 * chunk : 1024 * (chunk + 1)] = True
    size = rans.Alphabet(**encoded.meta["alphabet"]).chunk
    for chunk, length in enumerate(encoded.tensors["heads"].tolist()[1::3]):
        exact[size * chunk : size * (chunk + 1)] |= length < 0
    ours, theirs = (layout.memory_view(values) for values in (decoded, codec.decode(plain)))
    assert bit_equal(ours[~exact], theirs[~exact])
