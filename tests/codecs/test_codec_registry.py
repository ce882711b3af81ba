"""Names and options of codecs: a wrong one is refused with the list of right ones and the nearest of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowtide import codecs
from lowtide.errors import LowtideError, UnknownNameError
from lowtide.registry import CODECS, Registry


def test_names_are_the_files_of_the_package() -> None:
    names = CODECS.names()
    assert names == tuple(sorted(names))
    assert {"bitmask", "cast", "identity", "shape", "sz", "window_index"} <= set(names)


@pytest.mark.parametrize("name", CODECS.names())
def test_a_file_exports_the_class_of_its_name(name: str) -> None:
    assert CODECS.load(name).name == name
    assert isinstance(codecs.create(name), CODECS.load(name))


def test_an_unknown_codec_lists_the_known_and_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError) as caught:
        codecs.create("bitmaks")
    assert str(caught.value) == f"unknown codec 'bitmaks'; known: {', '.join(CODECS.names())}. Did you mean 'bitmask'?"
    assert (caught.value.kind, caught.value.name, caught.value.known) == ("codec", "bitmaks", CODECS.names())


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown codec 'qqqq'; known: bitmask, .*[a-z]\.$"):
        CODECS.load("qqqq")


def test_an_unknown_option_lists_the_known_and_suggests_the_nearest() -> None:
    known = "coder, keep_zeros, predict, rounding"
    message = rf"unknown option of codec 'sz' 'roundin'; known: {known}\. Did you mean 'rounding'\?"
    with pytest.raises(UnknownNameError, match=message):
        codecs.create("sz", roundin="nearest")


@pytest.mark.parametrize("name", CODECS.names())
@pytest.mark.parametrize("option", ["version", "no_such_option"])
def test_what_is_not_an_option_is_refused(name: str, option: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown option of codec '{name}' '{option}'; known: "):
        codecs.create(name, **{option: 1})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "sz",
            {"rounding": "nearst"},
            r"unknown rounding 'nearst'; known: dither, nearest, stochastic\. Did you mean 'nearest'\?",
        ),
        ("sz", {"coder": "block"}, r"unknown coder 'block'; known: .*\bblocks\b.*\. Did you mean 'blocks'\?"),
        ("cast", {"to": "bf61"}, r"unknown cast target 'bf61'; known: bf16, fp8_e4m3, fp8_e5m2\. Did you mean 'bf16'"),
    ],
)
def test_an_option_with_an_unknown_value_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        codecs.create(name, **options)


def test_a_part_must_name_exactly_one_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lowtide_two_parts"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "none.py").write_text("")
    (package / "both.py").write_text("__all__ = ['A', 'B']\n")
    (package / "_private.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry("lowtide_two_parts", "part")
    assert registry.names() == ("both", "none")
    with pytest.raises(LowtideError, match=r"both must name exactly one class in __all__, it names \['A', 'B'\]"):
        registry.load("both")
    with pytest.raises(LowtideError, match=r"none must name exactly one class in __all__, it names \[\]"):
        registry.load("none")


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown codec 'x'; known: \(none\)\.$"):
        raise UnknownNameError("codec", "x", ())
