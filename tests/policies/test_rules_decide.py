"""What rules do: the first that matches decides, for values; what must be exact stays exact."""

from __future__ import annotations

import warnings

import pytest
import torch

import lowtide
from lowtide import Rule
from lowtide.codecs.cast import Cast
from lowtide.controllers.fixed import Fixed
from lowtide.policies.rules import Policy
from lowtide.records import Kind, Membership, Need, Site, TensorSpec
from lowtide.stores.host import Host

CONV, HEAD, GELU = "body.0:convolution.input", "head:addmm.mat1", "body.1:gelu.self"
RELU, UNKNOWN, STATISTIC = "(model):relu.result", "(model):logcumsumexp.self", "(model):rsqrt.result"


def test_without_rules_the_method_decides(sites):
    entries = sites(None, min_size=0)
    decided = {name: (entry.codec, entry.bound) for name, entry in entries.items()}
    assert decided[CONV] == decided[HEAD] == ("sz", "0.4 std")
    assert decided[GELU] == ("sz", "0.1 std")
    assert decided[UNKNOWN] == decided[STATISTIC] == ("kept", "")
    assert decided[RELU] == ("in sz", "")


@pytest.mark.parametrize("first", ["keep", "bound"])
def test_the_first_rule_that_matches_decides(sites, first):
    keep, bound = Rule(path="head", keep=True), Rule(path="h*", bound="0.2 std")
    entries = sites([keep, bound] if first == "keep" else [bound, keep])
    assert (entries[HEAD].codec, entries[HEAD].bound) == (("kept", "") if first == "keep" else ("sz", "0.2 std"))


def test_a_rule_that_is_always_too_late_is_still_matched(sites):
    """It is not a typo, so it is not warned about."""
    sites([Rule(path="head", keep=True), Rule(path="head", bound=1)])


def test_keep(sites):
    entries = sites([Rule(op="convolution", keep=True)])
    assert (entries[CONV].codec, entries[CONV].reason) == ("kept", "kept by rule(op='convolution')")
    assert entries[CONV].held_nbytes == entries[CONV].raw_nbytes > 0
    assert entries[HEAD].codec == "sz"


def test_keep_holds_for_what_could_be_exact_for_less(sites):
    entries = sites([Rule(op="relu", keep=True)])
    assert entries[RELU].codec == "kept"


def test_bound_alone_changes_the_bound_alone(sites):
    entries = sites([Rule(path="head", bound=0.01)])
    assert (entries[HEAD].codec, entries[HEAD].bound) == ("sz", "0.01")
    assert entries[CONV].bound == "0.4 std"


def test_codec_alone_changes_the_codec_alone(sites):
    entries = sites([Rule(path="head", codec="identity")])
    assert entries[HEAD].codec == "identity"
    assert entries[HEAD].held_nbytes == entries[HEAD].raw_nbytes
    assert entries[CONV].codec == "sz"


def test_codec_and_options(sites, net, x):
    entries = sites([Rule(path="head", codec="cast", options={"to": "bf16"})])
    assert entries[HEAD].codec == "cast"
    assert entries[HEAD].held_nbytes == pytest.approx(entries[HEAD].raw_nbytes / 2, rel=0.01)


def test_a_codec_without_a_bound_promises_none(net, x):
    """fp8 rounds to a share of each value; it is neither shown nor checked against a bound that it never took."""
    session = lowtide.attach(net, check="full", rules=[Rule(path="head", codec="cast", options={"to": "fp8_e5m2"})])
    output = net(x * torch.logspace(0, 4, 16).view(16, 1, 1, 1))  # values up to many standard deviations
    (entry,) = [entry for entry in session.report().sites if entry.name == HEAD]
    assert (entry.codec, entry.bound) == ("cast", "")
    output.sum().backward()


def test_a_codec_that_stores_no_values_is_refused_for_values(net, x):
    """``shape`` gives back whatever lies in memory: right for a pooling input, never for one that is read."""
    with pytest.raises(lowtide.LowtideError, match="shape"):
        lowtide.attach(net, rules=[Rule(path="head", codec="shape")])
        net(x).sum().backward()


def test_a_codec_that_does_not_take_the_dtype_leaves_the_tensor(sites, monkeypatch):
    monkeypatch.setattr(Cast, "accepts", lambda self, dtype: False)
    entries = sites([Rule(path="head", codec="cast")])
    assert (entries[HEAD].codec, entries[HEAD].reason) == ("kept", "codec cast does not take float32")


def test_a_bound_makes_values_of_the_exact_method_lossy(sites):
    entries = sites([Rule(path="head", bound="0.2 std")], method="exact")
    assert (entries[HEAD].codec, entries[HEAD].bound) == ("sz", "0.2 std")
    assert (entries[CONV].codec, entries[CONV].reason) == ("kept", "values kept by the method")


def test_masks_and_shapes_stay_what_they_are(sites):
    """They are exact already, and smaller than any codec for values."""
    entries = sites([Rule(op="relu", codec="identity")], method="exact")
    assert entries[RELU].need == "mask"
    assert entries[RELU].codec != "identity"


@pytest.mark.parametrize(
    "rule", [Rule(codec="sz"), Rule(bound="2 std"), Rule(op="rsqrt", codec="sz", bound=1)], ids=str
)
def test_what_must_be_exact_stays_exact(sites, rule):
    entries = sites([rule], min_size=0)
    assert (entries[STATISTIC].codec, entries[STATISTIC].need) == ("kept", "exact")


def test_parameters_are_beyond_the_reach_of_rules(sites):
    entries = sites([Rule(codec="sz", bound="2 std")], min_size=0)
    assert not [name for name in entries if name.endswith((".weight", ".mat2"))]


def test_an_unknown_op_can_be_opted_in(sites):
    entries = sites([Rule(op="logcumsumexp", field="self", bound="0.05 std")], min_size=0)
    assert (entries[UNKNOWN].codec, entries[UNKNOWN].bound) == ("sz", "0.05 std")
    assert entries["(model):logcumsumexp.result"].codec == "kept"


def test_an_unknown_op_can_be_opted_in_by_its_codec(sites):
    entries = sites([Rule(op="logcumsumexp", codec="sz")], min_size=0)
    assert (entries[UNKNOWN].codec, entries[UNKNOWN].bound) == ("sz", "0.1 std")


@pytest.mark.parametrize("rule", [Rule(bound="0.2 std"), Rule(path="*", codec="sz")], ids=str)
def test_an_unknown_op_is_not_opted_in_by_accident(sites, rule):
    """A rule that sets the bound of a whole model does not know of the op; only one that names it does."""
    entries = sites([rule], min_size=0)
    assert entries[HEAD].codec == "sz"
    assert entries[UNKNOWN].codec == "kept"


def test_bounds_hold_whatever_the_rule(net, x):
    """check="full" compares every element; a finer rule gives finer gradients."""
    net(x).sum().backward()
    plain = net.head.weight.grad.clone()
    errors = []
    for bound in (1e-1, 1e-2, 1e-3):
        session = lowtide.attach(net, "exact", check="full", rules=[Rule(path="head", bound=bound)])
        net.zero_grad()
        net(x).sum().backward()
        session.detach()
        errors.append((net.head.weight.grad - plain).abs().max().item())
    assert errors[0] > 3 * errors[1] > 9 * errors[2] > 0


def _warned(net, x, rules, forwards: int = 3) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        session = lowtide.attach(net, rules=rules)
        for _ in range(forwards):
            net(x).sum().backward()
            session.step()
    return [str(warning.message) for warning in caught]


def test_a_rule_that_matches_nothing_is_said_once_with_the_paths(net, x):
    (message,) = _warned(net, x, [Rule(path="haed", keep=True), Rule(path="head", keep=True)])
    assert message.startswith("rule(path='haed') matched none of the tensors saved in the first forward. Module paths")
    assert "there: (model), body.0, body.1, head" in message


def test_all_rules_that_match_nothing_are_said_together(net, x):
    (message,) = _warned(net, x, [Rule(path="haed", keep=True), Rule(op="softmax", bound=1)])
    assert message.startswith("rule(path='haed'); rule(op='softmax') matched none")


def test_paths_in_the_warning_are_paths(net, x):
    """What was left alone has its reason behind its name in the ledger, which is no part of the path."""
    message = _warned(net, x[:1], [Rule(path="haed", keep=True)])[0]
    assert "smaller than" not in message


def test_the_name_of_the_root_in_reports_and_warnings_is_a_path(sites):
    """``(model)`` is what a user sees there, so it is what a user will write."""
    entries = sites([Rule(path="(model)", op="relu", keep=True)])
    assert entries[RELU].codec == "kept"


def test_rules_that_match_are_not_mentioned(net, x):
    assert _warned(net, x, [Rule(path="head", keep=True), Rule(op="gelu", bound=1)]) == []


def test_a_store_goes_with_the_decision_and_rules_share_it():
    """Masks have it too, and what lies elsewhere has the session's."""
    own = Host(staging=1 << 20)
    rules = (Rule(path="a", store="host"), Rule(path="b", codec="cast", store="host"), Rule(path="c", store=own))
    policy = Policy(Fixed(), Cast(), rules)
    spec = TensorSpec.of(torch.empty(4))
    values = Need(Kind.VALUES, "", family="linear")
    mask = Need(Kind.MASK, "", membership=Membership("gt", (0.0,), (0.0, 1.0)))
    found = {path: policy.decide(Site(path, "conv", "input"), values, spec).store for path in "abcd"}
    assert isinstance(found["a"], Host) and found["a"] is found["b"] is not own
    assert found["c"] is own and found["d"] is None
    assert policy.decide(Site("a", "relu", "result"), mask, spec).store is found["a"]
