"""How codecs, methods and sizes are written on the command line.

A spec is ``NAME[:SHORT][(key=value, ...)]``: ``sz:rans``, ``groups:2``, ``bold:blocks``, ``fixed(linear=0.4 std)``.
SHORT is the value of the option that matters most. Lists are separated by commas, except those inside parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lowtide import codecs, sizes
from lowtide.codecs import Codec
from lowtide.errors import LowtideError, SizeError, UnknownNameError
from lowtide.registry import CODECS

# The option that a codec's SHORT sets; for a codec that is not listed, its first one.
_SHORT_OPTIONS = {"sz": "coder", "groups": "bits", "cast": "to"}
_SPEC = re.compile(r"(?P<name>[\w.]+)(:(?P<short>[^():]+))?(\((?P<options>[^()]*)\))?")
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "none": None}


class UsageError(LowtideError, ValueError):
    """The command cannot be carried out as it was written; nothing has been run."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A name with options, as written."""

    text: str
    name: str
    short: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Spec:
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"cannot read {text!r}; write NAME, NAME:SHORT or 'NAME(key=value, ...)'")
        options = parse_options(split(match["options"] or ""))
        return cls(text.strip(), match["name"], (match["short"] or "").strip(), options)


def parse_codec(text: str) -> tuple[str, Codec]:
    """A codec that carries values, and how it was written."""
    spec = Spec.parse(text)
    options = dict(spec.options)
    if spec.short:
        names = [item.name for item in fields(CODECS.load(spec.name)) if item.init]
        short = _SHORT_OPTIONS.get(spec.name, names[0] if names else "")
        if not short:
            raise UsageError(f"codec {spec.name!r} has no options, so {text!r} says nothing")
        options[short] = parse_value(spec.short)
    try:
        codec = codecs.create(spec.name, **options)
    except UnknownNameError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"codec {text!r} cannot be made: {error}") from None
    if not codec.carries_values:
        raise UsageError(f"codec {spec.name!r} does not carry values, so there is no bound and no ratio to measure")
    return spec.text, codec


def split(text: str) -> list[str]:
    """``"a, b(c, d)"`` -> ``["a", "b(c, d)"]``; empty parts are left out."""
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def parse_options(pairs: Iterable[str]) -> dict[str, Any]:
    """``["linear=0.4 std", "bits=2"]`` -> ``{"linear": "0.4 std", "bits": 2}``."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"cannot read the option {pair!r}; write key=value")
        options[key.strip()] = parse_value(value.strip())
    return options


def parse_value(text: str) -> Any:
    """A number, true, false or none where it reads as one, else the text itself."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def parse_bytes(text: str) -> int:
    """``"2GiB"``, ``"2G"`` -> 2147483648; K, M, G and T are powers of 1024."""
    try:
        return sizes.parse(text)
    except SizeError:
        raise UsageError(f"cannot read {text!r} as a size; write bytes, or 64K, 16MiB, 2GiB") from None


def choose(kind: str, text: str, known: Iterable[str]) -> list[str]:
    """A list of names, each of which has to be known."""
    known = list(known)
    names = split(text)
    if not names:
        raise UsageError(f"no {kind} given; there are: {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UnknownNameError(kind, name, known)
    return names
