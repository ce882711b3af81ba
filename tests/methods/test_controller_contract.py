"""What holds for every controller in the registry: a new file in ``lowtide.controllers`` is tested without an edit."""

from __future__ import annotations

import copy
import json

import pytest

from lowtide.bounds import BoundRule
from lowtide.codecs import Codec, create
from lowtide.controllers import ChoosesCodec, Controller, Keep
from lowtide.errors import StateError, UnknownNameError
from lowtide.ledger import Ledger
from lowtide.records import Kind, Need, Per, Site
from lowtide.registry import CONTROLLERS
from lowtide.statistics import Statistics, Wish

NEEDS = [
    Need(Kind.VALUES, "", family=family, per=per)
    for family in ("linear", "norm", "attention", "product", "pointwise", "log_probability", "unknown")
    for per in ((Per.CHANNEL, Per.ROW, Per.SAMPLE_CHANNEL) if family == "norm" else (Per.TENSOR,))
]
SITES = [Site("layer.0", "convolution", "input"), Site("", "addmm", "mat1", 2)]


@pytest.fixture(params=CONTROLLERS.names())
def controller(request: pytest.FixtureRequest) -> Controller:
    made: Controller = CONTROLLERS.create(request.param)
    return made


def test_an_unknown_option_is_refused_by_name() -> None:
    for name in CONTROLLERS.names():
        with pytest.raises(UnknownNameError, match=f"unknown option of controller '{name}' 'no_such_option'; known: "):
            CONTROLLERS.create(name, no_such_option=1)


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.family}-{need.per.value}")
def test_it_answers_for_every_kind_of_value(controller: Controller, need: Need) -> None:
    """A bound, or a reason to keep; the same when asked twice, since the table is frozen during a step."""
    for site in SITES:
        answer = controller.bound(site, need)
        if isinstance(answer, Keep):
            assert answer.reason
        else:
            assert BoundRule.parse(str(answer)).value > 0
        assert controller.bound(site, need) == answer


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.family}-{need.per.value}")
def test_a_codec_that_it_chooses_carries_values(controller: Controller, need: Need) -> None:
    values: Codec = create("groups", bits=4)
    if not isinstance(controller, ChoosesCodec):
        return
    for site in SITES:
        codec = controller.codec(site, need, values)
        assert codec is None or codec.carries_values
        assert controller.codec(site, need, values) == codec


def test_it_asks_in_wishes(controller: Controller) -> None:
    wishes = [controller.wants(step) for step in range(30)]
    assert all(wish is None or isinstance(wish, Wish) for wish in wishes)


def test_steps_without_statistics_are_no_reason_to_fail(controller: Controller) -> None:
    for step in range(3):
        assert isinstance(controller.step(step, None if step else Statistics(0), Ledger()), bool)
    assert isinstance(dict(controller.noise_by_site()), dict)
    assert all(isinstance(event, str) for event in controller.events())


def test_the_state_is_plain_and_comes_back(controller: Controller) -> None:
    """Plain enough for a file of any kind, and what was loaded is what is saved again."""
    for step in range(3):
        controller.step(step, None, Ledger())
    state = controller.state_dict()
    written = json.loads(json.dumps(state))
    other = type(controller)()
    other.load_state_dict(copy.deepcopy(state))
    assert json.loads(json.dumps(other.state_dict())) == written


def test_a_foreign_state_is_refused(controller: Controller) -> None:
    with pytest.raises(StateError):
        controller.load_state_dict({"something": "else"})
