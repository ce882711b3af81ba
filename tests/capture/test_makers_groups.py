"""What group norms have made is made again in backward, and what SiLU made of it; channels may come last in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.capture.handles import Handle, Passed
from lowtide.capture.makers import find
from lowtide.errors import ModifiedError
from lowtide.kernels import _normalise
from lowtide.records import TensorSpec

LAYOUTS = [torch.contiguous_format, torch.channels_last]
Net = Callable[..., nn.Sequential]


@pytest.fixture
def net() -> Net:
    """Convolutions, group norms and SiLU, as diffusion models have them."""

    def make(layout: torch.memory_format = torch.contiguous_format, norm: bool = True) -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(2):
            between = [nn.GroupNorm(4, 16)] if norm else []
            layers += [*between, nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)]
        model = nn.Sequential(*layers)
        for layer in model:
            if isinstance(layer, nn.GroupNorm):
                nn.init.normal_(layer.weight, 1.0, 0.3)
                nn.init.normal_(layer.bias)
        return model.to(memory_format=layout)

    return make


def gradients(model: nn.Module, layout: torch.memory_format) -> list[Tensor]:
    model.zero_grad()
    x = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(1)).to(memory_format=layout)
    y = model(x)
    (y - torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def codecs(session: lowtide.Session) -> dict[str, str]:
    return {name: entry.codec for name, entry in session.ledger.sites.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("channels", [8, 24])
def test_groups_with_given_statistics(layout, channels):
    x = (3 * torch.randn(2, channels, 5, 6, dtype=torch.float64) + 2).to(memory_format=layout)
    scale, shift = torch.randn(2, channels, dtype=torch.float64)
    rows = x.reshape(2, 4, -1)
    mean, inverse_std = rows.mean(-1), (rows.var(-1, correction=0) + 1e-5).rsqrt()
    got = _normalise.groups(x, mean, inverse_std, scale, shift, torch.float64)
    assert torch.allclose(got, F.group_norm(x, 4, scale, shift, 1e-5), rtol=0, atol=1e-12)
    assert got.stride() == x.stride()
    for dtype in (torch.float32, torch.bfloat16):
        given = [part.to(dtype) for part in (x, mean, inverse_std, scale, shift)]
        exact = _normalise.groups(*[part.double() for part in given], torch.float64)
        got = _normalise.groups(*given, dtype)
        limit = torch.finfo(dtype).eps / 2 * exact.abs() + 2 * 32 * torch.finfo(torch.float32).eps
        assert got.dtype is dtype and bool(((got.double() - exact).abs() <= limit).all())


def pack(tensor: Tensor) -> Handle | Passed:
    if isinstance(tensor, nn.Parameter):
        return Passed(tensor, "")
    return Handle(TensorSpec.of(tensor), "", "", tensor.grad_fn is None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_made_a_tensor(layout):
    x = torch.randn(2, 8, 6, 6).to(memory_format=layout).requires_grad_()
    norm, bare = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8, affine=False)
    frozen = nn.GroupNorm(4, 8)
    frozen.bias.requires_grad_(False)
    nn.init.normal_(norm.weight)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda handle: x):
        maker = find(norm(x * 1))
        assert maker is not None and maker.op == "group_norm" and maker.sources[0].spec == TensorSpec.of(x)
        assert find(bare(x * 1)) is None and find(frozen(x * 1)) is None, "nobody saves their shift"
        assert [find(y).op for y in (F.silu(x * 1), F.gelu(x * 1), F.silu(x * 1) * (x + 1))] == ["silu", "gelu", "mul"]
        turned = F.silu(x * 1).transpose(1, 2)
        assert find(turned) is None, "its values lie otherwise than those of what made it"
    gain = float(maker.gains([x.detach()])[0])
    assert gain == pytest.approx(float(norm.weight.detach().square().mean()), rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_norms_input_is_stored(net, layout):
    model = net(layout)
    plain, noise = gradients(model, layout), []
    with lowtide.compress(model, min_size=0, check="full", coder="blocks") as session:
        for _ in range(12):
            lossy = gradients(model, layout)
            session.step()
            pairs = list(zip(lossy, plain, strict=True))
            noise.append(sum(((a - b).square().sum() for a, b in pairs)) / sum(b.square().sum() for b in plain))
        found = codecs(session)
    for number in (1, 4):
        assert found[f"{number}:native_group_norm.input"] == "sz"
        assert found[f"{number + 1}:silu.self"] == "again by group_norm"
        assert found[f"{number + 2}:convolution.input"] == "again by silu"
    assert 0.001 < float(torch.stack(noise[8:]).mean()) < 0.045, "0.03 is allowed; four draws"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_inputs_give_the_same_bits_in_any_layout(net, layout):
    model = net(layout, norm=False)
    plain = gradients(model, layout)
    with lowtide.compress(model, "exact", remake=True, min_size=0, check="full") as session:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, layout), strict=True))
        assert codecs(session)["2:convolution.input"] == "again by silu"


def test_exact_norms_are_not_made_again(net):
    model = net()
    plain = gradients(model, torch.contiguous_format)
    with lowtide.compress(model, "exact", remake=True, min_size=0, check="full") as session:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(model, torch.contiguous_format), strict=True))
        assert codecs(session)["2:silu.self"] == "kept"


def test_a_shift_that_changed_is_noticed(net):
    model = net()
    with lowtide.compress(model, "fixed", remake=True, min_size=0):
        loss = model(torch.randn(8, 3, 12, 12)).square().sum()
        with torch.no_grad():
            model[1].bias.add_(1.0)
        with pytest.raises(ModifiedError, match="modified by an inplace operation"):
            loss.backward()


class Gate(nn.Module):
    """As in diffusion models: one product makes both halves, which are views with gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.both, self.out = nn.Linear(16, 32), nn.Linear(32, 128), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.both(self.stem(x)).chunk(2, -1)
        return self.out(hidden * F.gelu(gate))


@pytest.mark.parametrize("shape", [(64, 16), (4, 16, 16)])
def test_halves_of_one_product_make_a_gate(shape):
    torch.manual_seed(0)
    model, x = Gate(), torch.randn(shape)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    with lowtide.compress(model, "exact", remake=True, min_size=0, check="full") as session:
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))
        assert codecs(session)["out:addmm.mat1"] == "again by mul"
    with lowtide.compress(model, "fixed", remake=True, min_size=0, check="full", coder="blocks") as session:
        lossy = gradients()
        found = codecs(session)
    assert found["out:addmm.mat1"] == "again by mul"
    assert (found["(model):gelu.self"], found["(model):mul.other"]) == ("sz", "again by gelu")
    error = sum(float((a - b).square().sum()) for a, b in zip(lossy, plain, strict=True))
    assert error < 0.03 * sum(float(part.square().sum()) for part in plain)
