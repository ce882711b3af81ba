"""What sessions learn about sites: bounds, tables, and when they are measured anew (docs/dataflow.md, rule 14)."""

from __future__ import annotations

import copy
import itertools
import math
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Sz
from lowtide.errors import AttachError, StateError
from lowtide.records import Kind, Need, Per, Site
from lowtide.sites import Sites

CHANNEL = Need(Kind.VALUES, "", family="norm", per=Per.CHANNEL)
TENSOR = Need(Kind.VALUES, "")
ROW = Need(Kind.VALUES, "", family="norm", per=Per.ROW)
SITE = Site("layer", "batch_norm", "input")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    conv = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return nn.Sequential(*conv, nn.Flatten(), nn.Linear(1152, 4))


def recall(sites: Sites, x: Tensor, rule: BoundRule, need: Need, codec: Any = Sz()) -> Any:  # noqa: B008
    """The memo after one save."""
    memo = sites.recall(x, rule, SITE, need)
    sites.prepare(memo, x, codec, SITE, need)
    return memo


def measured(sites: Sites, saves: int, need: Need, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Which of ``saves`` saves measured their tensor."""
    found = []
    resolve = BoundRule.resolve
    monkeypatch.setattr(BoundRule, "resolve", lambda rule, x, need: found.append(save) or resolve(rule, x, need))
    rule = BoundRule.parse("0.5 std")
    for save in range(saves):
        memo = recall(sites, torch.randn(4, 6, 50) * (save + 1), rule, need)
        assert memo.plan.grid.step.numel() == memo.bound.value.numel()
    return found


def test_a_site_is_measured_early_and_then_in_turn(monkeypatch):
    found = measured(Sites(refresh=20), 80, CHANNEL, monkeypatch)
    assert found[:6] == [0, 1, 2, 4, 8, 16]
    late = found[6:]
    assert len(late) == 3 and all(b - a == 20 for a, b in itertools.pairwise(late))


def test_a_state_that_comes_back_finds_the_models_of_its_sites(monkeypatch):
    """And gives the values that it gives where there are none."""
    rule, codec = BoundRule.parse("0.5 std"), Sz(coder="rans")
    sites, fresh = Sites(refresh=64), Sites(refresh=64)
    recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
    state = sites.state_dict()
    recall(sites, 100 * torch.randn(8, 6, 500), rule, CHANNEL, codec)  # measured again: other bounds
    made = []
    plan = Sz.plan
    monkeypatch.setattr(Sz, "plan", lambda codec, *args: made.append(args) or plan(codec, *args))
    x = torch.randn(8, 6, 500)
    payloads = []
    for place in (sites, fresh):
        place.load_state_dict(state)
        memo = place.recall(x, rule, SITE, CHANNEL)
        memo.saves = 5  # not a save that measures
        place.prepare(memo, x, codec, SITE, CHANNEL)
        payloads.append(codec.encode(x, seed=3, plan=memo.plan))
    assert len(made) == 1, "only where nothing is known"
    assert torch.equal(*(codec.decode(payload) for payload in payloads))


def test_every_save_is_measured_if_so_wanted_and_where_rows_have_bounds(monkeypatch):
    assert measured(Sites(refresh=1), 5, CHANNEL, monkeypatch) == [0, 1, 2, 3, 4]
    assert measured(Sites(refresh=64), 5, ROW, monkeypatch) == [0, 1, 2, 3, 4]


def test_sites_do_not_all_measure_at_once():
    sites = Sites(refresh=64)
    places = [Site(f"layer{number}", "conv", "input") for number in range(100)]
    due = [sum(sites._is_due(place, save) for place in places) for save in range(64, 128)]
    assert sum(due) == len(places) and max(due) < 10


def test_a_bound_follows_the_rule_and_stays_between_measurements():
    sites, rule = Sites(refresh=64), BoundRule.parse("1.0 std")
    first = recall(sites, torch.randn(64, 6, 50), rule, CHANNEL).bound.value.clone()
    for _ in range(4):
        recall(sites, torch.randn(64, 6, 50), rule, CHANNEL)
    kept = recall(sites, torch.randn(64, 6, 50) * 100, rule, CHANNEL).bound.value
    torch.testing.assert_close(kept, first, rtol=0.1, atol=0)
    other = recall(sites, torch.randn(64, 6, 50), BoundRule.parse("2.0 std"), CHANNEL).bound.value
    torch.testing.assert_close(other, 2 * first, rtol=0.1, atol=0)


@pytest.mark.parametrize(("unit", "need", "grids"), [("", TENSOR, 2), ("", CHANNEL, 5), (" std", TENSOR, 5)])
def test_a_grid_is_made_anew_where_tensors_have_a_say_in_it(unit: str, need: Need, grids: int):
    """One number for all values is what it is; channels have means, and a standard deviation is that of a tensor."""
    sites, made = Sites(refresh=64), {}
    for bound in ("0.5", "0.5", "0.5", "0.7", "0.7", "0.7"):  # measured at saves 1, 2 and 4, and where it has moved
        memo = recall(sites, torch.randn(8, 6, 50), BoundRule.parse(bound + unit), need)
        made[id(memo.plan.grid)] = memo.plan.grid
    assert len(made) == grids


@pytest.mark.parametrize(("coder", "surveys"), [("blocks", 1), ("rans", 3)])
def test_a_coder_without_tables_is_surveyed_once(coder, surveys, monkeypatch):
    taken = []
    survey = Sz.survey
    monkeypatch.setattr(Sz, "survey", lambda codec, x, grid: taken.append(x) or survey(codec, x, grid))
    sites, rule = Sites(refresh=64), BoundRule.parse("1.0 std")
    for _ in range(6):  # the first save, and those number 1 and 4; number 2 has the model of the one before
        memo = recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, Sz(coder=coder))
        while memo.survey is not None and memo.survey.fitted(Sz(coder=coder), memo, torch.empty(8, 6, 500)) is None:
            pass
    assert len(taken) == surveys


@pytest.mark.parametrize(("rate", "surveys"), [(1.0, 0), (1.01, 0), (1.05, 1), (0.9, 1)])
def test_a_model_that_does_as_well_as_it_did_is_kept(rate: float, surveys: int, monkeypatch):
    sites, rule, codec = Sites(refresh=32), BoundRule.parse("1.0 std"), Sz(coder="rans")
    taken = []
    survey = Sz.survey
    monkeypatch.setattr(Sz, "survey", lambda codec, x, grid: taken.append(x) or survey(codec, x, grid))
    for save in range(128):
        memo = recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
        while memo.survey is not None and memo.survey.fitted(codec, memo, torch.empty(8, 6, 500)) is None:
            pass
        memo.rate = 0.05 * (rate if save >= 64 else 1.0)
        if save == 60:
            taken.clear()
    assert len(taken) == surveys, "payloads had another size once, and the model that followed them is kept again"


def test_a_bound_that_leaps_does_without_a_model_until_it_is_at_rest():
    """A survey of codes under another bound must not end up as the model, and the room grows with the codes."""
    sites, codec = Sites(refresh=64), Sz(coder="rans")

    def save(rule: str) -> Any:
        memo = recall(sites, torch.randn(8, 6, 500), BoundRule.parse(rule), CHANNEL, codec)
        if memo.survey is not None:
            while memo.survey.fitted(codec, memo, torch.empty(8, 6, 500)) is None:
                pass
        memo.rate = memo.rate or 0.05
        return memo

    first = save("1.0 std").plan.model
    assert save("1.0 std").survey is not None
    assert save("1.1 std").plan.model is not None, "a step is no leap"
    memo = save("0.5 std")
    assert memo.plan.model is None and memo.survey is None
    assert memo.rate == pytest.approx(1.2 * 0.05 + (1 + math.log2(2.2)) / 32)
    assert save("0.25 std").plan.model is None
    assert save("0.25 std").survey is None and save("0.25 std").survey is None, "it may leap again"
    assert save("0.25 std").survey is not None
    last = save("0.25 std").plan.model
    assert last is not None and last.alphabet.size > first.alphabet.size
    assert save("0.25 std").plan.model is last and save("0.3 std").plan.model is None


def test_whether_zero_has_a_code_is_decided_once():
    sites, rule = Sites(refresh=1), BoundRule.parse("1.0 std")
    assert recall(sites, torch.randn(4, 6, 50).relu(), rule, CHANNEL).plan.zero_code
    for _ in range(5):
        assert recall(sites, torch.randn(4, 6, 50), rule, CHANNEL).plan.zero_code


def test_a_model_is_fitted_behind_the_step(monkeypatch):
    """Saves go on with the one that there is, however long that takes; the next save after it has the other one."""
    sites, rule, codec = Sites(refresh=1), BoundRule.parse("0.4 std"), Sz(coder="rans")

    def save() -> Any:
        return recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec).plan.model

    may_end, fit = Event(), Sz.fit
    first = save()
    monkeypatch.setattr(Sz, "fit", lambda *arguments: fit(*arguments) if may_end.wait(300) else None)
    try:
        assert all(save() is first for _ in range(5)) and sites.is_fitting
    finally:
        may_end.set()  # or the next one to ask for a model waits for this one
    sites.wait()
    assert save() is not first


@pytest.mark.parametrize("refresh", [0, -1, 2.5, "64"])
def test_refresh_is_a_number_of_saves(refresh: Any):
    with pytest.raises(AttachError, match="refresh"):
        lowtide.attach(net(), refresh=refresh)


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_continues_with_the_same_bounds(stop: int):
    """Killed after ``stop`` of seven steps and resumed by other objects: losses and weights are bit-equal."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(16, 3, 16, 16, generator=generator) * (1 + step) for step in range(7)]

    def run(model, optimizer, session, steps):
        losses = []
        for step in steps:
            loss = model(batches[step]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def start():
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        options = {"linear": "1.0 std", "norm": "1.0 std", "refresh": 4}
        return model, optimizer, lowtide.attach(model, "fixed", optimizer=optimizer, **options)

    whole = start()
    expected = run(*whole, range(7))
    first = start()
    losses = run(*first, range(stop))
    saved = copy.deepcopy([part.state_dict() for part in first])
    second = start()
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    assert losses + run(*second, range(stop, 7)) == expected
    for mine, theirs in zip(second[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_strange_state_is_refused():
    session = lowtide.attach(net())
    state = session.state_dict()
    state["sites"] = [{"site": ["a", "b", "c", []], "bound": torch.ones(1)}]
    with pytest.raises(StateError, match="known about a site"):
        session.load_state_dict(state)


def growing(rates: list[float], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens to a model whose payloads take so many times the bits that it was made for, save by save."""
    sites, rule, codec = Sites(refresh=64), BoundRule.parse("1.0 std"), Sz(coder="rans")
    for _ in range(40):
        memo = recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
        while memo.survey is not None and memo.survey.fitted(codec, memo, torch.empty(8, 6, 500)) is None:
            pass
        memo.rate, memo.rated = memo.plan.model.bits / 32, memo.plan.model
    seen = []
    for rate in rates:
        if memo.plan.model is not None:
            memo.rate, memo.rated = rate * memo.plan.model.bits / 32, memo.plan.model
        recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
        seen.append((memo.plan.model is not None, memo.survey is not None))
        while memo.survey is not None and memo.survey.fitted(codec, memo, torch.empty(8, 6, 500)) is None:
            pass
    return seen


def test_payloads_that_outgrow_their_model_get_another(monkeypatch):
    assert growing([1.05, 1.0], monkeypatch) == [(True, False), (True, False)]
    assert growing([1.05, 1.3, 1.0], monkeypatch) == [(True, False), (True, True), (True, False)]


def test_a_useless_model_is_dropped_at_once(monkeypatch):
    seen = growing([3.0, 1.0, 1.0, 1.0, 1.0], monkeypatch)
    assert seen == [(False, False), (False, False), (False, False), (False, True), (True, False)]


def test_the_size_of_a_payload_says_nothing_about_a_model_that_came_after_it():
    sites, rule, codec = Sites(refresh=64), BoundRule.parse("1.0 std"), Sz(coder="rans")
    memo = recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
    memo.rate, memo.rated = 1.0, None
    recall(sites, torch.randn(8, 6, 500), rule, CHANNEL, codec)
    assert memo.plan.model is not None


def test_a_model_for_codes_without_a_zero_is_not_taken_once_zeros_are_kept():
    """Its digits would be shifted by one: values out of their bound."""
    torch.manual_seed(0)
    x = torch.randn(1 << 16)
    x[::200] = 0  # too few for a code of their own
    sites, plain, keeping = Sites(64), Sz(coder="rans"), Sz(coder="rans", keep_zeros=True)
    for _ in range(3):
        memo = recall(sites, x, BoundRule(0.2), TENSOR, plain)
        sites.wait()
    assert memo.survey is not None and not memo.zero_code, "fitted, and not yet in use"
    for _ in range(8):
        recall(sites, x, BoundRule(0.2), TENSOR, keeping)
        encoded = keeping.encode(x, memo.bound, plan=memo.plan, seed=1)
        assert float((keeping.decode(encoded) - x).abs().max()) <= 0.2
        assert torch.equal(keeping.nonzero(encoded) != 0, x != 0)
        sites.wait()


def test_a_fit_that_fails_is_told_once():
    class Failing:
        def __init__(self) -> None:
            self._codec, self._fits = Sz(coder="rans"), 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._codec, name)

        def fit(self, *args: Any) -> Any:
            self._fits += 1
            if self._fits == 1:
                raise torch.OutOfMemoryError("the device was full for a moment")
            return self._codec.fit(*args)

    sites, codec, x, failures = Sites(64), Failing(), torch.randn(1 << 16), 0
    for _ in range(16):
        try:
            recall(sites, x, BoundRule(0.2), TENSOR, codec)
        except torch.OutOfMemoryError:
            failures += 1
        sites.wait()
    assert failures == 1 and codec._fits > 1


def test_rows_of_any_number_share_what_is_known():
    """Sentences have lengths of their own: a site must not begin anew with each of them."""
    sites, codec, rule = Sites(refresh=20), Sz(coder="rans"), BoundRule.parse("0.5 std")
    for length in range(40, 60):
        x = torch.randn(4, length, 64) * torch.rand(4, length, 1)
        memo = recall(sites, x, rule, ROW, codec)
        assert memo.bound.value.shape == (4, length)
        decoded = codec.decode(codec.encode(x, memo.bound, plan=memo.plan))
        assert ((decoded - x).abs() <= memo.bound.value.unsqueeze(-1)).all()
    assert len(sites.memos()) == 1 and len(sites.state_dict()) == 1


def test_another_number_of_channels_is_another_matter():
    sites, rule = Sites(refresh=20), BoundRule.parse("0.5 std")
    for channels in (6, 8):
        assert recall(sites, torch.randn(4, channels, 50), rule, CHANNEL).bound.value.shape == (channels,)
    assert len(sites.memos()) == 2
