"""What methods without a bound choose for each family of ops, level by level; and that rules and masks come first."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import methods
from lowtide.codecs import Codec
from lowtide.controllers.families import Families
from lowtide.errors import PolicyError, UnknownNameError
from lowtide.policies.rules import Policy, Rule
from lowtide.records import Kind, Need, Per, Site, TensorSpec

CONV, LINEAR, BATCH, LAYER, GELU, LOSS = "conv", "linear", "batch norm", "layer norm", "gelu", "loss"
SAVES = {
    CONV: (Site("a", "convolution", "input"), Need(Kind.VALUES, "", family="linear")),
    LINEAR: (Site("b", "addmm", "mat1"), Need(Kind.VALUES, "", family="linear")),
    BATCH: (Site("c", "native_batch_norm", "input"), Need(Kind.VALUES, "", family="norm", per=Per.CHANNEL)),
    LAYER: (Site("d", "native_layer_norm", "input"), Need(Kind.VALUES, "", family="norm", per=Per.ROW)),
    GELU: (Site("e", "gelu", "self"), Need(Kind.VALUES, "", family="pointwise")),
    LOSS: (Site("f", "log_softmax", "result"), Need(Kind.VALUES, "", family="log_probability")),
}
SPEC = TensorSpec.of(torch.zeros(8, 4, 6, 6))


def chosen(method: str, **options: Any) -> dict[str, Codec | None]:
    """By policy, as a session decides."""
    made = methods.create(method, **options)
    policy = Policy(made.controller(), made.values())
    return {name: policy.decide(site, need, SPEC).codec for name, (site, need) in SAVES.items()}


def summary(found: dict[str, Codec | None]) -> dict[str, tuple[str, float] | None]:
    return {name: None if codec is None else (codec.name, getattr(codec, "bits", 0)) for name, codec in found.items()}


def test_division() -> None:
    two, four, eight = ("division", 2), ("division", 4), ("groups", 8)
    assert summary(chosen("division")) == {CONV: two, LINEAR: two, BATCH: two, LAYER: two, GELU: four, LOSS: eight}
    assert summary(chosen("division", bits=8))[GELU] == ("division", 8)
    assert chosen("division", block=4, rounding="nearest")[GELU].block == 4


def test_division_as_published_codes_conv_and_batch_norm_inputs_alone() -> None:
    found = chosen("division", faithful=True)
    assert {name for name, codec in found.items() if codec is not None} == {CONV, BATCH}
    assert found[CONV].faithful


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"level": "L1"}, {CONV: 4, LINEAR: 4, BATCH: None, LAYER: None, GELU: 8, LOSS: 8}),
        ({"level": "L2"}, {CONV: 4, LINEAR: 4, BATCH: 4, LAYER: 4, GELU: 8, LOSS: 8}),
        ({"level": "L2", "bits": 2}, {CONV: 2, LINEAR: 2, BATCH: 2, LAYER: 2, GELU: 4, LOSS: 8}),
        ({}, {CONV: 2, LINEAR: 2, BATCH: 2, LAYER: 2, GELU: 4, LOSS: 8}),
        ({"bits": 2.5}, {CONV: 2, LINEAR: 2, BATCH: 2, LAYER: 2, GELU: 8, LOSS: 8}),
        ({"faithful": True}, {CONV: 2, LINEAR: 2, BATCH: 2, LAYER: 2, GELU: None, LOSS: None}),
    ],
    ids=str,
)
def test_levels_of_actnn(options: dict[str, Any], expected: dict[str, int | None]) -> None:
    found = chosen("actnn", **options)
    assert {name: None if codec is None else codec.bits for name, codec in found.items()} == expected
    kinds = {name: codec.name for name, codec in found.items() if codec is not None}
    assert all(kind == ("norm_groups" if name in (BATCH, LAYER) else "groups") for name, kind in kinds.items())


@pytest.mark.parametrize(
    ("level", "start", "gelu"),
    [("L1", 4, 8), ("L1.1", 8, 8), ("L1.2", 2, 4), ("L2", 4, 8), ("L2.1", 2, 8), ("L2.2", 2, 4)],
)
def test_levels_of_gact(level: str, start: int, gelu: int) -> None:
    found = chosen("gact", level=level)
    assert (found[CONV].bits, found[LAYER].bits, found[GELU].bits, found[LOSS].bits) == (start, start, gelu, 8)
    assert chosen("gact", level=level, faithful=True)[LOSS].bits == start


@pytest.mark.parametrize(
    ("method", "options", "adapts"),
    [
        ("actnn", {}, True),
        ("actnn", {"level": "L2"}, False),
        ("gact", {}, True),
        ("gact", {"level": "L1"}, False),
        ("division", {}, False),
        ("jpeg_act", {}, False),
    ],
)
def test_only_adaptive_levels_have_anything_measured(method: str, options: dict[str, Any], adapts: bool) -> None:
    assert (methods.create(method, **options).controller().wants(0) is not None) == adapts


def test_jpeg_act_is_finer_where_errors_go_on() -> None:
    found = chosen("jpeg_act", coder="rans")
    assert (found[CONV].table, found[BATCH].table, found[GELU].table) == ("optH", "optH", "optL")
    assert found[LOSS].name == "groups" and found[GELU].coder == "rans"


def test_cusz_has_the_bounds_of_fixed_unless_told_otherwise() -> None:
    ours, fixed = methods.create("cusz", norm=0.125).controller(), methods.create("fixed").controller()
    assert str(ours.bound(*SAVES[CONV])) == str(fixed.bound(*SAVES[CONV]))
    assert str(ours.bound(*SAVES[BATCH])) == "0.125"
    assert {save: codec.name for save, codec in chosen("cusz").items() if codec.name != "cusz"} == {LOSS: "sz"}


def test_cast_leaves_alone_what_is_not_wider() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).bfloat16()
    for to, codec in (("bf16", "kept"), ("fp8_e4m3", "cast")):
        told = pytest.warns(lowtide.LowtideWarning, match="cast does not take bfloat16")
        with told if to == "bf16" else nullcontext(), lowtide.compress(model, "cast", to=to, min_size=64) as tide:
            model(torch.randn(64, 64, dtype=torch.bfloat16)).sum().backward()
        assert {entry.codec for entry in tide.ledger.sites.values() if entry.need == "values"} == {codec}


def test_a_rule_comes_before_what_a_controller_chooses() -> None:
    made = methods.create("actnn")
    rules = (Rule(op="gelu", codec="sz"), Rule(op="addmm", bound="0.1 std"), Rule(op="convolution", keep=True))
    policy = Policy(made.controller(), made.values(), rules)
    found = {name: policy.decide(site, need, SPEC) for name, (site, need) in SAVES.items()}
    assert found[GELU].codec.name == "sz" and str(found[GELU].bound) == "0.1 std"
    assert found[LINEAR].codec.name == "sz" and found[CONV].codec is None
    assert found[BATCH].codec.name == "norm_groups"


@pytest.mark.parametrize("method", ["fixed", "budget"])
def test_prediction_is_asked_for(method: str) -> None:
    assert chosen(method)[BATCH].predict == "off"
    found = chosen(method, predict="row", coder="rans")
    assert {found[BATCH].predict, found[CONV].predict} == {"row"}


@pytest.mark.parametrize(
    ("method", "options", "error", "message"),
    [
        ("actnn", {"level": "L4"}, UnknownNameError, "unknown level of actnn 'L4'; known: L1, L2, L3"),
        (
            "gact",
            {"level": "L3"},
            UnknownNameError,
            "unknown level of gact 'L3'; known: L1, L1.1, L1.2, L2, L2.1, L2.2",
        ),
        ("actnn", {"level": "L2", "bits": 3}, PolicyError, "groups has codes of 1, 2, 4, 8 bits, got 3"),
        ("actnn", {"bits": 20}, PolicyError, "codes have 1 to 8 bits, so their average cannot be 20"),
        ("division", {"bits": 3}, PolicyError, "division has codes of 1, 2, 4, 8 bits, got 3"),
        ("jpeg_act", {"table": "optM"}, UnknownNameError, "unknown table of jpeg_act 'optM'"),
        ("lossless", {"coder": "zip"}, UnknownNameError, "unknown coder 'zip'; known: blocks, rans"),
        ("cast", {"to": "fp4"}, UnknownNameError, "unknown cast target 'fp4'"),
        *(
            (method, options, error, message)
            for method in ("fixed", "budget")
            for options, error, message in (
                ({"predict": "plane"}, UnknownNameError, "unknown prediction of sz 'plane'; known: off, row"),
                ({"predict": "row", "coder": "blocks"}, PolicyError, "take coder='rans' or 'auto'"),
            )
        ),
    ],
)
def test_options_with_values_that_cannot_be(method: str, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lowtide.attach(nn.Linear(2, 2), method, **options)


def test_families_refuses_a_family_that_does_not_exist() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown family of ops 'lineer'; known: .*Did you mean 'linear'"):
        Families(codecs={"lineer": None})
