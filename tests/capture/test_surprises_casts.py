"""Casts of parameters are made again in backward: only where that gives the very same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import ModifiedError


def _autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def _change(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(2)


def test_a_weight_changed_before_backward_raises_with_a_hint():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    lowtide.attach(model, "exact")
    output = _autocast(model, torch.randn(64, 64))
    _change(model[2].weight)
    with pytest.raises(ModifiedError, match=r"parameter of shape \(64, 64\) whose torch.bfloat16 cast .* recast=False"):
        output.sum().backward()


def test_without_recast_a_weight_may_change_before_backward():
    """As in plain training, where the cast is a copy of its own."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(64, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(_autocast(model, x).float().sum(), x)
    session = lowtide.attach(model, "exact", recast=False)
    output = _autocast(model, x)
    _change(model[2].weight)
    (coded,) = torch.autograd.grad(output.float().sum(), x)
    assert torch.equal(plain, coded)
    # 8 KiB each: two casts of weights, the cast of the batch, the output of relu (as values)
    assert session.ledger.raw_peak == session.ledger.held_peak == 4 * 64 * 64 * 2


def test_with_recast_casts_are_not_held():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(64, 64)
    session = lowtide.attach(model, "exact")
    output = _autocast(model, x)
    assert session.ledger.held == 2 * 64 * 64 * 2
    output.float().sum().backward()


def test_both_calls_of_a_layer_share_a_cast(build, gradients, assert_same):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.linear(self.linear(x)).float()

    model, x = build(forward, linear=nn.Linear(64, 64)), torch.randn(64, 64, requires_grad=True)
    plain = gradients(model, x)
    for recast in (True, False):
        session = lowtide.attach(model, "exact", recast=recast, min_size=0)
        assert_same(plain, gradients(model, x))
        session.detach()


_CASTS = {
    "plain": lambda weight: weight.bfloat16(),
    "transposed, cast": lambda weight: weight.t().bfloat16(),
    "cast, transposed": lambda weight: weight.bfloat16().t(),
    "cast, reshaped": lambda weight: weight.bfloat16().view(-1).view(64, 64),
    "half a weight": lambda weight: torch.cat([weight[:32].bfloat16(), weight[32:].bfloat16()]),
    "laid out anew": lambda weight: weight.t().to(torch.bfloat16, memory_format=torch.contiguous_format),
    "one row repeated": lambda weight: weight[:1].expand(64, 64).bfloat16(),
    "through a narrower type": lambda weight: weight.to(torch.float8_e5m2).bfloat16(),
}


@pytest.mark.parametrize("cast", _CASTS)
def test_any_cast_by_hand_comes_back_as_it_was(build, gradients, assert_same, cast):
    model = build(lambda self, x: (self.first(x).bfloat16() @ _CASTS[cast](self.weight)).float())
    model.first, model.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


def test_a_weight_rounded_to_bfloat16_and_back_stays_rounded(build, gradients, assert_same):
    """Simulated low precision: two casts that end in the parameter's own dtype, with other values."""
    model = build(lambda self, x: F.linear(self.first(x), self.weight.bfloat16().float()))
    model.first, model.weight = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


def test_a_kernel_cast_to_channels_last(build, gradients, assert_same):
    def forward(self, x):
        kernel = self.second.weight.to(torch.bfloat16, memory_format=torch.channels_last)
        return F.conv2d(self.first(x).bfloat16(), kernel).float()

    model, x = build(forward, first=nn.Conv2d(3, 16, 1), second=nn.Conv2d(16, 16, 3)), torch.randn(2, 3, 8, 8)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


def test_a_training_loop_inside_one_autocast_region():
    """Autocast caches casts for the whole region, so the second step runs on casts of the old weights; so must ours."""

    def train(attached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), torch.randn(8, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if attached:
            lowtide.attach(model, "exact", min_size=0)
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                optimizer.zero_grad()
                model(x).float().square().mean().backward()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(train(False), train(True), strict=True))


FROZEN = {
    "linear": (lambda: nn.Linear(64, 48), (64, 64)),
    "linear of three dimensions": (lambda: nn.Linear(64, 48), (4, 16, 64)),
    "square, without a bias": (lambda: nn.Linear(64, 64, bias=False), (64, 64)),
    "conv": (lambda: nn.Conv2d(16, 24, 3, padding=1), (4, 16, 8, 8)),
    "channels_last": (lambda: nn.Conv2d(16, 24, 3).to(memory_format=torch.channels_last), (4, 16, 8, 8)),
    "conv whose input has the shape of its weight": (lambda: nn.Conv2d(3, 16, 3, padding=1), (16, 3, 3, 3)),
    "transposed conv": (lambda: nn.ConvTranspose2d(16, 24, 3), (4, 16, 8, 8)),
}


@pytest.mark.parametrize("name", FROZEN)
def test_casts_of_frozen_weights_are_made_again(name, build, gradients, assert_same):
    """As in LoRA: below a frozen layer there is something to train, and its cast has no trace of the weight."""
    make, shape = FROZEN[name]
    layer, x = make().requires_grad_(False), torch.randn(shape)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x * self.scale).float().square()

    model = build(forward, layer=layer)
    model.scale = nn.Parameter(torch.ones(shape[-1]))
    plain = gradients(model, x)
    session = lowtide.attach(model, "exact", min_size=0, check="full")
    for _ in range(4):  # also when the layer's saves are known by habit
        assert_same(plain, gradients(model, x))
    kept = [entry.reason for entry in session.report().sites]
    assert not any("frozen" in reason for reason in kept), kept
    session.detach()
    session = lowtide.attach(model, "exact", min_size=0, recast=False)
    assert_same(plain, gradients(model, x))
    assert any("cast of a frozen weight" in entry.reason for entry in session.report().sites)


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


def _hooked() -> nn.Module:
    layer = nn.Linear(64, 64)
    layer.register_forward_pre_hook(lambda module, args: (args[0] * torch.ones(64, 64),))
    return layer


@pytest.mark.parametrize(
    "make",
    [lambda: Scaled(64, 64), _hooked, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))],
    ids=["computed", "hooked", "parametrized"],
)
def test_what_only_looks_like_a_frozen_weight_is_kept(make, build, gradients, assert_same):
    layer = make().requires_grad_(False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x * self.scale).float().square()

    model, x = build(forward, layer=layer), torch.randn(64, 64)
    model.scale = nn.Parameter(torch.ones(64))
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))


def test_beside_a_trained_bias_a_cast_is_not_told_from_an_input(build, gradients, assert_same):
    """The input, whose gradient nobody wants, is saved for its shape, and here has the shape of the weight."""
    layer = nn.Conv2d(3, 16, 3, padding=1)
    layer.weight.requires_grad_(False)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x * 1).float().square()

    model, x = build(forward, layer=layer), torch.randn(16, 3, 3, 3)
    plain = gradients(model, x)
    lowtide.attach(model, "exact", min_size=0)
    assert_same(plain, gradients(model, x))
