"""COMET: every formula with numbers computed by hand, its window, its first period."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import lowtide
from lowtide.bounds import BoundRule
from lowtide.controllers import Keep
from lowtide.controllers.comet import Collected, Comet, assess_activation, assess_gradient, collect
from lowtide.errors import BoundError
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Site
from lowtide.statistics import WEIGHT, Claim, SiteStatistics, Statistics

SITE = Site("conv", "convolution", "input")
NEED = Need(Kind.VALUES, "", family="linear")
LAYER = Collected(samples=16, outputs=8, nonzero=0.25, gradient=6.0, peak=0.5, momentum=2.0)


def test_gradient_assessment():
    """sigma = 0.01 mean|m|."""
    assert assess_gradient(2.0) == 0.02
    assert assess_gradient(2.0, alpha=0.05) == 0.1


def test_activation_assessment_as_published():
    """eb = sigma / (a L sqrt(N R)) = 0.02 / (0.32 * 0.5 * sqrt(16 * 0.25)) = 0.02 / 0.32."""
    assert assess_activation(0.02, LAYER, published=True) == pytest.approx(0.0625)


def test_activation_assessment_with_lambda():
    """lambda^2 = 6 / (16 * 8) = 3 / 64; eb = 0.02 / (lambda / sqrt(3) * sqrt(4)) = 0.02 / (1 / 8 * 2)."""
    assert assess_activation(0.02, LAYER) == pytest.approx(0.08)


def test_without_a_gradient_there_is_no_bound():
    assert assess_activation(0.02, dataclasses.replace(LAYER, gradient=0.0)) == math.inf


def site(energy: float = 3.0, **changes) -> SiteStatistics:
    made = SiteStatistics(
        "conv:convolution.input", "convolution", "linear", "absolute", "float32", "conv:convolution.input", 4096,
        samples=16, outputs=8, claims=(Claim(WEIGHT, 5.0, energy),), gradient=6.0, nonzero=0.25, std=1.0, peak=0.5,
        stepped=energy, momentum=2.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_parameter_collection():
    assert collect(site()) == LAYER
    assert collect(site(momentum=None)) is None
    assert collect(site(claims=())) is None
    assert collect(site(passes=2)).samples == 32


def test_a_scaler_and_clipping_are_divided_out():
    """gY and gW carry a scale of 8 and are not clipped; the optimizer saw gW unscaled and clipped to a half."""
    seen = collect(site(energy=3.0 * 64, gradient=6.0 * 64, peak=0.5 * 8, stepped=3.0 / 4))
    assert seen.gradient == pytest.approx(6.0 / 4)
    assert seen.peak == pytest.approx(0.5 / 2)


def test_lambda_is_the_exact_form():
    """The bound makes the standard deviation of a weight gradient's error sigma, as drawn."""
    torch.manual_seed(0)
    x, gy = torch.randn(64, 40).relu().double(), torch.randn(64, 24).double()
    layer = Collected(64, 24, float((x != 0).double().mean()), float(gy.square().sum()), 0.0, 0.0)
    bound = assess_activation(0.3, layer)
    errors = [gy.t() @ ((torch.rand_like(x) * 2 - 1) * bound * (x != 0)) for _ in range(40)]
    assert float(torch.stack(errors).square().mean().sqrt()) == pytest.approx(0.3, rel=0.02)


def feed(comet: Comet, step: int, **changes) -> None:
    """Statistics of ``step`` arrive at the end of the step after it."""
    comet.bound(SITE, NEED)
    wish = comet.wants(step)
    assert wish is not None and wish.momentum
    comet.step(step, None, Ledger())
    given = Statistics(step, {"conv:convolution.input": site(**changes)})
    comet.step(step + 1, given, Ledger())


def test_the_first_period_is_uncompressed_and_then_bounds_hold():
    comet = Comet(period=100, checks=0)
    assert isinstance(comet.bound(SITE, NEED), Keep)
    assert "first period" in comet.bound(SITE, NEED).reason
    asked = [step for step in range(99) if (wish := comet.wants(step)) is not None and wish.noise]
    assert asked == [98]
    feed(comet, 98)
    assert comet.bound(SITE, NEED) == BoundRule(assess_activation(0.02, LAYER)), "from step 100 on"


def test_the_window_halves_when_a_bound_moves_and_is_restored():
    comet = Comet(period=100, checks=0)
    feed(comet, 98)
    assert comet.window == 100
    feed(comet, 198, momentum=5.0)  # 2.5 times the bound
    assert comet.window == 50
    feed(comet, 248, momentum=2.0)  # and back
    assert comet.window == 25
    feed(comet, 273, momentum=2.5)  # 1.25 times: it has settled
    assert comet.window == 100
    assert comet.wants(373).noise


def test_a_bound_that_moves_exactly_twofold_keeps_the_window():
    comet = Comet(period=100, checks=0)
    feed(comet, 98)
    feed(comet, 198, momentum=4.0)
    assert comet.window == 100


def test_shadows_are_kept_before_an_update():
    comet = Comet(period=100)
    assert comet.wants(65) is None
    assert comet.wants(66).shadow and not comet.wants(66).noise
    assert comet.wants(97).shadow and not comet.wants(97).noise


@pytest.mark.parametrize(
    ("options", "message"),
    [({"alpha": 0}, "comet: alpha is a share"), ({"period": 1}, "comet: period is a number of steps")],
)
def test_options_without_sense(options, message):
    with pytest.raises(BoundError, match=message):
        Comet(**options)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("momentum", [0.9, 0.0], ids=["momentum", "shadow"])
def test_in_training(published, momentum):
    """Bounds from the formula, by hand from the run itself; zeros exact; the report says what was kept and why."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=momentum)
    tide = lowtide.attach(model, "comet", optimizer=optimizer, period=4, published=published, checks=0)
    kept = {}
    model[2].register_full_backward_hook(lambda _, __, out: kept.update(gy=out[0].detach()))
    grads = []
    for step in range(5):
        x = torch.randn(32, 3, 8, 8, generator=torch.Generator().manual_seed(step))
        y = model(x)
        kinds = {entry.name: entry.codec for entry in tide.report().sites}
        assert (kinds["2:convolution.input"] == "kept") == (step < 4)
        optimizer.zero_grad()
        y.square().mean().backward()
        grads.append(model[2].weight.grad.clone())
        optimizer.step()
        if step == 2:
            hidden = model[:2](x).detach()
            gy, ratio = kept["gy"], float((hidden != 0).double().mean())
            if momentum:
                mean = 0.1 * float(optimizer.state[model[2].weight]["momentum_buffer"].abs().mean())
            else:
                mean = float(sum(0.1 * 0.9 ** (2 - i) * g for i, g in enumerate(grads)).abs().mean()) / (1 - 0.9**3)
    slope = (
        0.32 * float(gy.abs().flatten(1).amax(1).mean())
        if published
        else math.sqrt(float(gy.square().sum()) / (32 * 8) / 3)
    )
    rule = tide.controller._rules["2:convolution.input"]
    # the weights moved by one step since, and with them the share of non-zeros
    assert rule.value == pytest.approx(0.01 * mean / (slope * math.sqrt(32 * ratio)), rel=0.02)
    tide.detach()
