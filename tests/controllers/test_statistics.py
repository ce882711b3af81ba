"""What a step tells: under accumulation, scaling, clipping, sharing, freezing, and without an optimizer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT, Statistics, Wish

FIRST, SECOND, THIRD = "0:addmm.mat1", "2:addmm.mat1", "4:addmm.mat1"


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 8))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def last(spying) -> Statistics:
    """Statistics of the step before the last: they are handed over one step later."""
    return spying.given[-1]


def energy(weight: Tensor) -> float:
    return float(weight.grad.double().square().sum())


def by_hand(model: nn.Sequential, inputs: list[Tensor], scale: float = 1.0) -> dict[str, float]:
    """S of the last two layers, from gradients taken apart."""
    found = dict.fromkeys((SECOND, THIRD), 0.0)
    for item in inputs:
        hidden = [item]
        for layer in model:
            hidden.append(layer(hidden[-1]))
            hidden[-1].retain_grad()
        (hidden[-1].square().mean() * scale).backward()
        for name, index in ((SECOND, 2), (THIRD, 4)):
            nonzero = (hidden[index] != 0).sum(1)
            found[name] += float((hidden[index + 1].grad.square().sum(1) * nonzero).sum())
    return found


def test_numbers_of_one_step(mlp, x, spy):
    expected = by_hand(mlp, [x])
    mlp.zero_grad()
    session, spying = spy(mlp)
    mlp(x).square().mean().backward()
    weights = energy(mlp[2].weight), energy(mlp[4].weight)
    session.step()
    assert spying.given == [None]
    session.step()
    sites = last(spying).sites
    assert last(spying).step == 0
    for name, weight in zip((SECOND, THIRD), weights, strict=True):
        claim = sites[name].claim(WEIGHT)
        assert claim.sensitivity == pytest.approx(expected[name], rel=1e-4)
        assert claim.energy == pytest.approx(weight, rel=1e-5)
        assert claim.uses == 1
    hidden = mlp[:4](x).detach()
    assert sites[THIRD].nonzero == pytest.approx(float((hidden != 0).double().mean()), rel=1e-5)
    assert sites[THIRD].std == pytest.approx(float(hidden[hidden != 0].std(correction=0)), rel=1e-4)
    assert (sites[THIRD].samples, sites[THIRD].outputs, sites[THIRD].numel) == (32, 8, 32 * 24)
    assert sites["1:tanh.result"].claim(PROPAGATED) is not None
    assert FIRST not in sites, "the model's input is not ours to store"


def test_nothing_is_measured_unless_asked(mlp, x, spy):
    """No hook is on a weight or a node, in steps without a wish or after detach."""
    session, spying = spy(mlp)
    spying.wish = None
    session.step()
    mlp(x).square().mean().backward()
    assert all(parameter._post_accumulate_grad_hooks is None for parameter in mlp.parameters())
    session.step()
    session.step()
    assert spying.given[-1] is None
    spying.wish = Wish(noise=True)
    session.step()
    mlp(x)
    session.detach()
    assert all(not parameter._post_accumulate_grad_hooks for parameter in mlp.parameters())


def test_a_graph_is_freed_with_its_hooks(mlp, x, spy):
    """A hook that held its own node would keep the graph alive until the collector comes by."""
    spy(mlp, Wish(noise=True, spread=True, peaks=True, channels=True, checks=frozenset([THIRD])))
    gc.collect()
    gc.disable()
    try:
        for trained in (True, False):
            y = mlp(x)
            if trained:
                y.square().mean().backward(retain_graph=True)
            handle = weakref.ref(y.grad_fn._raw_saved_mat1.data)
            assert handle() is not None
            del y
            assert handle() is None
    finally:
        gc.enable()


def test_a_check_lets_the_payload_go(mlp, x, spy):
    """A loss that is kept until the next forward keeps its graph, but not what backward has freed."""
    session, _ = spy(mlp, Wish(noise=True, checks=frozenset([THIRD])))
    y = mlp(x)
    y.square().mean().backward()
    assert session.ledger.held == session.ledger.raw == 0
    assert y.grad_fn is not None


def test_accumulation_sums_over_forwards(mlp, x, spy):
    parts = [x[:10], x[10:]]
    expected = by_hand(mlp, parts)
    mlp.zero_grad()
    session, spying = spy(mlp)
    for part in parts:
        mlp(part).square().mean().backward()
    total = energy(mlp[4].weight)
    session.step()
    session.step()
    site = last(spying).sites[THIRD]
    assert site.claim(WEIGHT).sensitivity == pytest.approx(expected[THIRD], rel=1e-4)
    assert site.claim(WEIGHT).energy == pytest.approx(total, rel=1e-5)
    assert site.passes == 2


def test_two_forwards_before_one_backward(mlp, x, spy):
    expected = by_hand(mlp, [x[:16], x[16:]])
    mlp.zero_grad()
    session, spying = spy(mlp)
    (mlp(x[:16]).square().mean() + mlp(x[16:]).square().mean()).backward()
    total = energy(mlp[4].weight)
    session.step()
    session.step()
    claim = last(spying).sites[THIRD].claim(WEIGHT)
    assert claim.sensitivity == pytest.approx(expected[THIRD], rel=1e-4)
    assert claim.energy == pytest.approx(total, rel=1e-5)


def test_a_forward_without_backward_counts_nothing(mlp, x, spy):
    session, spying = spy(mlp)
    mlp(x)
    mlp(x[:8]).square().mean().backward()
    total = energy(mlp[4].weight)
    session.step()
    session.step()
    site = last(spying).sites[THIRD]
    assert site.passes == 1
    assert site.claim(WEIGHT).energy == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("to_none", [True, False], ids=["set to none", "zeroed"])
def test_a_step_that_a_scaler_skipped_leaves_no_trace(mlp, x, spy, to_none):
    """Inf in the first try: the scaler does not step and lowers its scale; the second try is the step."""
    expected = by_hand(mlp, [x])
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, backoff_factor=2.0**-97)
    session, spying = spy(mlp, Wish(noise=True, momentum=True), optimizer=optimizer)
    for factor in (2.0**60, 1.0):
        optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(mlp(x).square().mean() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(spying.given) == 1, "the first try was no step"
    total = energy(mlp[4].weight)
    session.step()
    site = last(spying).sites[THIRD]
    assert last(spying).is_finite
    assert site.claim(WEIGHT).sensitivity == pytest.approx(expected[THIRD] * 64, rel=1e-4)
    assert site.claim(WEIGHT).energy == pytest.approx(total * 64, rel=1e-4)
    assert site.stepped == pytest.approx(total, rel=1e-4), "as the optimizer saw it"


def test_a_scaler_that_skips_inside_the_optimizer_is_recognised(mlp, x, spy):
    """Fused optimizers step under a scaler and do nothing if it found inf; what is not finite then is no alarm."""
    optimizer = torch.optim.SGD(mlp.parameters(), 0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    session, spying = spy(mlp, optimizer=optimizer)
    scaler.scale(mlp(x).square().mean() * 2.0**60).backward()
    scaler.step(optimizer)
    session.step()
    assert last(spying).is_skipped and not last(spying).is_finite


def test_clipping_does_not_change_shares(mlp, x, spy):
    """The weight's gradient is read before it is clipped, like the gradients that its noise comes from."""
    session, spying = spy(mlp, Wish(noise=True, momentum=True))
    mlp(x).square().mean().backward()
    before = energy(mlp[4].weight)
    nn.utils.clip_grad_norm_(mlp.parameters(), 1e-3)
    after = energy(mlp[4].weight)
    session.step()
    session.step()
    site = last(spying).sites[THIRD]
    assert after < before / 2
    assert site.claim(WEIGHT).energy == pytest.approx(before, rel=1e-5)
    assert site.stepped == pytest.approx(after, rel=1e-5)


def test_frozen_layers_and_shared_weights(x, spy):
    """A frozen layer stores no input; one weight in two places has two sites that feed one gradient."""
    torch.manual_seed(0)
    shared = nn.Linear(24, 24)
    model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(24, 8))
    model[6].weight.requires_grad_(False)
    session, spying = spy(model)
    model(x).square().mean().backward()
    total = energy(shared.weight)
    session.step()
    session.step()
    sites = last(spying).sites
    uses = [site for name, site in sites.items() if ":addmm.mat1" in name]
    assert [site.site for site in uses] == ["2:addmm.mat1", "2:addmm.mat1#1"]
    for site in uses:
        assert site.claim(WEIGHT).uses == 2
        assert site.claim(WEIGHT).energy == pytest.approx(total, rel=1e-5)
    assert uses[0].claim(WEIGHT).weight == uses[1].claim(WEIGHT).weight


def test_a_batch_norm_finds_the_layer_below_in_every_branch(spy):
    """Two branches before their sum: by the time a norm's save has a name, the layer of the other one has run."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
            self.side, self.side_norm = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            out = self.norm(self.conv(torch.relu(x)))
            out += self.side_norm(self.side(torch.tanh(x)))
            return torch.relu(out)

    model = nn.Sequential(nn.Conv2d(3, 8, 1), Block())
    session, spying = spy(model)
    model(torch.randn(4, 3, 8, 8)).square().mean().backward()
    session.step()
    session.step()
    sites = last(spying).sites
    for layer, norm in (("conv", "norm"), ("side", "side_norm")):
        own = sites[f"1.{layer}:convolution.input"].claim(WEIGHT)
        below = sites[f"1.{norm}:native_batch_norm.input"].claim(BELOW)
        assert below is not None, norm
        assert (below.weight, below.uses, below.energy) == (own.weight, 2, own.energy)


def test_sites_of_one_tensor_know_each_other(spy):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.stem(x))
            return self.left(hidden) + self.right(hidden)

    model = Two()
    session, spying = spy(model)
    model(torch.randn(8, 16)).sum().backward()
    session.step()
    session.step()
    sites = last(spying).sites
    assert sites["left:addmm.mat1"].leader == sites["right:addmm.mat1"].leader == "(model):tanh.result"


def test_convolutions_and_norms(spy):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.LayerNorm(12 * 9),
    )  # fmt: skip
    names = ("1:native_batch_norm.input", "3:convolution.input", "6:native_layer_norm.input")
    wish = Wish(noise=True, peaks=True, channels=True, checks=frozenset(names))
    session, spying = spy(model, wish, linear="0.2 std", norm="0.2 std")
    x = torch.randn(16, 3, 8, 8)
    kept: dict[str, Tensor] = {}
    model[3].register_full_backward_hook(lambda _, __, out: kept.update(gy=out[0].detach()))
    model[1].register_full_backward_hook(lambda _, __, out: kept.update(norm=out[0].detach()))
    (model(x).square() * torch.rand(108)).mean().backward()
    session.step()
    session.step()
    norm, conv, rows = (last(spying).sites[name] for name in names)
    assert (norm.unit, conv.unit, rows.unit) == ("std", "absolute", "std")
    assert [claim.kind for claim in norm.claims] == [claim.kind for claim in rows.claims] == [SCALE, PROPAGATED]
    assert (conv.outputs, conv.reuse, conv.samples) == (12, 9 / 4, 16)
    assert conv.peak == pytest.approx(float(kept["gy"].abs().flatten(1).amax(1).mean()), rel=1e-5)
    assert norm.channels["gradient_peak"] == pytest.approx(kept["norm"].abs().amax((0, 2, 3)).tolist(), rel=1e-5)
    assert norm.channels["gradient_nonzero"] == (kept["norm"] != 0).sum((0, 2, 3)).tolist()
    assert norm.channels["scale_gradient"] == pytest.approx(model[1].weight.grad.tolist(), rel=1e-5)
    assert norm.channels["absmax"] == pytest.approx(model[0](x).abs().amax((0, 2, 3)).tolist(), rel=1e-5)
    assert all(site.error is not None and site.error > 0 for site in (norm, conv, rows))


def test_a_bfloat16_forward(spy):
    """Statistics in float32, and the weight found behind its cast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
    session, spying = spy(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(32, 16))
    y.float().square().mean().backward()
    total = energy(model[2].weight)
    session.step()
    session.step()
    site = last(spying).sites["2:addmm.mat1"]
    assert site.dtype == "bfloat16"
    assert site.claim(WEIGHT).energy == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_net_of_one_dtype(spy, dtype):
    """Parameters and a norm's statistics in 16 bits, too: sums are taken in float32, and agree with float64."""

    def statistics(dtype: torch.dtype) -> Statistics:
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)
        model = nn.Sequential(*layers).to(dtype)
        session, spying = spy(model)
        model(torch.randn(16, 3, 8, 8).to(dtype)).square().mean().backward()
        session.step()
        session.step()
        session.detach()
        return last(spying)

    found, exact = statistics(dtype).sites, statistics(torch.float64).sites
    claims = {(name, claim.kind): claim for name, site in found.items() for claim in site.claims}
    assert len(claims) == 5
    for (name, kind), claim in claims.items():
        reference = exact[name].claim(kind)
        assert claim.gain == pytest.approx(reference.gain, rel=0.1), (name, kind)


def test_gradients_that_go_elsewhere_are_not_mistaken_for_zero(mlp, x, spy):
    """``torch.autograd.grad`` adds to no weight: there is no energy to compare with, so there is no claim."""
    session, spying = spy(mlp)
    torch.autograd.grad(mlp(x).square().mean(), list(mlp.parameters()))
    session.step()
    session.step()
    assert last(spying).sites[THIRD].claims == ()
    assert last(spying).sites[THIRD].gradient > 0


def test_a_norm_whose_scale_gets_no_gradient(spy):
    """``torch.autograd.grad`` of a weight below: what the norm's formula reads is not there, and nobody stumbles."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4))
    session, spying = spy(model)
    torch.autograd.grad((model(torch.randn(4, 3, 8, 8)) ** 3).mean(), [model[0].weight])
    session.step()
    session.step()
    assert all(site.claim(PROPAGATED) is None for site in last(spying).sites.values())


def test_a_loss_is_handed_over_one_step_later(mlp, spy):
    session, spying = spy(mlp)
    session.step(torch.tensor(2.5))
    session.step()
    assert last(spying).loss == 2.5
    session.watch(torch.tensor(1.5, requires_grad=True))
    session.step()
    session.step()
    assert last(spying).loss == 1.5


def test_statistics_under_way_are_part_of_the_state(mlp, x, spy):
    copied = copy.deepcopy(mlp)
    session, spying = spy(mlp, Wish(noise=True, spread=True, channels=True))
    mlp(x).square().mean().backward()
    session.step(torch.tensor(3.0))
    state = session.state_dict()
    session.step()
    straight = last(spying)
    other, spying = spy(copied)
    other.load_state_dict(state)
    other.step()
    assert last(spying) == straight
    assert last(spying).loss == 3.0


def test_a_functional_model_without_modules(spy):
    """``compress`` without a model: sites are named by their ops alone."""
    weight = nn.Parameter(torch.randn(8, 16))
    x = torch.randn(4, 16, requires_grad=True)
    with lowtide.compress(None, "budget", min_size=0) as session:
        F.linear(torch.tanh(x), weight).square().sum().backward()
        session.step()
        session.step()
    assert session.report().noise["(model):mm.self"].predicted > 0
