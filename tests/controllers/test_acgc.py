"""AC-GC: every formula with numbers computed by hand, the guarantee, the schedule."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.bounds import BoundRule
from lowtide.controllers import Keep
from lowtide.controllers._channels import ChannelBounds
from lowtide.controllers.acgc import Acgc, conv_bound, norm_bounds
from lowtide.errors import BoundError, UnknownNameError
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Site
from lowtide.statistics import PROPAGATED, SCALE, WEIGHT, Claim, SiteStatistics, Statistics

CONV, NORM = Site("conv", "convolution", "input"), Site("norm", "native_batch_norm", "input")
LINEAR, NORMAL = Need(Kind.VALUES, "", family="linear"), Need(Kind.VALUES, "", family="norm")
CHANNELS = {
    "scale": [1.0, 2.0],
    "inverse_std": [2.0, 1.0],
    "scale_gradient": [3.0, 0.0],
    "gradient_nonzero": [4.0, 10.0],
    "gradient_peak": [0.5, 0.1],
    "absmax": [2.0, 4.0],
}


def test_convolution():
    """dx^2 = e^2 |gW|^2 / (N C H W u |gY|^2) = 0.5 * 8 / (1000 * 2.25 * 16)."""
    assert conv_bound(0.5, [8.0], [2.25 * 16], 1000) == pytest.approx(math.sqrt(4 / 36000))


def test_several_layers_read_one_tensor():
    """Sums over the layers: 0.5 * (8 + 2) / (1000 * (36 + 4))."""
    assert conv_bound(0.5, [8.0, 2.0], [36.0, 4.0], 1000) == pytest.approx(math.sqrt(5 / 40000))


def test_both_sums_have_a_floor():
    assert conv_bound(0.5, [0.0], [36.0], 1000) == pytest.approx(math.sqrt(0.5e-16 / 36000))
    assert conv_bound(0.5, [8.0], [0.0], 1000) == pytest.approx(math.sqrt(4 / 1e-13))


def test_batch_norm():
    """G = [3^2 + 2^2 4^2 0.5^2 1^2, 0 + 1 10^2 0.1^2 2^2] = [25, 4]; dx^2 = e |gX|^2 M / (2 scale^2 r^4 G), with
    e = 1, |gX|^2 = 0.06, M = 50: 3 / (2 * 1 * 16 * 25) and 3 / (2 * 4 * 1 * 4)."""
    found = norm_bounds(1.0, 0.06, 50, CHANNELS)
    assert found == pytest.approx((math.sqrt(3 / 800), math.sqrt(3 / 32)))


def test_batch_norm_has_a_floor():
    found = norm_bounds(1.0, 1e-12, 50, CHANNELS)
    assert found == (2.0**-8, 2.0**-8), "dx^2 is 2^-16 at least"


def conv(name: str = "conv:convolution.input", leader: str = "", **changes) -> SiteStatistics:
    made = SiteStatistics(
        name, "convolution", "linear", "absolute", "float32", leader or name, 1000,
        samples=10, outputs=8, reuse=2.25, claims=(Claim(WEIGHT, 32.0, 8.0),), gradient=16.0, nonzero=1.0, std=1.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def norm(**changes) -> SiteStatistics:
    name = "norm:native_batch_norm.input"
    made = SiteStatistics(
        name, "native_batch_norm", "norm", "std", "float32", name, 100,
        claims=(Claim(SCALE, 1.0, 1.0), Claim(PROPAGATED, 0.001, 0.06)), gradient=1.0, channels=CHANNELS,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def fed(acgc: Acgc, *batches: list[SiteStatistics]) -> Acgc:
    """Statistics of the steps 0, 100, 200, ..."""
    acgc.bound(CONV, LINEAR), acgc.bound(NORM, NORMAL)
    acgc.bound(Site("left", "convolution", "input"), LINEAR)
    acgc.bound(Site("right", "convolution", "input"), LINEAR)
    for index, sites in enumerate(batches):
        step = index * acgc.period
        assert acgc.wants(step) is not None and acgc.wants(step + 1) is None
        acgc.step(step, None, Ledger())
        acgc.step(step + 1, Statistics(step, {site.site: site for site in sites}), Ledger())
    return acgc


@pytest.mark.parametrize(("form", "norm_error"), [("functional", 1.0), ("performance", 0.25)])
def test_the_two_releases(form, norm_error):
    """At e^2 = 0.5: functional has e = 1 for norms, performance has eps = e^2 / 2 = 0.25."""
    acgc = fed(Acgc(form=form, noise=0.5, checks=0), [conv(), norm()])
    assert acgc.bound(CONV, LINEAR) == BoundRule(math.sqrt(4 / 36000))
    expected = norm_bounds(norm_error, 0.06, 50, CHANNELS)
    assert acgc.bound(NORM, NORMAL) == ChannelBounds(expected)


def test_one_tensor_gets_one_bound():
    left, right = conv("left:convolution.input"), conv("right:convolution.input", leader="left:convolution.input")
    right = dataclasses.replace(right, claims=(Claim(WEIGHT, 32.0, 2.0),), gradient=4.0, reuse=1.0)
    acgc = fed(Acgc(checks=0), [left, right])
    both = [acgc.bound(Site(path, "convolution", "input"), LINEAR) for path in ("left", "right")]
    assert both == [BoundRule(math.sqrt(5 / 40000))] * 2


def test_the_statistical_form():
    """eb = sqrt(3 e^2 |gW|^2 / S) = sqrt(3 * 0.5 * 8 / 32), less what the quantiser leaves unused."""
    acgc = fed(Acgc(form="statistical", checks=0), [conv(), norm()])
    assert acgc.bound(CONV, LINEAR).value == pytest.approx(math.sqrt(12 / 32), rel=0.01)
    rule = acgc.bound(NORM, NORMAL)
    assert rule == BoundRule(4.0, "std"), "sqrt(3 * 0.5 * 0.06 / 0.001) = 9.5 is more than a bound can be"


def test_bounds_are_means_of_the_last_measurements():
    acgc = fed(Acgc(keep=2, checks=0), *([conv(claims=(Claim(WEIGHT, 32.0, energy),))] for energy in (8.0, 18.0, 32.0)))
    unit = math.sqrt(0.5 / 36000)
    assert acgc.bound(CONV, LINEAR).value == pytest.approx(unit * (math.sqrt(18) + math.sqrt(32)) / 2)


def test_before_the_first_measurement_and_without_a_rule_values_are_kept():
    acgc = Acgc()
    pointwise = Site("act", "gelu", "self"), Need(Kind.VALUES, "", family="pointwise")
    assert acgc.bound(CONV, LINEAR) == Keep("acgc: no statistics yet")
    assert acgc.bound(*pointwise) == Keep("acgc: no rule for this op")
    assert Acgc(others="0.1 std").bound(*pointwise) == BoundRule(0.1, "std")


def test_measured_every_hundred_steps():
    acgc, asked = Acgc(), []
    for step in range(350):
        if acgc.wants(step) is not None:
            asked.append(step)
        acgc.step(step, Statistics(step - 1, {"conv:convolution.input": conv()}) if step else None, Ledger())
    assert asked == [0, 100, 200, 300]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"form": "functionel"}, UnknownNameError, "Did you mean 'functional'"),
        ({"noise": -1}, BoundError, "acgc: noise is e\\^2"),
        ({"keep": 0}, BoundError, "keep 1 or more"),
    ],
)
def test_options_without_sense(options, error, message):
    with pytest.raises(error, match=message):
        Acgc(**options)


def test_the_guarantee_holds_for_the_worst_error():
    """|gW' - gW|^2 <= e^2 |gW|^2 for every error within dx, also for one that is made to add up."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, 10, 10, dtype=torch.float64).relu()
    weight = torch.randn(12, 8, 3, 3, dtype=torch.float64, requires_grad=True)
    gy = torch.randn(6, 12, 10, 10, dtype=torch.float64) + 0.5
    (gw,) = torch.autograd.grad(F.conv2d(x, weight, padding=1), weight, gy)
    bound = conv_bound(0.5, [float(gw.square().sum())], [9 * float(gy.square().sum())], x.numel())
    worst = torch.full_like(x, bound)
    for _ in range(20):  # ascend: the error whose gradient points where it already points
        (error,) = torch.autograd.grad(F.conv2d(worst, weight, padding=1), weight, gy)
        worst = bound * torch.nn.grad.conv2d_input(x.shape, error, gy, padding=1).sign()
    (error,) = torch.autograd.grad(F.conv2d(worst, weight, padding=1), weight, gy)
    assert 0 < float(error.square().sum()) <= 0.5 * float(gw.square().sum())


@pytest.mark.parametrize("form", ["functional", "statistical"])
def test_the_guarantee_in_training(form):
    """E|g'|^2 <= (1 + e^2) |g|^2 over seeds of the dither: the statistical form comes near it, the others do not."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
    x, target = torch.randn(32, 3, 8, 8), torch.randint(0, 10, (32,))

    def gradient() -> torch.Tensor:
        model.zero_grad()
        F.cross_entropy(model(x), target).backward()
        return torch.cat([model[index].weight.grad.flatten() for index in (3, 6)])

    exact = gradient()
    squares, added = [], []
    for seed in range(6):
        tide = lowtide.attach(model, "acgc", form=form, noise=0.5, seed=seed)
        for _ in range(2):
            gradient()
            tide.step()
        lossy = gradient()
        squares.append(float(lossy.square().sum() / exact.square().sum()))
        added.append(float((lossy - exact).square().sum() / exact.square().sum()))
        tide.detach()
    # The mean of six: a square of norm 1 + e^2 with a relative spread of a few percent.
    assert sum(squares) / 6 <= 1.5 * 1.05
    if form == "statistical":
        assert sum(added) / 6 == pytest.approx(0.5, rel=0.25)
    else:
        assert 0 < sum(added) / 6 < 0.5 / 100
