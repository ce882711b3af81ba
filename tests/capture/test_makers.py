"""What GELU, SiLU and layer norms have made is made again in backward: who made a tensor, and what comes of it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.capture import formulas
from lowtide.capture.handles import Handle, Passed
from lowtide.capture.makers import find
from lowtide.codecs.sz import Sz
from lowtide.errors import AttachError, ModifiedError
from lowtide.kernels import _normalise
from lowtide.records import TensorSpec
from lowtide.session import Session


class Block(nn.Module):
    """A transformer's feed-forward part."""

    def __init__(self, act: nn.Module | None = None, between: nn.Module | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(64, 64)  # what the model is given is not stored; what it makes of it is
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
        self.act, self.between = act or nn.GELU(), between or nn.Identity()
        nn.init.normal_(self.norm.weight, 1.0, 0.3)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.down(self.between(self.act(self.up(self.norm(x)))))


def make_input() -> Tensor:
    return 3 * torch.randn(4, 16, 64) + 1


def gradients(model: nn.Module, x: Tensor, steps: int = 4, **options: Any) -> tuple[list[Tensor], Session | None]:
    """After some steps: habits are learnt in the first ones."""
    if options.get("method") == "fixed":
        options["coder"] = "blocks"  # which needs no table to be fitted
    session = lowtide.attach(model, min_size=0, **options) if options else None
    for _ in range(steps):
        model.zero_grad()
        (model(x * 1.0) - 1).square().sum().backward()
    if session is not None:
        session.detach()
    return [parameter.grad.clone() for parameter in model.parameters()], session


def codecs_of(session: Session) -> dict[str, str]:
    found = {name.partition(":")[0]: entry.codec for name, entry in session.ledger.sites.items() if "mat1" in name}
    return {layer: found[layer] for layer in ("up", "down")}


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    error = sum(float((a - b).square().sum()) for a, b in zip(got, expected, strict=True))
    return (error / sum(float(b.square().sum()) for b in expected)) ** 0.5


def saved(x: Tensor) -> Any:
    """Hooks that leave in the graph what Lowtide's own do: handles, and parameters as they are."""

    def pack(tensor: Tensor) -> Handle | Passed:
        if isinstance(tensor, nn.Parameter):
            return Passed(tensor, "")
        return Handle(TensorSpec.of(tensor), "", "", tensor.grad_fn is None)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: x)


def test_who_made_a_tensor():
    x = torch.randn(4, 8, 16, requires_grad=True)
    with saved(x):
        y = F.gelu(x * 1)
        assert find(y).op == find(y.view(-1, 16)).op == find(y.bfloat16().flatten()).op == "gelu"
        assert find(F.silu(x * 1).view(4, 8, 4, 4)).op == "silu"
        norm = nn.LayerNorm(16)(x * 1)
        assert find(norm.bfloat16().view(-1, 16)).op == "layer_norm"
        assert find(y).sources[0].spec == TensorSpec.of(x)
        for other in (y.transpose(0, 1), y[:, :4], y.transpose(0, 1).contiguous(), y * 1, x, y.detach(), y[0]):
            assert find(other) is None
        assert find(y.bfloat16().float()) is None, "what it lost on the way is lost"
        turned = F.gelu(x.transpose(0, 1) * 1)
        assert find(turned).op == "gelu", "its input lies as it does"
        for other in (turned.to(torch.bfloat16, memory_format=torch.contiguous_format), nn.LayerNorm(16)(turned)):
            assert other.is_contiguous() and find(other) is None, "its input lies in another order"
        y.detach().zero_()
        assert find(y) is None, "it is no longer what GELU made"
    assert find(F.gelu(x * 1)) is None, "no hook has seen its input"


def test_found_by_way_of_few_ops_only():
    x = torch.randn(64, requires_grad=True)
    with saved(x):
        y = F.gelu(x * 1)
        for shape in ((8, 8), (4, 16), (2, 32), (1, 64), (32, 2)):
            y = y.view(shape)
        assert find(y) is not None
        assert find(y.view(64)) is None


@pytest.mark.parametrize("act", [F.gelu, F.silu], ids=["gelu", "silu"])
def test_the_gain_is_the_mean_square_of_the_slope(act):
    x = 2 * torch.randn(1000, dtype=torch.float64, requires_grad=True)
    with saved(x):
        maker = find(act(x * 1))
    slope = torch.autograd.grad(act(x).sum(), x)[0]
    assert float(maker.gains([x.detach()])[0]) == pytest.approx(float(slope.square().mean()), rel=1e-9)


def test_the_gain_is_that_of_what_is_stored(monkeypatch):
    """Of GELU's input: what it makes is nowhere below -0.17."""
    seen: list[Tensor] = []
    slope = formulas.gelu_slope
    monkeypatch.setattr(formulas, "gelu_slope", lambda part: seen.append(part) or slope(part))
    gradients(Block(), make_input(), steps=2, method="budget", remake=True)
    assert seen and all(float(part.min()) < -0.2 for part in seen)


@pytest.mark.parametrize("affine", [True, False])
def test_the_gain_of_a_norm_is_that_of_its_scale(affine):
    x, norm = torch.randn(8, 64, requires_grad=True), nn.LayerNorm(64, elementwise_affine=affine)
    if affine:
        nn.init.normal_(norm.weight, 2.0, 0.5)
    with saved(x):
        maker = find(norm(x * 1))
    expected = float(norm.weight.detach().square().mean()) if affine else 1.0
    assert float(maker.gains([x.detach()])[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("act", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()], ids=["gelu", "tanh", "silu"])
def test_exact_inputs_give_the_same_bits(act):
    model, x = Block(act), make_input()
    plain, _ = gradients(model, x)
    again, session = gradients(model, x, method="exact", remake=True)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert codecs_of(session) == {"up": "kept", "down": f"again by {'silu' if isinstance(act, nn.SiLU) else 'gelu'}"}
    _, before = gradients(model, x, method="exact")
    assert before.ledger.held_peak - session.ledger.held_peak == 4 * 4 * 16 * 256


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_stored_inputs_serve_twice(dtype):
    """Each is decoded once, and gradients are as close as where all is stored."""
    model, x = Block(), make_input()
    decoded = []
    decode = Sz.decode
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        patch.setattr(Sz, "decode", lambda self, encoded: decoded.append(encoded.spec.shape) or decode(self, encoded))
        plain, _ = gradients(model, x)
        bounds = dict.fromkeys(("linear", "norm", "pointwise"), "0.2 std")
        usual, before = gradients(model, x, steps=1, method="fixed", **bounds)
        count = len(decoded)
        again, session = gradients(model, x, steps=1, method="fixed", remake=True, **bounds)
    assert codecs_of(session) == {"up": "again by layer_norm", "down": "again by gelu"}
    assert len(decoded) - count == count - 2
    assert 0 < distance(again, plain) < 1.6 * distance(usual, plain) < 0.2
    assert session.ledger.held_peak < 0.62 * before.ledger.held_peak


def test_errors_stay_within_what_the_op_makes_of_the_bound():
    """1.13 times the bound of GELU's input; for the norm, the bound in units of the row's spread times the scale."""
    model, x = Block(), make_input()
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    inputs: dict[str, Tensor] = {}
    for name in ("up", "down"):
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given[0].detach()}))
    session = lowtide.attach(
        model, "fixed", min_size=0, coder="blocks", linear=0.01, norm="0.3 std", pointwise=0.25, remake=True
    )
    original = Handle.restore

    def restore(self: Handle) -> Tensor:
        tensor = original(self)
        if self.name.endswith("mat1"):
            seen[self.name.partition(":")[0]] = inputs[self.name.partition(":")[0]].view(tensor.shape), tensor
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "restore", restore)
        model(x * 1.0).square().sum().backward()
    session.detach()
    true, got = seen["down"]
    assert 0.2 < float((got - true).abs().max()) <= 1.13 * 0.25
    true, got = seen["up"]
    error = (got - true).abs() / model.norm.weight.detach().abs()
    assert 0.28 < float(error.max()) <= 0.3 + 1e-5


def test_one_input_serves_many():
    """Three layers read what a norm has made: its input is decoded once for them and for the norm."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
            self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.stem(x))
            return sum(part(x) for part in self.parts)

    decoded = []
    decode = Sz.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sz, "decode", lambda self, encoded: decoded.append(encoded.spec.shape) or decode(self, encoded))
        _, session = gradients(Attention(), make_input(), steps=1, method="fixed", remake=True)
    again = [entry.codec for name, entry in session.ledger.sites.items() if name.startswith("parts")]
    assert again == ["again by layer_norm"] * 3
    assert len(decoded) == 1


class Turned(nn.Module):
    """What GELU makes is read as it is and transposed: two saves of one stretch of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.rows, self.columns = nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.stem(x))
        rows, columns = self.rows(y), self.columns(y.t())
        return rows.square().sum() + columns.square().sum()


@pytest.mark.parametrize("steps", [1, 4])  # the two are settled together, or one by one
def test_a_transposed_save_comes_back_transposed(steps):
    model, x = Turned(), torch.randn(48, 64)

    def run(**options: Any) -> list[Tensor]:
        session = lowtide.attach(model, min_size=0, **options) if options else None
        for _ in range(steps):
            model.zero_grad()
            model(x).backward()
        if session is not None:
            assert "again by gelu" in {entry.codec for entry in session.ledger.sites.values()}
            session.detach()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = run()
    assert all(torch.equal(a, b) for a, b in zip(run(method="exact", remake=True), plain, strict=True))
    assert 0 < distance(run(method="fixed", remake=True, coder="blocks"), plain) < 0.2


def test_an_input_that_is_nobodys_to_store_can_be_measured():
    """GELU reads the model's own input: that has no site whose bound could answer for what is made of it."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(64, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(x))

    model, x = First(), torch.randn(128, 64, requires_grad=True)
    session = lowtide.attach(model, "budget", min_size=0, period=2, coder="blocks", remake=True)
    for _ in range(6):
        model.zero_grad()
        model(x).square().sum().backward()
        session.step()
    session.detach()
    assert session.report().noise.keys() <= {"down:addmm.mat1"}


def test_backward_twice_and_in_part():
    model, x = Block(), make_input()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(x * 1.0).square().sum()
    first = torch.autograd.grad(loss, [model.down.weight], retain_graph=True)[0]
    whole = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(model.parameters()))
    session.detach()
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert torch.equal(first, dict(zip(dict(model.named_parameters()), whole, strict=True))["down.weight"])


def test_nothing_is_left_behind(decoded):
    model = Block()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(make_input() * 1.0).square().sum()
    loss.backward(retain_graph=True)
    gc.collect()
    assert len(decoded) == 2 and all(ref() is None for ref in decoded), "though backward may be run again"
    del loss
    gc.collect()
    assert session.ledger.held == 0
    session.detach()


def test_a_rule_for_the_tensor_is_obeyed():
    model, x = Block(), make_input()
    for rule, codec in (({"keep": True}, "kept"), ({"bound": 0.01}, "sz"), ({"codec": "cast"}, "cast")):
        _, session = gradients(model, x, method="fixed", remake=True, rules=[{"path": "down", **rule}])
        assert codecs_of(session) == {"up": "again by layer_norm", "down": codec}
    # A norm's input that is kept gives other bits than the norm gave: the tensor is stored.
    _, session = gradients(model, x, method="fixed", remake=True, rules=[{"path": "norm", "keep": True}])
    assert codecs_of(session) == {"up": "sz", "down": "again by gelu"}
    # A codec without a bound promises nothing about what is made of its values.
    _, session = gradients(model, x, method="fixed", remake=True, rules=[{"path": "act", "codec": "cast"}])
    assert codecs_of(session) == {"up": "again by layer_norm", "down": "sz"}


def test_what_another_layer_keeps_is_not_made_again():
    """It is there as it is, at no cost."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.act = nn.Linear(64, 64), nn.GELU()
            self.first, self.between, self.second = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.stem(x))
            return self.second(x) + self.between(self.first(x))

    rules = [{"path": "second", "keep": True}]
    _, session = gradients(Two(), make_input(), method="fixed", remake=True, rules=rules)
    codecs = {name.partition(":")[0]: entry.codec for name, entry in session.ledger.sites.items() if "mat1" in name}
    assert codecs["second"] == codecs["first"] == "kept"


def test_what_is_changed_on_the_way_is_stored():
    _, session = gradients(Block(between=nn.Dropout(0.5)), make_input(), method="fixed", remake=True)
    assert codecs_of(session) == {"up": "again by layer_norm", "down": "sz"}


def test_a_scale_that_changed_is_noticed():
    """As in plain training, whose norm reads it in backward."""
    model = Block()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(make_input() * 1.0).square().sum()
    with torch.no_grad():
        model.norm.weight.mul_(2)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        loss.backward()
    session.detach()


@pytest.mark.parametrize("method", ["division", "comet", "acgc", "offload"])
def test_methods_that_hold_what_they_were_made_for(method):
    with pytest.raises(AttachError, match=rf"remake goes with the methods budget, exact, fixed; '{method}' holds"):
        lowtide.attach(Block(), method, remake=True)


def rows_of_a_norm(affine: bool) -> list[Tensor | None]:
    """Rows, their means and inverse spreads, a scale and a shift, in float64."""
    x = 3 * torch.randn(6, 5, 40, dtype=torch.float64) + 2
    scale, shift = torch.randn(2, 40, dtype=torch.float64) if affine else (None, None)
    return [x, x.mean(-1), (x.var(-1, correction=0) + 1e-5).rsqrt(), scale, shift]


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_with_given_statistics(affine):
    x, mean, inverse_std, scale, shift = rows_of_a_norm(affine)
    got = _normalise.rows(x, mean, inverse_std, scale, shift, torch.float64)
    assert torch.allclose(got, F.layer_norm(x, (40,), scale, shift, 1e-5), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_with_given_statistics_is_rounded_once(dtype, affine):
    """Besides, there are four roundings of float32, of numbers below 32."""
    given = [None if part is None else part.to(dtype) for part in rows_of_a_norm(affine)]
    expected = _normalise.rows(*(None if part is None else part.double() for part in given), torch.float64)
    got = _normalise.rows(*given, dtype)
    assert got.shape == expected.shape and got.dtype == dtype
    limit = torch.finfo(dtype).eps / 2 * expected.abs() + 2 * 32 * torch.finfo(torch.float32).eps
    assert bool(((got.double() - expected).abs() <= limit).all())


@pytest.mark.parametrize("scale", [0.03, 1.0, 30.0])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_norm_of_what_is_made_again(kind, scale):
    """Its spreads say nothing about the errors of what its input is made of: noise is the same at every scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), kind(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
    x, targets = torch.randn(512, 32), torch.randint(10, (512,))

    def gradients() -> list[Tensor]:
        model.zero_grad()
        F.cross_entropy(model(x), targets).backward()
        return [part.grad.clone() for part in model.parameters()]

    plain, noise = gradients(), []
    with lowtide.compress(model, noise=0.01, remake=True, min_size=0, coder="blocks") as session:
        for _ in range(16):
            lossy = gradients()
            session.step()
            noise.append([float((a - b).square().sum() / b.square().sum()) for a, b in zip(lossy, plain, strict=True)])
        (norm,) = (entry for name, entry in session.ledger.sites.items() if "norm.input" in name)
    assert norm.codec == "again by gelu"
    assert not session.controller.events()
    bottom, _, scales, *_ = torch.tensor(noise[10:]).mean(0)
    assert bottom < 3 * 0.01, "what is asked for; it was 60 times that"
    assert scales < 3 * 0.1
