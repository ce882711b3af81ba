"""``remake="linear"``: linear layers are run again in backward, so that what they have made is not stored."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_makers import distance
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.app import zoo
from lowtide.errors import AttachError, ModifiedError, UnknownNameError
from lowtide.session import Session

NOISE = 0.002  # of the energy of a gradient: an error of 4 % of its size


class Attention(nn.Module):
    """Queries, keys and values of one layer, heads with positions, and a layer behind a GELU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.qkv = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 96)
        self.out, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        angle = torch.arange(16.0)[:, None] * 0.5 ** torch.arange(4.0)
        self.register_buffer("cosine", angle.cos().repeat(1, 2))
        self.register_buffer("sine", angle.sin().repeat(1, 2))

    def turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * self.cosine + torch.cat((-other, one), -1) * self.sine

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        q, k, v = (part.view(4, 16, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(4, 16, 32))
        return x + self.down(F.gelu(self.up(x)))


def make_input(seed: int = 1) -> Tensor:
    return torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(seed))


def attach(model: nn.Module, **options: Any) -> Session:
    given = {"remake": "linear", "noise": NOISE, "min_size": 0, "coder": "blocks", "period": 2} | options
    return lowtide.attach(model, "budget", **given)


def run(model: nn.Module, x: Tensor, session: Session | None = None, steps: int = 1) -> list[Tensor]:
    for _ in range(steps):
        model.zero_grad()
        model(x * 1.0).square().sum().backward()
        if session is not None:
            session.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


def codecs_of(session: Session, *fields: str) -> dict[str, str]:
    """By site, for sites of some fields."""
    sites = session.ledger.sites.items()
    return {name: entry.codec for name, entry in sites if name.rpartition(".")[2] in fields}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_gradients_are_those_of_what_was_stored(bf16: bool) -> None:
    """Whatever came back otherwise would be an error of the size of the gradient."""
    model, x = Attention(), make_input()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain = run(model, x)
        session = attach(model, min_size=64)
        lossy = run(model, x, session, steps=12)
        session.detach()
    assert 0 < distance(lossy, plain) < 0.06
    found = codecs_of(session, "query", "key", "value", "self")
    assert found == dict.fromkeys(found, "again by linear") and len(found) == 4, "queries, keys, values, GELU's input"


@pytest.mark.parametrize("name", ["gpt", "llama", "vit_b_16", "encoder"])
def test_models_of_the_zoo(name: str) -> None:
    """Less is held than where linear layers are not run again, and gradients are as good."""
    entry = zoo.describe(name)
    held, errors = {}, {}
    for remake in (True, "linear"):
        torch.manual_seed(0)
        model = entry.build(**entry.tiny)
        sample = entry.example(2, **entry.tiny)
        plain = _gradients(model, entry.loss, sample)
        session = attach(model, remake=remake, noise=0.01)
        for _ in range(10):
            lossy = _gradients(model, entry.loss, sample)
            session.step()
        session.detach()
        held[remake], errors[remake] = session.ledger.held_peak, distance(lossy, plain) ** 2
    assert held["linear"] < 0.8 * held[True]
    assert 0 < errors["linear"] < 0.02


def _gradients(model: nn.Module, loss: Callable[..., Tensor], sample: Any) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(3)
    inputs, targets = sample
    loss(model(inputs), targets).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("kind", [nn.GELU, nn.SiLU])
def test_two_layers_in_a_row_and_no_more(kind: type[nn.Module]) -> None:
    """Or backward of a net without norms and sums would begin with all of forward, and errors would grow on the way."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(32, 32), kind()) for _ in range(7)]
    model, x = nn.Sequential(nn.Linear(32, 32), *(layer for block in blocks for layer in block)), torch.randn(64, 32)
    plain = run(model, x)
    session = attach(model)
    lossy = run(model, x, session, steps=9)
    session.detach()
    assert [name.partition(":")[0] for name, codec in codecs_of(session, "self").items() if codec == "sz"] == [
        "6",
        "12",
    ], "every third one"
    assert set(codecs_of(session, "self").values()) == {"sz", "again by linear"}
    assert 0 < distance(lossy, plain) < 0.06


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_a_layer_is_run_once_for_all_that_it_made() -> None:
    """Queries, keys and values are parts of one product, and what GELU reads is handed on to GELU's own backward."""
    model, x = Attention(), make_input()
    counts = []
    for remake in (True, "linear"):
        session = attach(model, remake=remake)
        run(model, x, session, steps=7)
        loss = model(x * 1.0).square().sum()
        with Products() as products:
            loss.backward()
        session.detach()
        counts.append(products.count)
    assert counts[1]["addmm"] - counts[0]["addmm"] == 2
    assert counts[1]["mm"] == counts[0]["mm"]


def test_backward_twice_and_in_part() -> None:
    model, x = Attention(), make_input()
    session = attach(model)
    run(model, x, session, steps=7)
    loss = model(x * 1.0).square().sum()
    first = torch.autograd.grad(loss, [model.down.weight], retain_graph=True)[0]
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert torch.equal(first, dict(zip(dict(model.named_parameters()), whole, strict=True))["down.weight"])


def test_a_gradient_of_a_gradient() -> None:
    """What is made again is as good there as what is stored."""
    model, x = (
        nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).double(),
        torch.randn(8, 16),
    )
    x = x.double().requires_grad_()

    def penalty() -> Tensor:
        model.zero_grad()
        slope = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0]
        slope.square().sum().backward()
        return model[1].weight.grad.clone()

    plain = penalty()
    session = attach(model, noise=1e-3)
    penalty()
    found = codecs_of(session, "self")
    assert "again by linear" in found.values()
    session.detach()
    session = attach(model, rules=[{"path": "*", "bound": 1e-9}], noise=1e-3)
    assert torch.allclose(penalty(), plain, rtol=1e-4)
    session.detach()


def test_nothing_is_left_behind(decoded: list[Any]) -> None:
    model = Attention()
    session = attach(model)
    run(model, make_input(), session, steps=7)
    decoded.clear()
    loss = model(make_input() * 1.0).square().sum()
    loss.backward(retain_graph=True)
    gc.collect()
    assert decoded and all(ref() is None for ref in decoded), "though backward may be run again"
    del loss
    gc.collect()
    assert session.ledger.held == 0
    loss = model(make_input() * 1.0).square().sum()
    assert session.ledger.held > 0
    del loss  # with no backward at all
    gc.collect()
    assert session.ledger.held == 0
    session.detach()


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_layer_that_changed_is_noticed(part: str) -> None:
    model = Attention()
    session = attach(model)
    run(model, make_input(), session, steps=7)
    loss = model(make_input() * 1.0).square().sum()
    with torch.no_grad():
        getattr(model.up, part).add_(1)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        loss.backward()
    session.detach()


def test_a_rule_is_obeyed() -> None:
    """Whoever names a tensor gets it stored, and whoever keeps a layer's input has exact queries made of it."""
    model, x = Attention(), make_input()
    session = attach(model, rules=[{"field": "query", "bound": 0.01}])
    run(model, x, session, steps=7)
    session.detach()
    assert sorted(codecs_of(session, "query").values()) == ["sz"]
    assert sorted(codecs_of(session, "key").values()) == ["again by linear"]
    session = attach(model, rules=[{"path": "qkv", "keep": True}])
    run(model, x, session, steps=7)
    session.detach()
    assert set(codecs_of(session, "query", "key", "value").values()) == {"again by linear"}
    assert codecs_of(session, "mat1")["qkv:addmm.mat1"] == "kept"


def test_noise_is_counted_where_it_is_stored() -> None:
    """What queries, keys and values add is for the norm's input to answer: its site speaks for them."""
    model, x = Attention(), make_input()
    session = attach(model, noise=0.03)
    run(model, x, session, steps=12)
    session.detach()
    held = {name for name, entry in session.ledger.sites.items() if entry.held_nbytes and entry.codec == "sz"}
    assert held == {"norm:native_layer_norm.input", "up:addmm.mat1"}
    bounds = session.report().noise
    assert {name.partition(":")[0] for name in bounds} >= {"qkv", "out", "up", "down"}


@pytest.mark.parametrize("options", [{"memory": "0.2"}, {"check": "full"}, {"store": "host"}, {"recompute": "up"}])
def test_with_other_options(options: dict[str, Any]) -> None:
    model, x = Attention(), make_input()
    given = {"noise": 0.01} if "memory" not in options else {"noise": 0.03}
    plain = run(model, x)
    session = attach(model, **given, **options)
    lossy = run(model, x, session, steps=12)
    session.detach()
    assert 0 < distance(lossy, plain) < 0.5
    assert "again by linear" in codecs_of(session, "query").values()


class Adapted(nn.Module):
    """A frozen layer and a small trained one beside it, as LoRA has them."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen, width = frozen.requires_grad_(False), frozen.in_features
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x)) * 2.0


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_adapters_beside_frozen_layers(bf16: bool) -> None:
    """A frozen layer has no input to be made of, and a sum of two layers is stored; the small one's input is not."""
    model, x = Attention(), make_input()
    for name in ("qkv", "up", "down"):
        setattr(model, name, Adapted(getattr(model, name)))
    model.requires_grad_(True)
    for name in ("qkv", "up", "down"):
        getattr(model, name).frozen.requires_grad_(False)

    def gradients(session: Session | None = None, steps: int = 1) -> list[Tensor]:
        for _ in range(steps):
            model.zero_grad()
            model(x * 1.0).square().sum().backward()
            if session is not None:
                session.step()
        return [item.grad.clone() for item in model.parameters() if item.grad is not None]

    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        plain = gradients()
        session = attach(model)
        lossy = gradients(session, steps=12)
        session.detach()
    assert 0 < distance(lossy, plain) < 0.06
    found = codecs_of(session, "query", "key", "value", "self")
    assert {codec for name, codec in found.items() if ".up:" in name} == {"again by linear"}
    attention = "(model):scaled_dot_product_flash_attention_for_cpu"
    assert "again by linear" not in (found[f"{attention}.query"], found[f"{attention}.value"])


def test_weights_that_change_as_soon_as_their_gradients_are_there() -> None:
    """Backward reads a layer's weight before it has its gradient, and not afterwards."""
    model = Attention()
    session = attach(model)

    def descend(weight: nn.Parameter) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-3)  # type: ignore[arg-type]
        weight.grad = None

    hooks = [weight.register_post_accumulate_grad_hook(descend) for weight in model.parameters()]
    for _ in range(4):
        model(make_input() * 1.0).square().sum().backward()
        session.step()
    for hook in hooks:
        hook.remove()
    session.detach()
    assert "again by linear" in codecs_of(session, "query").values()


def test_what_is_refused() -> None:
    model = Attention()
    with pytest.raises(UnknownNameError, match=r"value of remake 'linaer'.*linear"):
        attach(model, remake="linaer")
    with pytest.raises(AttachError, match=r"remake='linear' goes with the method budget.*'fixed' does not"):
        lowtide.attach(model, "fixed", remake="linear")
    with pytest.raises(AttachError, match=r"remake goes with the methods budget.*'comet' holds"):
        lowtide.attach(model, "comet", remake="linear")
    lowtide.attach(model, remake="linear").detach()


def test_what_was_done_outside_of_the_model() -> None:
    """Between the model and a loss that is recorded nobody is told of saves, so that a factor there is unknown."""
    model, factor = Attention(), torch.randn(4, 16, 32)
    session = attach(model)
    for _ in range(3):
        y = model(make_input() * 1.0) * factor
        with session.recording():
            loss = F.silu(y).sum()
        loss.backward()
        session.step()
    session.detach()
    assert codecs_of(session, "self")["(model):silu.self"] == "sz"
