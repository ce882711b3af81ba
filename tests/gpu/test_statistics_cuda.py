"""Statistics on a device: the formulas with the device's own ops, nothing that waits, a run that is resumed."""

from __future__ import annotations

import copy

import pytest
import torch
from no_waiting import no_waiting
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.gpu


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.RMSNorm(128),
        nn.Linear(128, 8),
    ).cuda()  # fmt: skip


def batch(number: int) -> Tensor:
    return torch.randn(32, 16, 16, 16, generator=torch.Generator().manual_seed(number)).cuda()


def step(model: nn.Module, number: int, bf16: bool) -> None:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        output = model(batch(number))
    output.float().square().mean().backward()


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # RMS norm under autocast
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_measured_over_predicted(bf16):
    """Every layer checked whose input is stored; the mean over these, one draw each, is near one."""
    model = make_net()
    if bf16:
        model.to(memory_format=torch.channels_last)
    tide = lowtide.attach(model, "budget", period=2, checks=100, min_size=0)
    for number in range(9):
        step(model, number, bf16)
        tide.step()
    tide.detach()
    found = {site: item for site, item in tide.report().noise.items() if item.measured is not None}
    assert len(found) >= 5, found
    ratios = [item.measured / item.predicted for item in found.values()]
    assert 0.75 < sum(ratios) / len(ratios) < 1.3, found
    assert tide.controller.events() == []


def test_nothing_waits_while_statistics_are_gathered():
    """Steps 8 and 9 of a run: the first one is measured, the second one is when its numbers have long arrived."""
    model = make_net()
    tide = lowtide.attach(model, "budget", checks=1, min_size=0)
    for number in range(8):
        step(model, number, False)
        tide.step()
    data = batch(8)
    with no_waiting():
        model.zero_grad()
        model(data).square().mean().backward()
        tide._collector.finish(8)
    assert tide._collector._under_way is not None
    tide.detach()


def test_a_resumed_run_has_the_same_bounds():
    straight = make_net()
    tide = lowtide.attach(straight, "budget", period=2, min_size=0)
    for number in range(4):
        step(straight, number, False)
        tide.step()
    resumed = make_net()
    resumed.load_state_dict(straight.state_dict())
    other = lowtide.attach(resumed, "budget", period=2, min_size=0)
    other.load_state_dict(copy.deepcopy(tide.state_dict()))
    for number in range(4, 8):
        for model, session in ((straight, tide), (resumed, other)):
            step(model, number, False)
            session.step()
        grads = [[parameter.grad for parameter in model.parameters()] for model in (straight, resumed)]
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True)), f"step {number}"
        assert tide.controller._rules == other.controller._rules
    tide.detach()
    other.detach()
