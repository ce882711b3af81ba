"""state_dict and load_state_dict: a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import lowtide
from lowtide.errors import StateError

# Printed with six digits it would be 0.5, which is another grid and a larger bound.
BOUNDS = {"method": "fixed", "linear": 0.4999999, "pointwise": "0.3 std"}


class _Run:
    """A model in training, with all that has to be saved to go on."""

    def __init__(self, model, **options) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        self.session = lowtide.attach(model, optimizer=self.optimizer, **options)

    def train(self, first: int, last: int, x: torch.Tensor) -> _Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            for part in (x, x.flip(0)):  # two forwards a step
                self.model(part + step / 8).square().mean().backward()
            self.optimizer.step()
        return self

    def save(self) -> io.BytesIO:
        file = io.BytesIO()
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "session")}
        torch.save(state, file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> _Run:
        for name, state in torch.load(file, weights_only=True).items():
            getattr(self, name).load_state_dict(state)
        return self

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]


@pytest.mark.parametrize(
    "options",
    [{}, {"method": "fixed"}, {"seed": 7}, {"rounding": "nearest"}, BOUNDS],
    ids=["defaults", "fixed", "seed", "nearest", "bounds"],
)
def test_a_resumed_run_is_bit_equal(mlp, x, assert_same, options):
    straight = _Run(mlp(), **options).train(0, 4, x)
    stopped = _Run(mlp(), **options).train(0, 2, x)
    resumed = _Run(mlp(), **options).load(stopped.save()).train(2, 4, x)
    assert_same(straight.weights(), resumed.weights())
    assert resumed.session.ledger.step == straight.session.ledger.step == 4


@pytest.mark.parametrize("options", [{"seed": 3}, {"linear": "0.2 std"}], ids=["seed", "bounds"])
def test_the_state_carries_seed_and_bounds(mlp, x, assert_same, options):
    """A session made with other options goes on under those of the state."""
    straight = _Run(mlp(), method="fixed", **options).train(0, 4, x)
    stopped = _Run(mlp(), method="fixed", **options).train(0, 2, x)
    resumed = _Run(mlp(), method="fixed", seed=9, linear="1 std").load(stopped.save()).train(2, 4, x)
    assert_same(straight.weights(), resumed.weights())


def test_decisions_made_before_loading_are_made_again(mlp, x):
    finer, model = lowtide.attach(mlp(), "fixed", linear="0.01 std").state_dict(), mlp()
    session = lowtide.attach(model, "fixed", linear="1 std")

    def error() -> float:
        saved = model(x).grad_fn._saved_mat1
        with torch.no_grad():
            return (saved - model[:4](x)).abs().max().item()

    coarse = error()
    session.load_state_dict(finer)
    assert error() < coarse / 50


def test_a_session_that_has_been_used_forgets_it(mlp, x, assert_same):
    """A trial forward before loading (to warm up, to build lazy layers) leaves no trace in the dither."""
    straight = _Run(mlp()).train(0, 4, x)
    stopped = _Run(mlp()).train(0, 2, x)
    resumed = _Run(mlp())
    resumed.model(x)
    assert_same(straight.weights(), resumed.load(stopped.save()).train(2, 4, x).weights())


def test_without_its_state_a_run_is_another_one(mlp, x):
    """That the tests above can fail: the step is part of the dither."""
    straight = _Run(mlp()).train(0, 4, x)
    stopped = _Run(mlp()).train(0, 2, x)
    resumed = _Run(mlp())
    resumed.model.load_state_dict(stopped.model.state_dict())
    resumed.optimizer.load_state_dict(copy.deepcopy(stopped.optimizer.state_dict()))
    resumed.train(2, 4, x)
    assert not all(torch.equal(*pair) for pair in zip(straight.weights(), resumed.weights(), strict=True))


def test_a_state_survives_its_session(mlp, x):
    """What state_dict gave is not changed by going on."""
    run = _Run(mlp()).train(0, 1, x)
    state = run.session.state_dict()
    kept = copy.deepcopy(state)
    run.train(1, 2, x)
    assert state == kept
    assert run.session.state_dict()["step"] == 2


def test_a_state_is_plain(mlp):
    assert set(lowtide.attach(mlp()).state_dict()) == {
        "version", "method", "seed", "step", "controller", "sites", "statistics"
    }  # fmt: skip
    assert lowtide.attach(mlp(), "exact").state_dict()["method"] == "exact"


@pytest.fixture
def session(mlp):
    return lowtide.attach(mlp(), "fixed")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("seed"), r"has the keys \['controller', 'method', 'seed', .*this one has \['control"),
        (lambda state: state.update(extra=1), r"a session's state has the keys .* this one has .*'extra'"),
        (lambda state: state.clear(), r"this one has \[\]"),
        (lambda state: state.update(version=1), "state has version 1, this Lowtide reads version 3"),
        (lambda state: state.update(version=None), "state has version None"),
        (lambda state: state.update(method="exact"), "state belongs to method 'exact', this session runs 'fixed'"),
        (lambda state: state.update(controller={}), r"controller 'fixed' keeps 'table' in its state, .* has \[\]"),
        (lambda state: state["controller"].update(more=1), r"keeps 'table' .* has \['more', 'table'\]"),
        (lambda state: state.update(controller={"table": {}}), "table|family|linear"),
        (lambda state: state["controller"]["table"].update(lineer="1 std"), "lineer"),
    ],
    ids=[
        "missing",
        "extra",
        "empty",
        "version",
        "no version",
        "method",
        "controller",
        "extra in it",
        "no table",
        "typo",
    ],
)
def test_foreign_states_are_refused(session, change, message):
    state = copy.deepcopy(session.state_dict())
    change(state)
    with pytest.raises(StateError, match=message):
        session.load_state_dict(state)


def test_a_refused_state_changes_nothing(session):
    before = session.state_dict()
    state = {**copy.deepcopy(before), "seed": 5, "step": 9}
    state["controller"]["table"]["linear"] = "much"
    with pytest.raises(lowtide.LowtideError, match="much"):
        session.load_state_dict(state)
    assert session.state_dict() == before
