"""Products are made again from their factors: norms that are written out, gates, and what they lead to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_ops import device_ops  # noqa: F401
from test_makers import distance, gradients, saved
from torch import Tensor, nn

import lowtide
from lowtide.capture.formulas import Formula
from lowtide.capture.handles import Handle, Passed
from lowtide.capture.makers import Maker, find
from lowtide.codecs.sz import Sz
from lowtide.errors import ModifiedError
from lowtide.session import Session

NAMES = ("norm", "gate", "up", "down")


class Norm(nn.Module):
    """An RMS norm as it is often written: in float32, back, and times a scale."""

    def __init__(self, width: int, *, shifted: bool = False) -> None:
        super().__init__()
        self.weight, self.shifted = nn.Parameter(1 + 0.3 * torch.randn(width)), shifted

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.shifted:
            return (normed * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normed.to(x.dtype)


class Gated(nn.Module):
    """A feed-forward part with a gate."""

    def __init__(self, act: nn.Module | None = None, *, shifted: bool = False, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Linear(width, width), Norm(width, shifted=shifted)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.act, self.down = act or nn.SiLU(), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(x)
        return x + self.down(self.act(self.gate(y)) * self.up(y))


def make_input() -> Tensor:
    return torch.randn(4, 16, 64, generator=torch.Generator().manual_seed(1))


def codecs_of(session: Session) -> dict[str, str]:
    """By layer, what holds the input of its weight."""
    sites = session.ledger.sites.items()
    return {name.partition(":")[0]: entry.codec for name, entry in sites if name.endswith(":mm.self")}


def test_a_norm_that_is_written_out_leads_to_its_input() -> None:
    x, weight = torch.randn(4, 8, 16, requires_grad=True), nn.Parameter(torch.randn(16))
    with saved(x):
        root = x * 1
        rows = torch.rsqrt(root.square().mean(-1, keepdim=True))
        normed = root * rows
        scaled = weight * normed.bfloat16().view(32, 16)
        maker = find(scaled.view(4, 8, 16))
        assert find(normed).formula == Formula("mul", (0,), (torch.float32,), (0,))
    assert isinstance(maker, Maker) and maker.op == "mul" and len(maker.sources) == 1
    assert maker.formula.inputs == (Formula("mul", (0,), (torch.float32,), (0,)),)
    assert maker.formula.dtypes == (torch.bfloat16,) and maker.formula.shape == (32, 16)
    assert [type(part) for part in maker.parts] == [Handle, Passed]
    parts = [lambda: rows.detach(), lambda: weight.detach()]
    assert torch.equal(maker.formula.run([root.detach()], parts, torch.float32), scaled.detach().float())


def test_a_frozen_scale_does_not_end_the_way() -> None:
    """What a frozen scale multiplies is not saved: the factor before it is."""
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    with saved(x):
        rows = (x * 1).square().mean(-1, keepdim=True)
        maker = find(((x * 1) * rows) * weight)
        alone = find((x * 1) * weight)
    assert maker is not None and len(maker.parts) == 2 and len(maker.sources) == 1
    assert alone is None, "its one input is not saved"


@pytest.mark.parametrize("act", [F.silu, F.gelu, lambda x: x], ids=["silu", "gelu", "none"])
def test_the_gains_of_a_gate_are_mean_squares_of_its_slopes(act: Any) -> None:
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    with saved(x):
        maker = find(act(2 * x) * (3 * x))
    assert maker is not None and len(maker.sources) == 2
    one, other = (2 * torch.randn(1000, dtype=torch.float64, requires_grad=True) for _ in range(2))
    slopes = torch.autograd.grad((act(one) * other).sum(), (one, other))
    found = maker.gains([one.detach(), other.detach()])
    expected = [float(slope.square().mean()) for slope in slopes]
    assert [float(gain) for gain in found] == pytest.approx(expected, rel=1e-9)


def test_the_gain_of_a_norm_is_that_of_both_factors() -> None:
    """An error of variance 1 in the input, as it comes out: 2 % is four times what 2**17 values leave to chance."""
    x, weight = torch.randn(64, 128, dtype=torch.float64, requires_grad=True), nn.Parameter(torch.randn(128).double())
    scale = 1 + torch.rand(64, 1, dtype=torch.float64)

    def pack(tensor: Tensor) -> Passed:
        return Passed(tensor, "") if tensor.numel() < 64 * 128 else saved_handle(tensor)

    def saved_handle(tensor: Tensor) -> Any:
        from lowtide.records import TensorSpec

        return Handle(TensorSpec.of(tensor), "", "", is_leaf=False)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: x):
        maker = find(weight * ((x * 1) * (scale.clone().requires_grad_() * 1)))
    assert maker is not None
    errors = torch.randn(16, 64, 128, dtype=torch.float64)
    seen = (weight * (errors * scale)).detach().square().mean()
    assert float(maker.gains([x.detach()])[0]) == pytest.approx(float(seen), rel=0.02)


def test_what_is_not_made_of_its_factors_alone() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with saved(x):
        a, b = x * 1, x * 2
        assert find(a * b) is not None
        assert find(a * 2.0) is None and find(a * torch.ones(8, 8)) is None, "only one factor is saved"
        assert find(a * b.t()) is None, "its factors lie in another order"
        assert find((a * b)[:4]) is None and find((a * b)[:]) is not None
        part = (a * b)[:, :1] * torch.ones(8).requires_grad_().mul(1)
        assert part.shape == a.shape and find(part) is None, "a part that is broadcast again"
        outer = (x[:, :1] * 1) * (x[:1] * 1)
        assert outer.shape == x.shape and find(outer) is None
        deep = a
        for _ in range(6):
            deep = deep * torch.ones(8).requires_grad_().mul(1)
        found = find(deep)
        assert found is not None and len(found.parts) == 4, "not farther than four ops"


def test_a_factor_that_was_changed_is_where_the_way_ends() -> None:
    class Changed(Norm):
        def forward(self, x: Tensor) -> Tensor:
            normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            normed.detach().mul_(0.5)  # which the graph does not see
            return self.weight * normed

    model = Gated()
    model.norm = Changed(64)
    x = make_input()
    plain, _ = gradients(model, x)
    again, session = gradients(model, x, method="exact", remake=True)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert codecs_of(session)["gate"] == "again by mul"  # of the changed one, which is kept


def test_a_function_whose_result_was_changed_is_not_run_again() -> None:
    class Halved(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            made = super().forward(x)
            made.detach().mul_(0.5)
            return made

    model, x = Gated(Halved()), make_input()
    plain, _ = gradients(model, x)
    again, session = gradients(model, x, method="exact", remake=True)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert codecs_of(session)["down"] == "again by mul"  # of what was changed, which is kept


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU("tanh"), nn.Identity()], ids=["silu", "gelu", "bilinear"])
def test_exact_inputs_give_the_same_bits(act: nn.Module, shifted: bool) -> None:
    model, x = Gated(act, shifted=shifted), make_input()
    plain, _ = gradients(model, x)
    again, session = gradients(model, x, method="exact", remake=True)
    assert all(torch.equal(a, b) for a, b in zip(again, plain, strict=True))
    assert codecs_of(session) == {"gate": "again by mul", "up": "again by mul", "down": "again by mul"}
    _, before = gradients(model, x, method="exact")
    # the norm's two results, 64 wide, and two gates of 128: the function's result and the product
    functions = not isinstance(act, nn.Identity)
    assert before.ledger.held_peak - session.ledger.held_peak == 4 * 4 * 16 * (2 * 64 + (1 + functions) * 128)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_stored_inputs_serve_all(dtype: torch.dtype | None) -> None:
    """Three tensors are stored. The norm's input is decoded for all that is made of it, and for the square of it once
    more, the others once. Under autocast either linear layer has a cast of its own."""
    model, x = Gated(), make_input()
    decoded = []
    decode = Sz.decode
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        patch.setattr(Sz, "decode", lambda self, encoded: decoded.append(encoded.spec.shape) or decode(self, encoded))
        plain, _ = gradients(model, x)
        bounds = dict.fromkeys(("linear", "product", "pointwise"), "0.2 std")
        usual, before = gradients(model, x, steps=1, method="fixed", **bounds)
        decoded.clear()
        again, session = gradients(model, x, steps=1, method="fixed", remake=True, **bounds)
    assert codecs_of(session) == {"gate": "again by mul", "up": "again by mul", "down": "again by mul"}
    assert sorted(shape for shape in decoded if len(shape) == 3) == [(4, 16, 64)] * 2 + [(4, 16, 128)] * 2
    assert 0 < distance(again, plain) < 1.6 * distance(usual, plain) < 0.3
    assert session.ledger.held_peak < 0.66 * before.ledger.held_peak
    reasons = {name: entry.reason for name, entry in session.ledger.sites.items()}
    assert reasons["down:mm.self"] == "made of act:silu.self and (model):mul.other"


def test_errors_are_those_of_both_factors() -> None:
    """|error of a product| <= eb |u f'(g)| + eb |f(g)| + eb^2 |f'|."""
    model, x = Gated(), make_input()
    seen: dict[str, Tensor] = {}
    for name in ("gate", "up"):
        model.get_submodule(name).register_forward_hook(lambda _, given, made, name=name: seen.update({name: made}))
    model.down.register_forward_pre_hook(lambda _, given: seen.update({"down": given[0].detach()}))
    bound = 0.02
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", linear=bound, product=bound,
                             pointwise=bound, remake=True)  # fmt: skip
    original, got = Handle.restore, []

    def restore(self: Handle) -> Tensor:
        tensor = original(self)
        if self.name == "down:mm.self":
            got.append(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handle, "restore", restore)
        model(x * 1.0).square().sum().backward()
    session.detach()
    g, u = seen["gate"].detach(), seen["up"].detach()
    limit = bound * (1.1 * u.abs() + F.silu(g).abs() + 1.1 * bound) + 1e-6
    error = (got[0].view(seen["down"].shape) - seen["down"]).abs()
    assert bool((error <= limit).all()) and float((error / limit).max()) > 0.5


def test_the_noise_that_budget_predicts_is_the_noise_that_is_measured() -> None:
    """Of layers whose inputs are made again, over 40 steps, to a quarter; gates have noise from above, too."""
    model, x = Gated(), torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(1))
    tide = lowtide.attach(model, "budget", min_size=0, noise=0.01, coder="blocks", period=8)
    plain, _ = gradients(Gated(), x, steps=1)
    named = dict(zip(dict(model.named_parameters()), plain, strict=True))
    noise: dict[str, float] = {}
    for step in range(64):
        model.zero_grad()
        (model(x * 1.0) - 1).square().sum().backward()
        if step >= 24:
            for name in ("gate", "up", "down"):
                error = model.get_submodule(name).weight.grad - named[f"{name}.weight"]
                share = float(error.square().sum() / named[f"{name}.weight"].square().sum())
                noise[name] = noise.get(name, 0.0) + share / 40
        tide.step()
    told = tide.report().noise
    tide.detach()
    parts = {name: [site for site in told if site.startswith(f"{name}:mm.self")] for name in noise}
    assert [len(parts[name]) for name in ("gate", "up", "down")] == [1, 1, 2]
    for name, sites in parts.items():
        predicted = sum(told[site].predicted for site in sites)
        assert predicted < 0.0085, name
        assert noise[name] > 0.75 * predicted, (name, noise[name], predicted)
    assert noise["down"] < 1.25 * sum(told[site].predicted for site in parts["down"])


def test_a_scale_that_changed_is_noticed() -> None:
    model = Gated()
    session = lowtide.attach(model, "fixed", min_size=0, coder="blocks", remake=True)
    loss = model(make_input()).square().sum()
    with torch.no_grad():
        model.norm.weight.add_(1)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        loss.backward()
    session.detach()


def test_a_rule_for_a_factor_is_obeyed() -> None:
    """A codec without a bound promises nothing about what is made of its values; what is kept is exact."""
    model, x = Gated(), make_input()
    for rule, codec in (({"codec": "cast"}, "sz"), ({"keep": True}, "again by mul")):
        _, session = gradients(model, x, method="fixed", remake=True, rules=[{"path": "act", **rule}])
        assert codecs_of(session)["down"] == codec
    _, session = gradients(model, x, method="fixed", remake=True, rules=[{"path": "down", "bound": 0.01}])
    assert codecs_of(session) == {"gate": "again by mul", "up": "again by mul", "down": "sz"}


@pytest.mark.usefixtures("device_ops")
def test_a_fused_norm_of_rows() -> None:
    """The op that a GPU has for it."""

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(1 + 0.3 * torch.randn(64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.aten._fused_rms_norm(x, [64], self.weight, 1e-6)[0]

    model, x = Gated(), make_input()
    weight = model.norm.weight
    model.norm = Fused()
    model.norm.weight = weight
    plain, _ = gradients(model, x)
    again, session = gradients(model, x, method="fixed", remake=True, norm="0.05 std")
    assert codecs_of(session)["gate"] == "again by rms_norm"
    assert 0 < distance(again, plain) < 0.1
