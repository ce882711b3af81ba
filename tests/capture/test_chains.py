"""Queries, keys, values and their like: what is read off the graph between a linear layer (or a norm) and a save."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.capture.handles import Handle, Passed
from lowtide.capture.makers import Maker, find
from lowtide.coding import layout
from lowtide.records import TensorSpec
from lowtide.restoring import Remade

_ANGLES = torch.arange(12.0)[:, None] * 0.5 ** torch.arange(4.0)
COSINE, SINE = (part.repeat(1, 2)[None, None] for part in (_ANGLES.cos(), _ANGLES.sin()))


def find_in(make: Callable[[Tensor], Tensor], x: Tensor, *parts: Tensor) -> tuple[Tensor, Maker | None]:
    """What ``make`` makes of ``x``, and its maker, under hooks that own parameters, constants and ``parts``."""

    def pack(tensor: Tensor) -> Handle | Passed:
        owned = tensor.is_leaf or isinstance(tensor._base, nn.Parameter) or any(tensor is part for part in parts)
        return Passed(tensor, "") if owned else Handle(TensorSpec.of(tensor), "", "", is_leaf=False)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda data: x):
        root = x * 1
        made = make(root)
        maker = find(made, products=True)
    return made, maker


def made_again(maker: Maker, x: Tensor, like: Tensor) -> Tensor:
    """By way of what backward does, from ``x`` as the layer has read it."""
    source = maker.sources[0]
    source.kept = Given(x.detach().reshape(source.spec.shape))
    handle = Handle(TensorSpec.of(like), "", "", is_leaf=False)
    with torch.no_grad():
        return Remade(maker, 1).restore(handle)


class Given:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def restore(self, handle: Handle) -> Tensor:
        return self.tensor


def rotated(q: Tensor) -> Tensor:
    one, other = q.chunk(2, -1)
    return q * COSINE + torch.cat((-other, one), -1) * SINE


def rotated_by_parts(q: Tensor) -> Tensor:
    """As in GPT-NeoX and Phi: some features are left as they are."""
    turned, left = q[..., :4], q[..., 4:]
    one, other = turned[..., :2], turned[..., 2:]
    turned = turned * COSINE[..., :4] + torch.cat((-other, one), -1) * SINE[..., :4]
    return torch.cat((turned, left), -1)


def rotated_in_pairs(q: Tensor) -> Tensor:
    """As in GPT-J: neighbours turn together."""
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * COSINE + turned * SINE


def heads(y: Tensor) -> Tensor:
    return y.view(2, 12, -1, 8).transpose(1, 2)


def minus_itself(y: Tensor) -> Tensor:
    return heads(y)[:, :1] - heads(y)[:, 1:]


LEVEL = nn.Parameter(torch.linspace(-1, 1, 16))
TABLE = nn.Parameter(torch.linspace(-1, 1, 64).view(1, 4, 1, 16))

# Of what a layer of so many features has made, 2 x 12 rows of them.
CHAINS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "as it is": (16, lambda y: y),
    "heads": (16, heads),
    "heads, copied": (16, lambda y: heads(y).contiguous()),
    "keys, turned": (16, lambda y: heads(y).transpose(-2, -1)),
    "scaled": (16, lambda y: heads(y) * 8**-0.5),
    "divided": (16, lambda y: heads(y) / 8**0.5),
    "scaled by attention itself": (16, lambda y: torch.ops.aten.mul.Scalar(heads(y), 8**-0.25)),
    "divided, likewise": (16, lambda y: torch.ops.aten.div.Scalar(heads(y), 8**0.25)),
    "chunk": (48, lambda y: heads(y.chunk(3, -1)[1])),
    "split, unevenly": (48, lambda y: heads(y.split((24, 16, 8), -1)[1])),
    "split, with a rest": (40, lambda y: y.split(16, -1)[2]),
    "unbind": (48, lambda y: y.view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)[2]),
    "select": (48, lambda y: y.view(2, 12, 3, 2, 8).permute(2, 0, 3, 1, 4)[-1]),
    "slice": (48, lambda y: y[..., 16:32]),
    "slice from behind, with gaps": (48, lambda y: y[:, -4:, ::3]),
    "repeated heads": (8, lambda y: heads(y).expand(2, 3, 12, 8).reshape(6, 12, 8)),
    "rotated": (16, lambda y: rotated(heads(y))),
    "rotated by parts": (16, lambda y: rotated_by_parts(heads(y))),
    "rotated in pairs": (16, lambda y: rotated_in_pairs(heads(y))),
    "cast": (16, lambda y: y.double().view(24, 16)),
    "negative": (16, lambda y: -y),
    "minus a parameter": (16, lambda y: y - LEVEL),
    "plus a parameter, which comes first": (16, lambda y: LEVEL + y),
    "plus a parameter, which is the larger one": (16, lambda y: (y[:, None] + TABLE).chunk(2, 1)[1]),
    "minus another part of it": (16, minus_itself),
    "rolled": (16, lambda y: y.roll((3, -2), (1, 2))),
    "rolled as a whole": (16, lambda y: y.roll(5)),
    "moved, an axis more and an axis less": (16, lambda y: y.movedim(-1, 0).unsqueeze(1).squeeze(1)),
    "by a number for each head": (16, lambda y: heads(y) * torch.tensor([2.0, 3.0])[:, None, None]),
    "by a number of another type": (16, lambda y: y * torch.tensor(0.1, dtype=torch.float64)),
}

# What errors of the layer's input become depends on more than errors, or on two layers.
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a function": torch.tanh,
    "a factor that is trained": lambda y: y * LEVEL,
    "a square": lambda y: y * y,
    "a number that is added, which the graph does not tell": lambda y: y + 1.5,
    "a tensor that is added, likewise": lambda y: y + torch.ones(16),
    "a multiple that is added": lambda y: torch.add(y, LEVEL, alpha=2),
    "a quotient that is rounded": lambda y: torch.div(y, 2.0, rounding_mode="floor"),
    "a divisor": lambda y: 1.0 / y,
    "changed in place": lambda y: (y * 2).mul_(3.0),
    "changed in place, and a view": lambda y: (y * 2).mul_(3.0).view(24, 16),
    "two layers": lambda y: y + nn.Linear(16, 16)(y),
    "largest values": lambda y: y.sort(-1).values,
}


def layer(features: int, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(16, features, bias=bias)


def make_input() -> Tensor:
    return torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CHAINS)
def test_it_is_made_again_as_it_was(name: str, bias: bool) -> None:
    """Values, and how they lie in memory; a view with gaps may lie otherwise."""
    x, (features, of) = make_input(), CHAINS[name]
    linear = layer(features, bias=bias)
    made, maker = find_in(lambda root: of(linear(root)), x)
    assert maker is not None and maker.op == "linear" and len(maker.sources) == 1
    again = made_again(maker, x, made)
    torch.testing.assert_close(again, made.detach(), rtol=1e-6, atol=1e-6)
    if layout.is_dense(tuple(made.shape), made.stride()):
        assert again.stride() == made.stride()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_chain(name: str) -> None:
    linear = layer(16)
    assert find_in(linear, make_input())[1] is not None
    maker = find_in(lambda root: OTHERS[name](linear(root)), make_input())[1]
    assert maker is None or not maker.is_chain  # but it may be a product that is made of its factors


def test_only_if_it_is_asked_for() -> None:
    linear = layer(16)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Passed(tensor, ""), lambda data: data.restore()):
        assert find(linear(make_input() * 1)) is None


def test_other_products() -> None:
    """Of a weight as it is stored, as in GPT-2; not of two activations, nor with a matrix that is added or scaled."""
    weight, bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))
    x = torch.randn(12, 16, requires_grad=True)
    for of in (lambda root: torch.addmm(bias, root, weight), lambda root: root @ weight):
        made, maker = find_in(of, x)
        assert maker is not None
        torch.testing.assert_close(made_again(maker, x, made), made.detach())
    other = torch.randn(12, 8, requires_grad=True)
    for of in (
        lambda root: torch.addmm(bias, root, weight, alpha=2),
        lambda root: torch.addmm(bias, root, weight, beta=0.5),
        lambda root: torch.addmm(other * 1, root, weight),
    ):
        assert find_in(of, x)[1] is None
    activations = find_in(lambda root: root @ (root.t() * 1), x)[1]
    assert activations is not None and not activations.has_parts, "the other factor is not there exactly"


def test_a_frozen_weight_has_no_input_to_make_it_of() -> None:
    """Backward does not need it, so the layer does not save it."""
    linear = layer(16)
    linear.weight.requires_grad_(False)
    assert find_in(linear, make_input())[1] is None


def test_norms_in_windows() -> None:
    """As in Swin: what the norm has made is moved before a layer reads it."""
    norm = nn.LayerNorm(16)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x = make_input()

    def windows(root: Tensor) -> Tensor:
        return norm(root).roll(1, 1).view(2, 3, 4, 16).transpose(1, 2).reshape(8, 3, 16)

    made, maker = find_in(windows, x)
    assert maker is not None and maker.op == "layer_norm"
    parts = tuple(Passed(part.detach(), "") for part in torch.var_mean(x, -1, correction=0, keepdim=True)[::-1])
    parts = (parts[0], Passed((parts[1].restore() + norm.eps).rsqrt(), ""), *maker.parts[2:])
    again = made_again(dataclasses.replace(maker, parts=parts), x, made)
    torch.testing.assert_close(again, made.detach(), rtol=1e-5, atol=1e-5)
    turned = torch.randn(12, 2, 16, requires_grad=True)
    assert find_in(lambda root: windows(root.transpose(0, 1)), turned)[1] is None, "its rows do not lie in a row"


@pytest.mark.parametrize(
    "name",
    [
        *("heads", "scaled", "rotated", "minus another part of it", "plus a parameter, which comes first"),
        "plus a parameter, which is the larger one",
    ],
)
def test_the_gain_is_what_becomes_of_an_error(name: str) -> None:
    """Of variance one, drawn 200 times: 2 % is four times what 2 x 12 x 16 x 200 values leave to chance, and one draw,
    which the gain is, has 15 % of it, for as few values."""
    features, of = CHAINS[name]
    linear, x = layer(features), make_input()
    _, maker = find_in(lambda root: of(linear(root)), x)
    assert maker is not None
    with torch.no_grad():
        errors = torch.randn(200, 2, 12, 16)
        seen = torch.stack([of(linear(x + error)) - of(linear(x)) for error in errors]).square().mean()
        (gain,) = maker.gains([x.detach().reshape(24, 16)])
    assert float(gain) == pytest.approx(float(seen), rel=0.15)


def test_parts_of_one_result_share_it() -> None:
    """The layer runs once for queries, keys and values, and nothing stays behind."""
    linear, x = layer(48), make_input()
    found: list[Maker] = []

    def split(root: Tensor) -> Tensor:
        parts = linear(root).chunk(3, -1)
        found.extend(maker for part in parts if (maker := find(part, products=True)) is not None)
        return parts[0]

    find_in(split, x)
    first = found[0].shared
    assert len(found) == 3 and first is not None and all(maker.shared is first for maker in found)
    alone = find_in(split, x)[1]
    assert alone is not None and alone.shared is not first
