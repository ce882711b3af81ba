"""The pieces that controllers are made of: levels, sharing, the safety net, momentum."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn

from lowtide import codecs
from lowtide.bounds import BoundRule
from lowtide.capture.gradients import Collector
from lowtide.capture.momentum import Momentum
from lowtide.controllers import Keep, _levels
from lowtide.controllers._channels import ChannelBounds
from lowtide.controllers._safety import SafetyNet
from lowtide.controllers._sharing import Part, divide
from lowtide.errors import BoundError
from lowtide.records import Bound, Kind, Need, Per
from lowtide.statistics import Wish


def test_levels_are_powers_of_the_fourth_root_of_two_not_above():
    assert _levels.quantise(1.0) == 1.0
    assert _levels.quantise(1.18) == 1.0
    assert _levels.quantise(1.19) == 2**0.25
    assert _levels.quantise(0.3) == 2**-1.75
    for exponent in range(-40, 40):
        assert _levels.quantise(2.0 ** (exponent / 4)) == 2.0 ** (exponent / 4), "a level is its own level"


def test_bounds_settle_on_the_nearest_level():
    assert _levels.settle(1.09, None) == 1.0
    assert _levels.settle(1.1, None) == 2**0.25
    assert _levels.settle(0.3, None) == 2**-1.75
    for exponent in range(-40, 40):
        level = 2.0 ** (exponent / 4)
        assert _levels.settle(level, None) == _levels.settle(level, 2 * level) == level, "a level is its own level"
    errors = [math.log2(_levels.settle(2 ** (n / 1000), None)) - n / 1000 for n in range(1000)]
    assert abs(sum(errors)) < 0.2, "as often above as below"


def test_a_bound_stays_while_it_is_less_than_a_level_away():
    """Whatever lies between two levels does not go back and forth."""
    assert _levels.settle(2**0.19, 1.0) == _levels.settle(2**-0.19, 1.0) == 1.0
    assert _levels.settle(2**0.21, 1.0) == 2**0.25
    assert _levels.settle(2**-0.21, 1.0) == 2**-0.25
    value, moves = 1.0, 0
    for n in range(100):
        after = _levels.settle(2 ** (0.125 + 0.06 * (-1) ** n), value)
        moves, value = moves + (after != value), after
    assert moves == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_variance_is_that_of_the_quantiser(dtype):
    """Uniform within a little less than the bound: a sixteenth less in bfloat16."""
    x = torch.randn(1 << 16).to(getattr(torch, dtype))
    codec = codecs.create("sz")
    error = codec.decode(codec.encode(x, Bound.absolute(0.5))).double() - x.double()
    assert float(error.square().mean()) == pytest.approx(_levels.variance(0.5, dtype), rel=0.02)
    assert _levels.variance(_levels.bound_for(0.01, dtype), dtype) == pytest.approx(0.01)


def test_an_amount_is_divided_by_size():
    assert divide(1.0, [Part("a", 10, 1), Part("b", 10, 3)]) == {"a": 0.25, "b": 0.75}


def test_what_one_cannot_use_goes_to_the_others():
    shares = divide(1.0, [Part("a", 0.1, 2), Part("b", 10, 1), Part("c", 10, 1)])
    assert shares == pytest.approx({"a": 0.1, "b": 0.45, "c": 0.45})
    assert divide(1.0, [Part("a", 0.1, 1), Part("b", 0.2, 1)]) == {"a": 0.1, "b": 0.2}


def make_net(**options) -> SafetyNet:
    return SafetyNet(**{"factor": 4.0, "pause": 10, "retreat": "exact", **options})


def test_a_noisy_layer_retreats_and_returns(caplog):
    net = make_net()
    assert not net.check("a", 0.039, 0.01, 5)
    with caplog.at_level(logging.WARNING, logger="lowtide"):
        assert net.check("a", 0.05, 0.01, 5)
    assert "a: measured noise 0.05 is more than 4 times its share 0.01" in caplog.text
    assert isinstance(net.holds("a"), Keep) and "safety net" in net.holds("a").reason
    assert net.holds("b") is None
    assert not net.advance(14)
    assert net.advance(15)
    assert net.holds("a") is None
    assert len(net.events) == 2 and "back from exact storage" in net.events[1]


def test_a_measurement_that_is_no_number_counts_as_noisy():
    assert make_net().check("a", math.nan, 0.01, 5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_sends_all_back(value):
    net = make_net()
    assert net.loss(value, 3)
    assert isinstance(net.holds("anything"), Keep)
    assert not net.loss(value, 4), "one alarm at a time"
    assert len(net.events) == 1
    assert not net.advance(13) and net.advance(14), "the second one has prolonged it"


def test_a_loss_that_jumps_sends_all_back():
    net = make_net()
    for step in range(50):
        assert not net.loss(2.0 + 0.1 * math.sin(step), step)
    assert not net.loss(2.5, 50), "noise is no jump"
    assert net.loss(4.0, 51)
    assert "jumped from about 2" in net.events[0]


def test_a_loss_that_falls_or_is_young_does_not():
    net = make_net()
    for step, value in enumerate([2.0] * 10 + [9.0] + [2.0 * 0.9**step for step in range(60)]):
        assert not net.loss(value, step)


def test_a_retreat_can_be_a_fine_bound():
    net = make_net(retreat="0.02 std")
    net.check("a", 1.0, 0.01, 0)
    assert net.holds("a") == BoundRule(0.02, "std")


@pytest.mark.parametrize("options", [{"factor": 1.0}, {"pause": 0}])
def test_a_net_without_sense_is_refused(options):
    with pytest.raises(BoundError, match="factor > 1 and pause >= 1"):
        make_net(**options)


def test_a_net_is_restored():
    net = make_net()
    for step in range(30):
        net.loss(1.0 + step % 3, step)
    net.check("a", 1.0, 0.01, 30)
    other = make_net()
    other.load_state_dict(net.state_dict())
    assert other.state_dict() == net.state_dict()
    assert isinstance(other.holds("a"), Keep)


def test_bounds_by_channel():
    need = Need(Kind.VALUES, "", family="norm", per=Per.CHANNEL)
    source = ChannelBounds((0.1, 0.2, 0.4))
    bound = source.resolve(torch.zeros(2, 3, 4), need)
    assert (bound.value.tolist(), bound.axes) == ([0.1, 0.2, 0.4], (1,))
    assert source.resolve(torch.zeros(2, 5, 4), need).value.tolist() == [0.1] * 5
    assert str(source) != str(ChannelBounds((0.1, 0.25, 0.4))), "the text tells them apart: a checkpoint compares it"


GRADIENTS = [torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0]]), torch.tensor([[-1.0, 1.0]])]


def trained(make, **options) -> tuple[nn.Linear, torch.optim.Optimizer]:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = make(layer.parameters(), lr=0.1, **options)
    for gradient in GRADIENTS:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        # buffer = 0.25 g1 + 0.5 g2 + g3 = [0.75, 1.0], times (1 - 0.5)
        (torch.optim.SGD, {"momentum": 0.5}, (0.375 + 0.5) / 2),
        (torch.optim.SGD, {"momentum": 0.5, "nesterov": True}, (0.375 + 0.5) / 2),
        # the first gradient is not dampened: 0.25 g1 + 0.25 g2 + 0.5 g3 = [0.5, 0.25], times 0.5 / 0.5
        (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.5}, (0.5 + 0.25) / 2),
        # 0.125 g1 + 0.25 g2 + 0.5 g3 = [0.375, 0.5], over 1 - 0.125
        (torch.optim.Adam, {"betas": (0.5, 0.9)}, (0.375 + 0.5) / 2 / 0.875),
        (torch.optim.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.0}, (0.375 + 0.5) / 2 / 0.875),
        # no momentum, no shadow: the gradient itself
        (torch.optim.SGD, {}, 1.0),
    ],
)
def test_momentum_from_the_optimizer(make, options, expected):
    layer, optimizer = trained(make, **options)
    assert float(Momentum(optimizer).mean("w", layer.weight)) == pytest.approx(expected)


@pytest.mark.parametrize("optimizer", ["none", "sgd", "rmsprop"])
def test_a_shadow_where_the_optimizer_has_no_momentum(optimizer):
    """s = 0.9 s + 0.1 g, over 1 - 0.9^3. RMSprop's momentum is of scaled gradients, so it does not serve."""
    layer = nn.Linear(2, 1, bias=False)
    made = {
        "none": None,
        "sgd": torch.optim.SGD(layer.parameters(), 0.1),
        "rmsprop": torch.optim.RMSprop(layer.parameters(), 0.1, momentum=0.9),
    }[optimizer]
    momentum = Momentum(made)
    for gradient in GRADIENTS:
        layer.weight.grad = gradient.clone()
        if made is not None:
            made.step()
        momentum.update({"w": layer.weight})
    average = 0.1 * (0.81 * GRADIENTS[0] + 0.9 * GRADIENTS[1] + GRADIENTS[2])
    expected = float(average.abs().mean()) / (1 - 0.9**3)
    assert float(momentum.mean("w", layer.weight)) == pytest.approx(expected)
    other = Momentum(made)
    other.load_state_dict(momentum.state_dict())
    assert float(other.mean("w", layer.weight)) == pytest.approx(expected)
    momentum.end()
    assert float(momentum.mean("w", layer.weight)) == pytest.approx(float(GRADIENTS[2].abs().mean()))


def test_a_weight_with_its_own_momentum_needs_no_shadow():
    layer, optimizer = trained(torch.optim.SGD, momentum=0.5)
    momentum = Momentum(optimizer)
    momentum.update({"w": layer.weight})
    assert momentum.state_dict()["shadows"] == {}


def test_steps_for_shadows_are_not_measured_where_the_optimizer_has_its_own():
    layer, other = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    groups = [{"params": layer.parameters()}, {"params": other.parameters(), "momentum": 0.0}]
    optimizer = torch.optim.SGD(groups, 0.1, momentum=0.5)
    collector, shadow = Collector(optimizer), Wish(shadow=True)
    assert Collector(None).reduce(shadow) is shadow and collector.reduce(shadow) is shadow, "nothing is known yet"
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert collector.reduce(shadow) is None and collector.reduce(None) is None
    wish = Wish(noise=True, momentum=True, shadow=True)
    assert collector.reduce(wish) is wish, "the rest has to be measured"
    other.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert collector.reduce(shadow) is shadow, "one group has none"
