"""How codecs, methods and sizes are written."""

from __future__ import annotations

import pytest

from lowtide.app.shared import specs
from lowtide.app.shared.specs import Spec, UsageError
from lowtide.codecs.cast import Cast


@pytest.mark.parametrize(
    ("text", "name", "short", "options"),
    [
        ("sz", "sz", "", {}),
        (" sz:rans ", "sz", "rans", {}),
        ("sz:rans(predict=row)", "sz", "rans", {"predict": "row"}),
        ("fixed(linear=0.4 std, coder=rans)", "fixed", "", {"linear": "0.4 std", "coder": "rans"}),
        ("bold:blocks(min_size=1,recast=false)", "bold", "blocks", {"min_size": 1, "recast": False}),
        ("x(a=0.5,b=none,c=)", "x", "", {"a": 0.5, "b": None, "c": ""}),
    ],
)
def test_a_spec_is_read(text, name, short, options):
    spec = Spec.parse(text)
    assert (spec.name, spec.short, spec.options, spec.text) == (name, short, options, text.strip())


@pytest.mark.parametrize("text", ["", "sz:", "sz(", "sz:rans:2", "a b", "sz(x=(1))"])
def test_what_is_not_a_spec_is_refused(text):
    with pytest.raises(UsageError, match="write NAME, NAME:SHORT"):
        Spec.parse(text)


def test_commas_in_parentheses_do_not_split():
    assert specs.split("plain, fixed(a=1, b=2),,exact ") == ["plain", "fixed(a=1, b=2)", "exact"]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512", 512), ("64K", 65536), ("16MiB", 1 << 24), ("2 GiB", 1 << 31), ("1.5k", 1536), ("7B", 7)],
)
def test_sizes(text, nbytes):
    assert specs.parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1", "GiB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(UsageError, match="as a size"):
        specs.parse_bytes(text)


def test_the_short_option_is_the_one_that_matters():
    assert specs.parse_codec("sz:blocks")[1].coder == "blocks"
    assert specs.parse_codec("cast:fp8_e4m3")[1].to == "fp8_e4m3"
    assert specs.parse_codec("sz(rounding=nearest)")[1].rounding == "nearest"


def test_a_codec_without_options_takes_none():
    with pytest.raises(UsageError, match="'identity' has no options"):
        specs.parse_codec("identity:2")


def test_a_value_that_a_codec_refuses_is_refused(monkeypatch):
    def refuse(self):
        raise TypeError("'<' not supported between 'str' and 'int'")

    monkeypatch.setattr(Cast, "__post_init__", refuse)
    with pytest.raises(UsageError, match="codec 'cast:bf16' cannot be made: '<' not supported"):
        specs.parse_codec("cast:bf16")
