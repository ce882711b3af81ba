"""Rules from objects, dicts and TOML files, and everything a rule may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowtide
from lowtide import Rule
from lowtide.bounds import BoundRule
from lowtide.errors import BoundError, PolicyError, UnknownNameError
from lowtide.policies.rules import load_rules
from lowtide.records import Site

TOML = """
[[rule]]
path = "head"
keep = true

[[rule]]
op = "convolution"
module = "Conv2d"
codec = "sz"
bound = "0.2 std"
options = { rounding = "nearest" }

[[rule]]
field = "self"
bound = 0.01
"""

EXPECTED = (
    Rule(path="head", keep=True),
    Rule(op="convolution", module="Conv2d", codec="sz", bound="0.2 std", options={"rounding": "nearest"}),
    Rule(field="self", bound=0.01),
)

MAPPINGS = [
    {"path": "head", "keep": True},
    {"op": "convolution", "module": "Conv2d", "codec": "sz", "bound": {"std": 0.2}, "options": {"rounding": "nearest"}},
    {"field": "self", "bound": BoundRule(0.01)},
]


@pytest.fixture
def file(tmp_path):
    """``file(text)``: the path of a rule file with that text."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "rules.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_objects_dicts_and_files_say_the_same(file):
    path = file(TOML)
    for source in (EXPECTED, list(EXPECTED), MAPPINGS, {"rule": MAPPINGS}, iter(MAPPINGS), path, str(path)):
        assert load_rules(source) == EXPECTED
    assert load_rules([EXPECTED[0], *MAPPINGS[1:]]) == EXPECTED
    assert load_rules(None) == load_rules([]) == ()


def test_a_file_works_where_it_is_used(file, sites):
    entries = sites(file('[[rule]]\npath = "head"\nkeep = true\n'))
    assert entries["head:addmm.mat1"].codec == "kept"
    assert entries["head:addmm.mat1"].reason == "kept by rule(path='head')"
    assert entries["body.0:convolution.input"].codec == "sz"


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        ({"pth": "*", "keep": True}, UnknownNameError, "unknown key of a rule 'pth'; known: .*Did you mean 'path'"),
        ({"keep": True, "codec": "sz"}, PolicyError, r"rule\(everything\): 'keep' leaves a tensor as it is"),
        (
            {"keep": True, "bound": 1},
            PolicyError,
            "'keep' leaves a tensor as it is, so it has no codec, bound, store or",
        ),
        ({"keep": True, "options": {"to": "bf16"}}, PolicyError, "'keep' leaves a tensor as it is"),
        (
            {"keep": True, "store": "host"},
            PolicyError,
            "'keep' leaves a tensor as it is, so it has no codec, bound, sto",
        ),
        ({"store": "hots"}, UnknownNameError, "unknown store 'hots'.*host"),
        ({"path": "head"}, PolicyError, r"rule\(path='head'\): say keep = true, or name a codec, a bound or a store"),
        ({}, PolicyError, r"rule\(everything\): say keep = true"),
        ({"bound": 1, "options": {"rounding": "nearest"}}, PolicyError, "options belong to a codec; name it"),
        ({"codec": "identiy"}, UnknownNameError, "unknown codec 'identiy'; known: .*Did you mean 'identity'"),
        ({"codec": ""}, UnknownNameError, "unknown codec ''"),
        ({"codec": "sz", "options": {"round": "up"}}, UnknownNameError, "unknown option of codec 'sz' 'round'"),
        ({"codec": "sz", "options": {"rounding": "up"}}, UnknownNameError, "unknown rounding 'up'"),
        ({"codec": "cast", "options": {"to": "fp4"}}, UnknownNameError, "unknown cast target 'fp4'"),
        ({"bound": 0}, BoundError, "bound must be finite and greater than zero, got 0.0"),
        ({"bound": -1}, BoundError, "bound must be finite and greater than zero"),
        ({"bound": float("inf")}, BoundError, "bound must be finite and greater than zero, got inf"),
        ({"bound": "nan std"}, BoundError, "bound must be finite and greater than zero"),
        ({"bound": True}, BoundError, "cannot read True as a bound"),
        ({"bound": "a lot"}, BoundError, "cannot read 'a lot' as a bound; write a number, or one with a unit"),
        (
            {"bound": "0.4 sigma"},
            UnknownNameError,
            "unknown unit of a bound 'sigma'; known: absmax, absolute, probability, range",
        ),
        ({"bound": {"std": 1, "range": 1}}, BoundError, "a bound has one unit"),
        ({"bound": []}, BoundError, "cannot read"),
        ("head", PolicyError, "a rule is a Rule or a mapping, got str: 'head'"),
        (None, PolicyError, "a rule is a Rule or a mapping, got NoneType"),
    ],
)
def test_what_a_rule_may_not_say(rule, error, message):
    with pytest.raises(error, match=message):
        load_rules([rule])
    with pytest.raises(lowtide.LowtideError):
        load_rules([Rule(keep=True), rule])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", "rule file .*rules.toml is not TOML: "),
        (b"\xff\xfe", "rule file .*rules.toml is not TOML: "),
        ("[[rules]]\nkeep = true\n", r"rules live in a list named 'rule' \(\[\[rule\]\] in TOML\); found \['rules'\]"),
        ("[rule]\nkeep = true\n", r"rules live in a list named 'rule'"),
        ("[[rule]]\nkeep = true\n[other]\n", r"found \['other', 'rule'\]"),
        ("", r"rules live in a list named 'rule' .*; found \[\]"),
        ('[[rule]]\npath = "a"\n', r"rule\(path='a'\): say keep = true"),
        ("rule = [1]\n", "a rule is a Rule or a mapping, got int: 1"),
    ],
    ids=["syntax", "bytes", "wrong key", "one table", "another key", "empty", "says nothing", "numbers"],
)
def test_files_that_do_not_say_it(file, text, message):
    with pytest.raises(PolicyError, match=message):
        load_rules(file(text))


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(PolicyError, match=r"cannot read rule file .*nothing.toml: No such file or directory"):
        load_rules(tmp_path / "nothing.toml")
    with pytest.raises(PolicyError, match=r"cannot read rule file .*: Is a directory"):
        load_rules(str(tmp_path))


@pytest.mark.parametrize("source", [42, 0.5, Rule(keep=True), True], ids=["int", "float", "one rule", "bool"])
def test_what_is_no_list_of_rules(source):
    with pytest.raises(PolicyError, match="rule"):
        load_rules(source)


@pytest.mark.parametrize(
    "rule",
    [{"codec": "sz", "options": 3}, {"path": 5, "keep": True}, {"keep": "no"}, {"keep": True, "path": ["a", "b"]}],
    ids=["options", "path", "keep", "list"],
)
def test_values_of_the_wrong_type_are_refused(rule):
    """A TOML file can hold anything; what is not refused here fails in a forward, or is taken for true."""
    with pytest.raises(lowtide.LowtideError):
        load_rules([rule])


@pytest.mark.parametrize(
    ("rule", "matches"),
    [
        ({"path": "layer?.*"}, True),
        ({"path": "layer"}, False),
        ({"path": "Layer1.0"}, False),
        ({"op": "conv*", "field": "input"}, True),
        ({"op": "conv*", "field": "weight"}, False),
        ({"module": "Conv[12]d"}, True),
        ({"module": "Conv3d"}, False),
        ({}, True),
    ],
)
def test_patterns(rule, matches):
    site = Site("layer1.0", "convolution", "input", module="Conv2d")
    assert Rule(**rule, keep=True).matches(site) is matches


def test_rules_are_values():
    assert Rule(path="a", keep=True) == Rule(path="a", keep=True)
    assert str(Rule(path="a", op="b", keep=True)) == "rule(path='a', op='b')"
    with pytest.raises(AttributeError):
        Rule(keep=True).keep = False
