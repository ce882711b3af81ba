"""The budget controller's decisions: from statistics to bounds, step by step; its state; its options."""

from __future__ import annotations

import dataclasses
import io
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import lowtide
from lowtide.bounds import BoundRule
from lowtide.controllers import Keep, _levels
from lowtide.controllers.budget import Budget
from lowtide.errors import BoundError, StateError
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT, Claim, SiteStatistics, Statistics

LINEAR = Need(Kind.VALUES, "", family="linear")


def site(name: str, claims: tuple[Claim, ...] = (Claim(WEIGHT, 1.0, 1.0),), **changes) -> SiteStatistics:
    op = name.partition(":")[2]
    made = SiteStatistics(
        name, op.partition(".")[0], "linear", "absolute", "float32", name, 1000, claims=claims, gradient=1.0,
        nonzero=0.5, std=1.0,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def settled(*sites: SiteStatistics, updates: int = 8, **options) -> Budget:
    """A controller after some updates with the same statistics."""
    budget = Budget(**{"noise": 0.01, "period": 2, "checks": 0, **options})
    for item in sites:
        path, _, rest = item.site.partition(":")
        op, _, field = rest.partition(".")
        budget.bound(Site(path, op, field), Need(Kind.VALUES, "", family=item.family))
    for update in range(updates):
        feed(budget, 2 * update, *sites)
    return budget


def feed(budget: Budget, step: int, *sites: SiteStatistics) -> bool:
    assert budget.wants(step) is not None
    budget.step(step, None, Ledger())
    return budget.step(step + 1, Statistics(step, {item.site: item for item in sites}), Ledger())


def value(budget: Budget, name: str = "a:addmm.mat1") -> float:
    rule = budget._rules[name]
    assert isinstance(rule, BoundRule)
    return rule.value


def level(target: float) -> float:
    """The level for a bound of this size, once what the quantiser leaves unused is added."""
    return _levels.settle(target / _levels.efficiency("float32"), None)


def test_the_bound_uses_up_the_share():
    """eb = sqrt(3 e2 E / S), e2 = 0.75 noise: sqrt(3 * 0.0075 * 2 / 0.5) = 0.3."""
    budget = settled(site("a:addmm.mat1", (Claim(WEIGHT, 0.5, 2.0),)))
    assert value(budget) == level(0.3)
    budget = settled(site("a:addmm.mat1", (Claim(WEIGHT, 0.45, 2.0),)), noise=0.04)
    assert value(budget) == level(math.sqrt(3 * 0.03 * 2 / 0.45))


def test_the_energy_counts_without_the_noise():
    """Measured with the bound of the warm-up in force, 0.5: v = 0.25 / 3 at each of the two sites that feed it."""
    budget = Budget(noise=0.01, warm_up="0.5 std", checks=0)
    names = "a:addmm.mat1", "b:addmm.mat1", "c:addmm.mat1"
    for name in names:
        budget.bound(Site(name[0], "addmm", "mat1"), LINEAR)
    feed(
        budget, 0,
        site(names[0], (Claim(WEIGHT, 1.0, 1.0, uses=2, weight=0),)),
        site(names[1], (Claim(WEIGHT, 3.0, 1.0, uses=2, weight=0),)),
        site(names[2], (Claim(WEIGHT, 1.0, 1.0, weight=1),)),
    )  # fmt: skip
    error = _levels.variance(0.5, "float32")
    assert error == pytest.approx(0.25 / 3, rel=0.01)
    expected = [error / (1 - 4 * error), 3 * error / (1 - 4 * error), error / (1 - error)]
    noise = budget.noise_by_site()
    assert [noise[name].predicted for name in names] == pytest.approx(expected)


def test_a_site_that_is_held_exactly_adds_no_noise():
    """It feeds the weight, too, but a rule of the user's keeps it: the energy has nothing of it to be freed from."""
    budget = Budget(noise=0.01, warm_up="0.5 std", checks=0)
    budget.bound(Site("a", "addmm", "mat1"), LINEAR)
    kept = site("n:native_batch_norm.input", (Claim(BELOW, 1.0, 1.0, uses=2, weight=0),), family="norm", unit="std")
    feed(budget, 0, site("a:addmm.mat1", (Claim(WEIGHT, 1.0, 1.0, uses=2, weight=0),)), kept)
    error = _levels.variance(0.5, "float32")
    assert budget.noise_by_site()["a:addmm.mat1"].predicted == pytest.approx(error / (1 - error))


def test_sites_that_feed_one_gradient_share_it():
    budget = settled(site("a:addmm.mat1", (Claim(WEIGHT, 0.5, 2.0, uses=4),)))
    assert value(budget) == level(0.15)


def test_what_a_site_cannot_use_of_a_share_is_for_the_others():
    """At the largest bound there is, 4, ``b`` adds 5.3 * gain = 0.0005 to the weight: 0.007 is left for ``a``."""
    most = _levels.variance(_levels.MOST, "float32")
    sites = [
        site("a:addmm.mat1", (Claim(WEIGHT, 1.0, 1.0, uses=2, weight=0),)),
        site("b:addmm.mat1", (Claim(WEIGHT, 0.0005 / most, 1.0, uses=2, weight=0),)),
    ]
    budget = settled(*sites, updates=20)
    assert value(budget, "b:addmm.mat1") == level(4.0)
    assert value(budget, "a:addmm.mat1") == level(math.sqrt(3 * 0.007))
    alike = [dataclasses.replace(item, claims=(Claim(WEIGHT, 1.0, 1.0, uses=2, weight=0),)) for item in sites]
    assert {value(settled(*alike), item.site) for item in alike} == {level(math.sqrt(3 * 0.00375))}
    assert value(settled(alike[0])) == level(math.sqrt(3 * 0.00375)), "the other one is a rule's: its part is its own"


def test_a_bound_that_governs_some_of_the_values():
    """It is not made as coarse as others, and counts for fewer values where noise is divided by size."""
    claims = (Claim(PROPAGATED, 1e-9, 1.0),)
    some = site("n:native_batch_norm.input", claims, family="norm", unit="std", governed=0.5)
    assert value(settled(some, updates=20), some.site) == level(2.0)
    assert value(settled(dataclasses.replace(some, governed=1.0), updates=20), some.site) == level(4.0)
    claims = (Claim(PROPAGATED, 1.0, 1.0),)
    names = ("n:native_batch_norm.input", "m:native_batch_norm.input")
    sites = [site(name, claims, family="norm", unit="std") for name in names]
    budget = settled(sites[0], dataclasses.replace(sites[1], governed=0.25))
    assert value(budget, names[0]) == level(math.sqrt(3 * 0.008))
    assert value(budget, names[1]) == level(math.sqrt(3 * 0.002))


def test_a_tensor_has_one_bound_the_smallest():
    sites = [
        site("a:addmm.mat1", (Claim(WEIGHT, 0.5, 2.0),)),
        site("b:addmm.mat1", (Claim(WEIGHT, 2.0, 2.0),), leader="a:addmm.mat1"),
        site("c:addmm.mat1", (Claim(WEIGHT, 0.5, 2.0),)),
    ]
    budget = settled(*sites)
    assert budget._rules["a:addmm.mat1"] is budget._rules["b:addmm.mat1"]
    assert (value(budget), value(budget, "c:addmm.mat1")) == (level(0.15), level(0.3))


def test_what_is_made_again_shares_its_sources_bound():
    """Claims are for an error of the stored tensor: 0.3 for GELU's own would do, what is made of it asks for 0.15."""
    sites = [
        site("a:gelu.self", (Claim(PROPAGATED, 1 / 9, 1.0),), family="pointwise"),
        site("b:addmm.mat1", (Claim(WEIGHT, 1.0, 1.0),), leader="a:gelu.self", source="a:gelu.self"),
        site("n:native_layer_norm.input", (Claim(SCALE, 1.0, 1.0),), family="norm", unit="std"),
        site("c:addmm.mat1", (Claim(WEIGHT, 1.0, 1.0),), leader="n:native_layer_norm.input", unit="std",
             source="n:native_layer_norm.input"),
    ]  # fmt: skip
    budget = settled(*sites)
    expected = level(math.sqrt(3 * 0.0075))
    for name in ("a:gelu.self", "n:native_layer_norm.input"):
        assert value(budget, name) == expected
    assert budget._rules["b:addmm.mat1"] == budget._rules["c:addmm.mat1"] == BoundRule(expected), "if it is stored"
    assert budget._rules["n:native_layer_norm.input"].unit == "std"


def test_norms_that_read_one_tensor_share_a_bound():
    """As in blocks whose branches run side by side; a norm of another kind has spreads of its own."""
    norm = {"family": "norm", "unit": "std", "leader": "a:native_layer_norm.input"}
    sites = [
        site("a:native_layer_norm.input", (Claim(SCALE, 1.0, 1.0),), **norm),
        site("b:native_layer_norm.input", (Claim(SCALE, 4.0, 1.0),), **norm),
        site("c:native_group_norm.input", (Claim(SCALE, 16.0, 1.0),), **norm),
        site("d:addmm.mat1", (Claim(WEIGHT, 8.0, 1.0),), source="b:native_layer_norm.input", unit="std",
             leader="a:native_layer_norm.input"),
    ]  # fmt: skip
    budget = settled(*sites)
    assert budget._rules["a:native_layer_norm.input"] is budget._rules["b:native_layer_norm.input"]
    assert value(budget, "a:native_layer_norm.input") == level(math.sqrt(3 * 0.0075 / 8))
    assert value(budget, "c:native_group_norm.input") == pytest.approx(math.sqrt(3 * 0.1 / 16), rel=0.2)


def test_two_norms_of_one_tensor_are_one_payload():
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.one, self.two = nn.Linear(32, 32), nn.LayerNorm(32), nn.LayerNorm(32)
            self.first, self.second = nn.Linear(32, 64), nn.Linear(32, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            return self.first(self.one(x)).sin() + 9 * self.second(self.two(x)).cos()

    model, x = Parallel(), torch.randn(64, 32)
    tide = lowtide.attach(model, "budget", min_size=0, coder="blocks", period=4)
    for _ in range(12):
        model.zero_grad()
        model(x).square().sum().backward()
        tide.step()
    held = {name: entry.held_nbytes for name, entry in tide.ledger.sites.items() if "native_layer_norm.input" in name}
    tide.detach()
    assert held["one:native_layer_norm.input"] > 0 and held["two:native_layer_norm.input"] == 0


def test_what_propagates_is_one_amount_for_all():
    """noise = 0.01 for two sites of equal size, gains of 0.5 and 0.02: v = 0.005 / 0.5 and 0.005 / 0.02."""
    sites = [
        site("a:gelu.self", (Claim(PROPAGATED, 0.5, 1.0),), family="pointwise"),
        site("b:gelu.self", (Claim(PROPAGATED, 0.02, 1.0),), family="pointwise"),
    ]
    budget = settled(*sites)
    assert value(budget, "a:gelu.self") == level(math.sqrt(3 * 0.005 / 0.5))
    assert value(budget, "b:gelu.self") == level(math.sqrt(3 * 0.005 / 0.02))


def test_the_scale_of_a_norm_and_the_weight_below():
    """Bounds in units of the spread; the tightest of 10 noise / gain, 0.75 noise / gain and the common amount."""
    claims = (Claim(SCALE, 1.0, 1.0), Claim(BELOW, 1.0, 2.0, uses=2), Claim(PROPAGATED, 1e-6, 1.0))
    norm = site("n:native_batch_norm.input", claims, family="norm", unit="std", std=None)
    assert value(settled(norm), norm.site) == level(math.sqrt(3 * 0.0075))
    assert settled(norm)._rules[norm.site].unit == "std"
    alone = dataclasses.replace(norm, claims=(claims[0], claims[2]))
    assert value(settled(alone), norm.site) == level(math.sqrt(3 * 0.1 * 0.3)), "cautious: the layer below is unknown"
    rows = dataclasses.replace(alone, site="n:native_layer_norm.input", op="native_layer_norm")
    rows = dataclasses.replace(rows, leader=rows.site)
    assert value(settled(rows), rows.site) == pytest.approx(math.sqrt(3 * 0.1), rel=0.15), (
        "a row's error does not add up"
    )


def test_without_a_formula_a_multiple_of_the_spread():
    cube = site("p:pow.self", (), family="pointwise")
    assert settled(cube)._rules[cube.site] == BoundRule(_levels.quantise(0.1), "std")
    assert settled(cube, noise=0.04)._rules[cube.site] == BoundRule(_levels.quantise(0.2), "std")
    query = site("q:flash_attention.query", (), family="attention")
    assert settled(query)._rules[query.site] == BoundRule(_levels.quantise(0.05), "std")
    loss = site("l:log_softmax.result", (), family="log_probability")
    assert settled(loss)._rules[loss.site] == BoundRule(_levels.quantise(0.01 / 32), "probability")


def test_no_gradient_no_limit_but_a_largest_bound():
    dead = site("a:addmm.mat1", (Claim(WEIGHT, 0.0, 0.0),), std=0.5)
    assert value(settled(dead)) <= 4 * 0.5 * 1.01
    assert value(settled(dead)) > 1.5


def test_too_fine_a_bound_is_exact_storage():
    harsh = site("a:addmm.mat1", (Claim(WEIGHT, 1.0, 1e-9),), dtype="bfloat16")
    rule = settled(harsh)._rules["a:addmm.mat1"]
    assert isinstance(rule, Keep) and "too fine to save memory" in rule.reason


def test_bounds_grow_by_two_at_most_settle_and_fall_at_once():
    budget = Budget(noise=0.01, period=2, checks=0)
    budget.bound(Site("a", "addmm", "mat1"), LINEAR)
    values = []
    for update in range(10):
        feed(budget, 2 * update, site("a:addmm.mat1", (Claim(WEIGHT, 0.01, 1.0),), std=1.0))
        values.append(value(budget))
    assert values[0] == pytest.approx(_levels.settle(0.2, None)), "twice the 0.1 std of the warm-up"
    assert all(later / earlier <= 2.0001 for earlier, later in pairwise(values))
    assert values[-1] == values[-2] == level(1.5)
    falling = feed(budget, 20, site("a:addmm.mat1", (Claim(WEIGHT, 100.0, 1.0),), std=1.0))
    assert falling and value(budget) == level(0.015 / math.sqrt(2)), "half of the energy, at most, is taken for noise"


def test_a_measurement_that_allows_more_has_half_a_say_and_one_that_allows_less_the_whole():
    """More noise than is meant does harm; less costs some bytes."""
    steady = site("a:addmm.mat1", (Claim(WEIGHT, 0.5, 2.0),))
    for factor, found in ((1 / 2.25, math.sqrt(1.5)), (2.25, 1 / 1.5)):
        budget = settled(steady)
        feed(budget, 16, site("a:addmm.mat1", (Claim(WEIGHT, 0.5 * factor, 2.0),)))
        assert value(budget) == level(0.3 * found)


def test_the_first_bounds_are_cautious_and_next_to_nothing_is_exact():
    budget = Budget()
    assert budget.bound(Site("a", "addmm", "mat1"), LINEAR) == BoundRule(0.1, "std")
    loss = Need(Kind.VALUES, "", family="log_probability")
    at = Site("l", "log_softmax", "result")
    assert budget.bound(at, loss) == BoundRule(_levels.quantise(0.03 / 32), "probability")
    assert Budget(memory=0.5).bound(at, loss) == BoundRule(_levels.quantise(0.01 / 32), "probability")
    assert Budget(warm_up="0.3 std").bound(Site("a", "addmm", "mat1"), LINEAR) == BoundRule(0.3, "std")


def test_a_spread_that_is_too_large_for_a_number_is_one_sites_business():
    usual, huge = site("a:addmm.mat1"), site("b:exp.result", (Claim(PROPAGATED, 1.0, 1.0),), std=math.inf)
    for item in (huge, dataclasses.replace(huge, std=math.nan)):
        budget = settled(usual, item)
        assert not budget.events() and value(budget) == value(settled(usual))
        assert isinstance(budget._rules["b:exp.result"], Keep)


def test_when_it_measures():
    budget, asked = Budget(period=100), []
    for step in range(320):
        if budget.wants(step) is not None:
            asked.append(step)
        budget.step(step, Statistics(step - 1, {"a": site("a:addmm.mat1")}) if step else None, Ledger())
    assert asked == [0, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 300]


def test_it_asks_again_if_nothing_came():
    """A step in which nothing was trained, and one whose gradients a scaler threw away."""
    budget = Budget()
    budget.wants(0)
    budget.step(0, None, Ledger())
    budget.step(1, None, Ledger())
    assert budget.wants(2) is not None
    broken = {"a:addmm.mat1": site("a:addmm.mat1", (Claim(WEIGHT, math.inf, 1.0),))}
    budget.step(2, None, Ledger())
    budget.step(3, Statistics(2, broken, is_skipped=True), Ledger())
    assert budget.events() == []
    assert budget.wants(4) is not None


def test_gradients_that_are_not_finite_are_an_alarm():
    budget = Budget(pause=5)
    budget.wants(0)
    budget.step(0, None, Ledger())
    broken = {"a:addmm.mat1": site("a:addmm.mat1", (Claim(WEIGHT, math.nan, 1.0),))}
    assert budget.step(1, Statistics(0, broken), Ledger())
    assert "gradients are not finite" in budget.events()[0]
    assert isinstance(budget.bound(Site("a", "addmm", "mat1"), LINEAR), Keep)
    for step in range(2, 8):
        budget.step(step, None, Ledger())
    assert budget.bound(Site("a", "addmm", "mat1"), LINEAR) == BoundRule(0.1, "std")


def test_what_is_divided_by_next_to_nothing_is_held_exactly():
    """Its sensitivity is beyond float32, its gradients are not; all others go on, and so does it when that is over."""
    usual, huge = site("a:addmm.mat1"), site("b:div.self", (Claim(PROPAGATED, math.inf, 1.0),), family="product")
    budget = settled(usual, huge)
    assert not budget.events() and value(budget) == value(settled(usual))
    kept = budget.bound(Site("b", "div", "self"), LINEAR)
    assert kept == Keep("what an error in it does to gradients is too large for a number")
    made = dataclasses.replace(huge, site="c:bmm.self", source="b:div.self", saved="c:bmm.self")
    assert isinstance(settled(usual, made)._rules["b:div.self"], Keep), "it is the stored tensor that counts"
    feed(budget, 16, usual, dataclasses.replace(huge, claims=(Claim(PROPAGATED, 1.0, 1.0),)))
    assert isinstance(budget.bound(Site("b", "div", "self"), LINEAR), BoundRule)


@pytest.mark.parametrize("numbers", [(math.nan, 1.0), (math.inf, math.inf)])
def test_gradients_that_overflow_themselves_are_an_alarm(numbers):
    budget = settled(site("a:addmm.mat1"), site("b:div.self", (Claim(PROPAGATED, *numbers),)))
    assert "gradients are not finite" in budget.events()[0]


def test_a_layer_that_is_noisier_than_predicted_retreats():
    budget = settled(site("a:addmm.mat1"), site("b:addmm.mat1"))
    noisy = site("a:addmm.mat1", error=1.0)
    assert feed(budget, 16, noisy, site("b:addmm.mat1"))
    assert isinstance(budget.bound(Site("a", "addmm", "mat1"), LINEAR), Keep)
    assert isinstance(budget.bound(Site("b", "addmm", "mat1"), LINEAR), BoundRule)
    assert "a:addmm.mat1: measured noise 1" in budget.events()[0]


def test_layers_are_checked_in_rotation():
    sites = [site(f"{name}:addmm.mat1") for name in "abc"]
    budget = Budget(noise=0.01, period=2, checks=1)
    for item in sites:
        budget.bound(Site(item.site[0], "addmm", "mat1"), LINEAR)
    turns = []
    for update in range(7):
        wish = budget.wants(2 * update)
        assert budget.wants(2 * update) == wish, "asking twice changes nothing"
        turns.append("".join(name[0] for name in wish.checks))
        budget.step(2 * update, None, Ledger())
        budget.step(2 * update + 1, Statistics(2 * update, {item.site: item for item in sites}), Ledger())
    assert turns == ["", "a", "b", "c", "a", "b", "c"]


def test_a_restored_controller_goes_on_alike():
    """Saved right after a step, when the next one has been asked about already, as a session does it."""
    sites = [site(f"{name}:addmm.mat1", error=0.001) for name in "ab"]
    budget = settled(*sites)
    budget.wants(16)
    budget.step(16, None, Ledger())
    other = Budget(noise=0.01, period=2, checks=0)
    other.load_state_dict(torch.load(_saved(budget.state_dict()), weights_only=True))
    assert other.state_dict() == budget.state_dict()
    for controller in (budget, other):
        for item in sites:
            controller.bound(Site(item.site[0], "addmm", "mat1"), LINEAR)
        controller.step(17, Statistics(16, {item.site: item for item in sites}), Ledger())
    assert other.state_dict() == budget.state_dict()


def _saved(state: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_foreign_states_are_refused():
    budget = Budget()
    with pytest.raises(StateError, match="controller 'budget' keeps"):
        budget.load_state_dict({})
    with pytest.raises(StateError, match="whether there is a memory budget"):
        budget.load_state_dict(Budget(memory="1GiB").state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"noise": 0}, "budget: noise is a share"),
        ({"noise": "much"}, "budget: noise is a share"),
        ({"propagated": -1}, "budget: propagated is a share"),
        ({"period": 1}, "budget: period is a number of steps"),
        ({"checks": -1}, "checks is how many"),
        ({"warm_up": "little"}, "cannot read 'little' as a bound"),
        ({"factor": 0.5}, "factor > 1"),
    ],
)
def test_options_without_sense(options, message):
    with pytest.raises(BoundError, match=message):
        Budget(**options)


def test_a_rule_of_the_user_is_not_ours():
    """Its site gets no bound, no prediction, and takes no part in what propagates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    tide = lowtide.attach(model, "budget", rules=[{"path": "1", "bound": 0.5}], min_size=0)
    for _ in range(2):
        model(torch.randn(64, 64)).square().mean().backward()
        tide.step()
    assert "1:gelu.self" not in tide.report().noise
    assert "3:gelu.self" in tide.report().noise
    assert {entry.name: entry.bound for entry in tide.report().sites}["1:gelu.self"] == "0.5"
    tide.detach()


@pytest.mark.parametrize("codec", ["groups", "cast"])
def test_nothing_is_made_of_what_a_users_codec_holds_without_a_bound(codec):
    """What the layer made is stored, then, under bounds of its own. They had been set for an error of the layer's
    input, which is nobody's: the layer behind GELU had twice its share."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 10)]
    model, x, labels = nn.Sequential(*layers), torch.randn(128, 64), torch.randint(0, 10, (128,))
    rules = [{"path": "2", "codec": codec}]
    tide = lowtide.attach(model, "budget", min_size=0, coder="blocks", remake="linear", rules=rules)
    for _ in range(14):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        tide.step()
    report = tide.report()
    tide.detach()
    assert {entry.name: entry.codec for entry in report.sites}["3:gelu.self"] == "sz"
    figures = report.noise["4:addmm.mat1"]
    assert 0 < figures.predicted < 1.25 * figures.share


def test_the_report_tells_it_all():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    tide = lowtide.attach(model, "budget", min_size=0, period=4, checks=9, pause=3)
    for step in range(12):
        model(torch.randn(64, 64)).square().mean().backward()
        tide.step(torch.tensor(float("nan") if step == 9 else 1.0))
    report = tide.report()
    figures = report.noise["4:addmm.mat1"]
    assert figures.share == pytest.approx(0.0225) and 0 < figures.predicted < 0.02 and 0 < figures.measured < 0.02
    assert report.noise["1:tanh.result"].propagated > 0
    assert any("the loss is nan" in event for event in report.events)
    text = str(report)
    assert "added gradient noise" in text and "the loss is nan: exact storage for 3 steps" in text
    kept = {entry.name: entry.reason for entry in report.sites if entry.codec == "kept"}
    assert "safety net" in kept["4:addmm.mat1"]
    tide.detach()


def test_attention_has_a_share_of_its_own():
    """However deep the net: what many blocks add does not make each of them finer."""
    claim = Claim(PROPAGATED, 2.0, 1.0)
    alone = settled(site("q:flash.query", (claim,), family="attention", std=10.0))
    many = [site(f"q{n}:flash.query", (claim,), family="attention", std=10.0) for n in range(12)]
    together = settled(*many)
    assert value(together, "q5:flash.query") == value(alone, "q:flash.query")
    expected = _levels.bound_for(0.01 / 16 / 2.0, "float32")
    assert value(alone, "q:flash.query") == pytest.approx(expected, rel=0.2)


def test_the_first_statistics_may_ask_for_far_finer_bounds_at_once():
    budget = Budget(noise=0.01, period=2, checks=0)
    harsh = site("a:addmm.mat1", (Claim(WEIGHT, 1e3, 1.0),), std=1.0)
    budget.bound(Site("a", "addmm", "mat1"), LINEAR)
    feed(budget, 0, harsh)
    left = 0.5  # of the energy: the noise under the bound of the warm-up was larger than that
    assert value(budget) == pytest.approx(_levels.bound_for(0.75 * 0.01 * left / 1e3, "float32"), rel=0.2)
