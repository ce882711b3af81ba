"""Bits that set themselves: the allocation is optimal, costs follow sensitivities, and a run can be resumed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lowtide
from lowtide.controllers._widths import Tensor, allocate, variance
from lowtide.controllers.bits import Bits
from lowtide.errors import PolicyError, StateError
from lowtide.ledger import Ledger, SiteEntry
from lowtide.records import Kind, Need, Per, Site
from lowtide.statistics import BELOW, PROPAGATED, SCALE, WEIGHT, Claim, SiteStatistics, Statistics

WIDTHS = (1, 2, 4, 8)
LINEAR = Need(Kind.VALUES, "", family="linear")


def total(tensors: list[Tensor], bits: list[float]) -> float:
    return sum(variance(tensor.cost, width) for tensor, width in zip(tensors, bits, strict=True))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=4), st.sampled_from([1.0, 1.5, 2.0, 3.0, 4.0, 8.0]))
def test_no_choice_of_widths_within_the_same_bits_has_less_noise(costs: list[float], average: float) -> None:
    """Of tensors of one size, by trying all: as good as the best choice of as many bits as were used."""
    tensors = [Tensor(100, cost) for cost in costs]
    bits = allocate(tensors, average, fractions=False)
    assert set(bits) <= set(WIDTHS) and sum(bits) <= average * len(bits)
    best = min(
        total(tensors, list(choice))
        for choice in itertools.product(WIDTHS, repeat=len(costs))
        if sum(choice) <= sum(bits)
    )
    assert total(tensors, bits) == pytest.approx(best)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=6), st.floats(1.0, 8.0))
def test_fractions_meet_the_average(sizes: list[tuple[int, float]], average: float) -> None:
    tensors = [Tensor(count, cost) for count, cost in sizes]
    bits = allocate(tensors, average, fractions=True)
    count = sum(tensor.count for tensor in tensors)
    spent = sum(tensor.count * width for tensor, width in zip(tensors, bits, strict=True))
    assert spent == pytest.approx(average * count)
    assert sum(width not in WIDTHS for width in bits) <= 1
    assert total(tensors, bits) <= total(tensors, allocate(tensors, average, fractions=False)) * (1 + 1e-9)


def test_large_tensors_give_up_bits_first_and_sensitive_ones_last() -> None:
    bits = allocate([Tensor(1000, 1.0), Tensor(10, 1.0), Tensor(10, 1e4), Tensor(10, 0.0)], 2.5, fractions=False)
    assert bits[3] == 1 and bits[0] == 2 and bits[1] > bits[0] and bits[2] == 8


def test_variance_between_two_widths_is_a_mixture() -> None:
    assert variance(9.0, 2) == 1 and variance(225.0, 4) == 1 and variance(225.0, 3) == 13
    assert variance(9.0, 1) == pytest.approx(11.7) and variance(9.0, 1.5) == pytest.approx(6.35)


def site(name: str, *, sensitivity: float = 1.0, numel: int = 1000, **facts: Any) -> SiteStatistics:
    standard: dict[str, Any] = {"op": "addmm", "family": "linear", "unit": "absolute", "dtype": "float32", "std": 1.0}
    claims = facts.pop("claims", (Claim(WEIGHT, sensitivity, 1.0),))
    return SiteStatistics(
        site=name, leader=facts.pop("leader", name), numel=numel, claims=claims, **{**standard, **facts}
    )


def give(controller: Bits, *sites: SiteStatistics, codec: str = "groups", step: int = 0) -> dict[str, float]:
    """Hand statistics over and read the bits that follow from them."""
    ledger = Ledger()
    for item in sites:
        ledger.sites[item.site] = SiteEntry(item.site, "", "values", codec, "")
    controller.step(step + 1, Statistics(step, {item.site: item for item in sites}), ledger)
    return dict(controller.state_dict()["bits"])


def test_bits_follow_sensitivity_spread_and_size() -> None:
    bits = give(Bits(4.0), site("a"), site("b", sensitivity=1e4), site("c"))
    assert bits == {"a": 2, "b": 8, "c": 2}
    bits = give(Bits(4.0), site("a"), site("b", std=100.0), site("c"))
    assert bits == {"a": 2, "b": 8, "c": 2}
    bits = give(Bits(3.0), site("a", numel=100_000), site("b"))
    assert bits == {"a": 2, "b": 8}


def test_widths_stay_equal_where_little_is_to_be_gained() -> None:
    """What is known about errors is not exact: a fifth less noise has to be in sight."""
    close = [site("a"), site("b", sensitivity=3.0), site("c"), site("d", sensitivity=0.5)]
    assert set(give(Bits(2.0), *close).values()) == {2}
    assert set(give(Bits(2.0), site("a"), site("b", sensitivity=200.0), site("c")).values()) == {1, 4}


def test_errors_that_go_on_count_as_a_share_of_all_gradients() -> None:
    """A gain of 0.5 into a gradient of any energy is half of all weight gradients together, here 100."""
    down = site("down", claims=(Claim(PROPAGATED, 5e-7, 1e-6),), family="norm", unit="std")
    bits = give(Bits(3.0), site("up", claims=(Claim(WEIGHT, 1.0, 100.0),)), down)
    assert bits["down"] > bits["up"]


def test_a_batch_norm_whose_weight_below_is_not_known_is_taken_to_be_like_the_others() -> None:
    """Its error reaches that weight all the same."""
    own, below = Claim(SCALE, 1.0, 1.0), Claim(BELOW, 99.0, 1.0)
    facts: dict[str, Any] = {"op": "native_batch_norm", "family": "norm", "unit": "std"}
    pair = (site("a", claims=(own, below), **facts), site("b", claims=(own,), **facts))
    bits = give(Bits(3.5), *pair, site("c"), site("d"))
    assert bits["a"] == bits["b"] > bits["c"]


def test_saves_of_one_tensor_have_one_width_and_count_once() -> None:
    """Else it would be stored twice."""
    pair = (site("a", leader="a", sensitivity=100.0), site("b", leader="a"), site("c", sensitivity=100.0))
    bits = give(Bits(2.0), *pair)
    assert bits["a"] == bits["b"]
    assert bits["a"] + bits["c"] <= 4


def test_checks_correct_the_model_of_the_error() -> None:
    controller = Bits(2.0)
    assert set(give(controller, site("a"), site("b"), site("c")).values()) == {2}
    modelled = 5.6**2 / 6 / 9
    bits = give(
        controller, site("a", error=1e4 * modelled), site("b", error=modelled), site("c", error=modelled), step=10
    )
    assert bits == {"a": 4, "b": 1, "c": 1}
    assert controller.state_dict()["factors"] == {"a": pytest.approx(100), "b": pytest.approx(1), "c": pytest.approx(1)}
    noise = controller.noise_by_site()["a"]
    assert noise.measured == pytest.approx(1e4 * modelled) and noise.checked == 10
    assert noise.predicted == pytest.approx(100 * modelled * 9 / 225)


def test_every_site_has_its_turn_to_be_checked() -> None:
    controller, seen = Bits(2.0), set()
    for step in range(0, 400, 100):
        wish = controller.wants(step)
        assert wish is not None and wish.noise and wish.spread
        seen |= wish.checks
        give(controller, *(site(f"site {index}") for index in range(11)), step=step)
    assert len(seen) == 11


def test_when_it_asks() -> None:
    asked = [step for step in range(201) if Bits(2.0, period=50).wants(step) is not None]
    assert asked == [0, 10, 50, 100, 150, 200]
    assert all(Bits(2.0, period=None).wants(step) is None for step in range(20))


@pytest.mark.parametrize("codec", ["kept", "sz", "in lossless"])
def test_sites_that_others_store_are_left_out(codec: str) -> None:
    assert give(Bits(2.0), site("a"), codec=codec) == {}


def test_numbers_that_are_not_finite_change_nothing() -> None:
    controller = Bits(2.0)
    before = give(controller, site("a"), site("b", sensitivity=50.0))
    assert give(controller, site("a", sensitivity=math.nan), site("b")) == before
    assert controller.step(5, None, Ledger()) is False


def test_the_codec_of_each_kind_of_save() -> None:
    controller = Bits(2.0, families={"pointwise": 4, "log_probability": None})
    place = Site("layer", "addmm", "mat1")
    assert controller.codec(place, LINEAR, None).bits == 2
    assert controller.codec(place, Need(Kind.VALUES, "", family="pointwise"), None).bits == 4
    assert controller.codec(place, Need(Kind.VALUES, "", family="log_probability"), None) is None
    rows = controller.codec(place, Need(Kind.VALUES, "", family="norm", per=Per.ROW, row_dims=2), None)
    assert (rows.name, rows.per, rows.row_dims) == ("norm_groups", "row", 2)
    controller = Bits(3.0, per_sample=True)
    give(controller, site(place.name))
    assert controller.codec(place, LINEAR, None).name == "sample_groups"
    assert str(controller.bound(place, LINEAR)) == "0.4 std"


def test_values_that_cannot_be() -> None:
    for average in (0.5, 9, "2"):
        with pytest.raises(PolicyError, match="codes have 1 to 8 bits, so their average cannot be"):
            Bits(average)
    for period in (1, 2.5):
        with pytest.raises(PolicyError, match="period is a number of steps, 2 or more, or None; got"):
            Bits(2.0, period=period)
    with pytest.raises(StateError, match=r"keeps bits, factors and turn in its state, this one has \['table'\]"):
        Bits().load_state_dict({"table": {}})
    with pytest.raises(StateError, match="not between 1 and 8"):
        Bits().load_state_dict({"bits": {"a": 16}, "factors": {}, "turn": 0})


@pytest.fixture
def net() -> Callable[[], nn.Sequential]:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)
        )

    return make


def test_a_net_in_training_ends_at_its_average(net: Callable[[], nn.Sequential]) -> None:
    """Bits move away from where they began, and what is held stays what the average promises."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session = lowtide.attach(model, "actnn", optimizer=optimizer, min_size=1024, period=4, bits=3)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
    bits = session.controller.state_dict()["bits"]
    assert len(bits) == 3 and len(set(bits.values())) > 1
    assert sum(bits.values()) / 3 == pytest.approx(3.0, abs=0.01)
    measured = [noise for noise in session.report().noise.values() if noise.measured is not None]
    assert measured and all(0.2 < noise.measured / noise.predicted < 5 for noise in measured)


@pytest.mark.parametrize("method", ["actnn", "gact"])
def test_a_resumed_run_goes_on_with_its_bits(net: Callable[[], nn.Sequential], method: str) -> None:
    def run(model: nn.Module, session: lowtide.Session, optimizer: Any, first: int, last: int) -> None:
        for step in range(first, last):
            optimizer.zero_grad()
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()

    def start(model: nn.Module) -> tuple[lowtide.Session, Any]:
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        return lowtide.attach(model, method, optimizer=optimizer, min_size=1024, period=3), optimizer

    straight = net()
    run(straight, *start(straight), 0, 9)
    for stop in (4, 5):  # with statistics under way, and without
        stopped = net()
        session, optimizer = start(stopped)
        run(stopped, session, optimizer, 0, stop)
        resumed = net()
        resumed.load_state_dict(stopped.state_dict())
        again, other = start(resumed)
        again.load_state_dict(session.state_dict())
        run(resumed, again, other, stop, 9)
        assert all(map(torch.equal, straight.state_dict().values(), resumed.state_dict().values()))
