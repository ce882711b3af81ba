import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.app import zoo
from lowtide.app.zoo.llama import GroupedAttention, Llama, LlamaBlock, RMSNorm, SwiGLU, make_rotation, rotate

# Cutting a normal distribution at ±3 leaves this much of its standard deviation.
CUT = 0.98658
# A norm rounds to float32 a few times, to nearest: 2**-24 each, of which eight are allowed.
NORM = 8 * 2**-24


def test_parameter_count(count_parameters: Callable[..., int]) -> None:
    assert count_parameters("llama") == 9_638_784
    assert count_parameters("llama", tied_embeddings=True) == 9_638_784 - 256 * 384
    assert count_parameters("llama_1b") == 1_235_814_400
    assert count_parameters("llama_1b", tied_embeddings=False) == 1_235_814_400 + 128256 * 2048


def test_embeddings_are_tied_in_the_released_model_alone() -> None:
    assert zoo.describe("llama").options["tied_embeddings"] is False
    assert zoo.describe("llama_1b").options["tied_embeddings"] is True
    untied = Llama(depth=1, width=8, heads=2, hidden=8)
    assert untied.head.weight is not untied.embedding.weight
    tied = Llama(depth=1, width=8, heads=2, hidden=8, tied_embeddings=True)
    assert tied.head.weight is tied.embedding.weight


def test_sizes_of_the_released_model() -> None:
    """Those that the parameter count does not tell."""
    options = zoo.describe("llama_1b").options
    assert (options["context"], options["heads"], options["base"]) == (8192, 32, 500000.0)


def test_names_of_the_parts() -> None:
    """Rules go by these; the rotary tables are no part of the state."""
    model = Llama(depth=1, width=8, heads=2, hidden=8)
    layers = ("attn_norm", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp_norm", "mlp.gate", "mlp.up", "mlp.down")
    expected = ["embedding", *(f"blocks.0.{layer}" for layer in layers), "norm", "head"]
    assert list(model.state_dict()) == [f"{name}.weight" for name in expected]
    assert isinstance(model.blocks, nn.Sequential)
    assert isinstance(model.blocks[0].mlp.act, nn.SiLU)
    assert not list(model.buffers())


@pytest.mark.parametrize("tied", [True, False])
def test_residual_projections_start_smaller(tied: bool, assert_std: Callable[[Tensor, float], None]) -> None:
    depth = 3
    model = Llama(depth=depth, width=96, heads=6, kv_heads=3, hidden=128, tied_embeddings=tied)
    for block in model.blocks:
        for layer in (block.attn.q, block.attn.k, block.attn.v, block.mlp.gate, block.mlp.up):
            assert_std(layer.weight, 0.02 * CUT)
        for layer in (block.attn.proj, block.mlp.down):
            assert_std(layer.weight, 0.02 * CUT / math.sqrt(2 * depth))
    for layer in (model.embedding, model.head):
        assert_std(layer.weight, 0.02 * CUT)
    norms = [layer for layer in model.modules() if isinstance(layer, RMSNorm)]
    assert len(norms) == 2 * depth + 1 and all((norm.weight == 1).all() for norm in norms)


def test_norm_is_that_of_the_formula() -> None:
    norm = RMSNorm(24, eps=0.1)
    nn.init.normal_(norm.weight)
    x = 3 * torch.randn(2, 5, 24)
    expected = _norm(x.double(), norm.weight.double(), eps=0.1)
    torch.testing.assert_close(norm(x).double(), expected, rtol=NORM, atol=0)
    assert zoo.build("llama", depth=1).norm.eps == 1e-5


def test_norm_of_bfloat16_squares_in_float32_and_weighs_in_bfloat16() -> None:
    norm = RMSNorm(24).bfloat16()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, 5, 24).bfloat16()
    wide = x.float()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16()
    # One rounding of the quotient, one of the product, and the quotients of two formulas on two sides of a tie.
    torch.testing.assert_close(norm(x), norm.weight * normed, rtol=2 * 2**-8, atol=0)
    assert (norm(x) == norm.weight * normed).float().mean() > 0.95


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_rotation_is_that_of_complex_numbers(base: float) -> None:
    """Features i and i + half are the parts of one number, which is multiplied by exp(1j × position × frequency)."""
    length, features = 7, 6
    half = features // 2
    x = torch.randn(2, 3, length, features, dtype=torch.float64)
    numbers = torch.complex(x[..., :half], x[..., half:])
    for position in range(length):
        for pair in range(half):
            numbers[..., position, pair] *= cmath.exp(1j * position / base ** (2 * pair / features))
    cos, sin = make_rotation(length, features, base=base, device=x.device)
    assert cos.dtype == sin.dtype == torch.float32
    # Angles up to 6, off by some units of 2**-24 of themselves.
    expected = torch.cat((numbers.real, numbers.imag), dim=-1)
    torch.testing.assert_close(rotate(x, cos, sin), expected, rtol=0, atol=5e-6)


def test_angles_are_those_of_float32() -> None:
    """Off by the rounding of exponents of up to log(10000) = 9.2, of powers and of products, relative to the angle."""
    cos, sin = make_rotation(1000, 8, base=10000.0, device=torch.device("cpu"))
    angles = torch.arange(1000).double().unsqueeze(1) / 10.0 ** torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    limit = 12 * 2**-24 * angles + 2**-23
    assert ((cos - angles.cos()).abs() <= limit).all()
    assert ((sin - angles.sin()).abs() <= limit).all()


def test_scores_depend_on_the_distance_alone() -> None:
    """One query and one key at each of 12 positions: their products are constant along the diagonals."""
    length, features = 12, 8
    query, key = torch.randn(2, 1, features, dtype=torch.float64)
    cos, sin = make_rotation(length, features, base=100.0, device=query.device)
    scores = rotate(query.expand(length, -1), cos, sin) @ rotate(key.expand(length, -1), cos, sin).mT
    for distance in range(-length + 1, length):
        diagonal = scores.diagonal(distance)
        # Angles up to 11 in float32, as above; the products of |q| |k| < 16.
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=5e-5)
    torch.testing.assert_close(scores[0, 0], (query * key).sum(), rtol=1e-12, atol=0)
    # And they do depend on it, and on its sign.
    assert (scores[0, 1:] - scores[0, 0]).abs().min() > 0.01
    assert (scores[0, 1:] - scores[1:, 0]).abs().min() > 0.01


def test_block_is_that_of_the_formulas() -> None:
    """Written out head by head with complex rotations, in float64; norms and angles of the block are in float32."""
    width, heads, kv_heads, length = 24, 6, 2, 5
    attention = GroupedAttention(width, heads, kv_heads=kv_heads, base=100.0)
    block = LlamaBlock(attention, SwiGLU(width, 10), width=width).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    weights = {name.removesuffix(".weight"): value.detach() for name, value in block.named_parameters()}
    x = torch.randn(2, length, width, dtype=torch.float64)

    normed = _norm(x, weights["attn_norm"])
    features = width // heads
    steps = 100.0 ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)
    turns = torch.polar(torch.ones(()).double(), torch.arange(length).double().unsqueeze(1) * steps)
    mixed = []
    for head in range(heads):
        group = head // (heads // kv_heads)
        query, key, value = (
            normed @ weights[f"attn.{name}"][features * place : features * (place + 1)].mT
            for name, place in (("q", head), ("k", group), ("v", group))
        )
        turned = [torch.complex(*part.chunk(2, dim=-1)) * turns for part in (query, key)]
        # The real part of q times the conjugate of k, summed, is the product of the real vectors.
        scores = (turned[0] @ turned[1].mH).real / math.sqrt(features)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed.append(scores.softmax(-1) @ value)
    expected = x + torch.cat(mixed, dim=-1) @ weights["attn.proj"].mT
    normed = _norm(expected, weights["mlp_norm"])
    gate, up = normed @ weights["mlp.gate"].mT, normed @ weights["mlp.up"].mT
    expected = expected + (gate * gate.sigmoid() * up) @ weights["mlp.down"].mT
    # A mistake in any part is of the size of the values, about 1 to 10.
    torch.testing.assert_close(block(x), expected, rtol=0, atol=1e-4)


def test_the_residual_stream_is_not_normalised() -> None:
    block = LlamaBlock(GroupedAttention(8, 2, kv_heads=1, base=100.0), SwiGLU(8, 8), width=8)
    for layer in (block.attn.proj, block.mlp.down):
        nn.init.zeros_(layer.weight)
    x = torch.randn(2, 3, 8)
    assert torch.equal(block(x), x)


def test_shared_keys_and_values_are_repeated_ones() -> None:
    """Groups of three heads against as many heads of keys and values, with each one's weights three times in a row."""
    grouped = GroupedAttention(48, 6, kv_heads=2, base=100.0).double()
    full = GroupedAttention(48, 6, kv_heads=6, base=100.0).double()
    for parameter in grouped.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        state[name] = state[name].unflatten(0, (2, 8)).repeat_interleave(3, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    x = torch.randn(2, 5, 48, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-12, atol=1e-12)
    state["k.weight"] = state["k.weight"].roll(8, dims=0)
    full.load_state_dict(state)
    assert (grouped(x) - full(x)).abs().max() > 0.1


def test_no_position_sees_the_next_token() -> None:
    model = Llama(vocab_size=10, context=8, depth=2, width=16, heads=4, kv_heads=2, hidden=24)
    tokens = torch.randint(10, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (tokens[:, 5] + 1) % 10
    difference = (model(changed) - model(tokens)).abs().amax(dim=-1)
    # Logits of about 0.1, a unit of which in float32 is 1e-8.
    assert difference[:, :5].max() < 1e-7
    assert difference[:, 5:].min() > 1e-5


def test_the_output_is_normalised() -> None:
    model = Llama(vocab_size=10, context=8, depth=1, width=16, heads=4, kv_heads=2, hidden=24)
    seen = []
    model.head.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach()))
    nn.init.constant_(model.norm.weight, 3.0)
    nn.init.normal_(model.embedding.weight, std=5.0)
    model(torch.randint(10, (2, 8)))
    torch.testing.assert_close(seen[0].square().mean(-1), torch.full((2, 8), 9.0), rtol=1e-3, atol=0)


def test_order_matters() -> None:
    """Without positions, a causal decoder's last logits do not depend on the order of the tokens before."""
    model = Llama(vocab_size=10, context=8, depth=1, width=16, heads=4, kv_heads=2, hidden=24)
    for block in model.blocks:
        for layer in (block.attn.q, block.attn.k, block.attn.v, block.attn.proj):
            nn.init.normal_(layer.weight, std=0.5)
    tokens = torch.tensor([[1, 2, 3, 4, 5], [4, 3, 2, 1, 5]])
    first, second = model(tokens)[:, -1]
    assert (first - second).abs().max() > 1e-3


def test_the_base_reaches_the_attention() -> None:
    assert [block.attn.base for block in Llama(depth=2, width=8, heads=2, hidden=8, base=7.0).blocks] == [7.0, 7.0]


def test_the_context_is_a_limit_and_not_a_length() -> None:
    model = Llama(vocab_size=10, context=8, depth=1, width=8, heads=2, hidden=8)
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 10)
    with pytest.raises(ValueError, match=r"positions for 8 tokens, got 9; shorten the input"):
        model(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("kv_heads", [0, 4])
def test_keys_and_values_need_a_divisor_of_the_heads(kv_heads: int) -> None:
    with pytest.raises(ValueError, match=rf"divisible by its kv_heads, got heads=6 and kv_heads={kv_heads}"):
        Llama(kv_heads=kv_heads)


@pytest.mark.parametrize(("width", "heads"), [(10, 4), (12, 4)], ids=["fractions", "odd"])
def test_heads_need_pairs_of_features(width: int, heads: int) -> None:
    with pytest.raises(ValueError, match=rf"even number of features, got width={width} and heads={heads}"):
        Llama(width=width, heads=heads)


def test_bfloat16_is_near_float32() -> None:
    """Under autocast the residual stream stays float32, in a model of bfloat16 nothing but the norms' insides does."""
    entry = zoo.describe("llama")
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    expected = model(inputs)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs)
    assert logits.dtype == torch.bfloat16
    entry.loss(logits.float(), target).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    pure = model.bfloat16()(inputs)
    assert pure.dtype == torch.bfloat16
    for rounded in (logits, pure):
        error = (rounded.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert error < 0.02  # a unit of bfloat16 is 2**-8, a few of which add up


def test_far_positions_keep_their_angles_in_a_model_of_bfloat16() -> None:
    """Angles up to 299, which bfloat16 would round by up to 1: they are float32, their cosines and sines bfloat16."""
    attention = GroupedAttention(8, 2, kv_heads=1, base=100.0).bfloat16()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(1, 300, 8).bfloat16()
    rounded = attention(x)
    assert rounded.dtype == torch.bfloat16
    expected = attention.float()(x.float())
    error = (rounded.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert error < 0.02


def _norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    return weight * x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
