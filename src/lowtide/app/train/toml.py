"""Tables to TOML: Python reads it, but does not write it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def dumps(table: Mapping[str, Any]) -> str:
    """Text that ``tomllib.loads`` reads as the same values; tables within tables get headers of their own."""
    lines: list[str] = []
    _write_table(lines, (), table)
    return "\n".join(lines).strip() + "\n"


def _write_table(lines: list[str], path: tuple[str, ...], table: Mapping[str, Any]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    nested = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    if path and (plain or not nested):
        lines += ["", f"[{'.'.join(map(_key, path))}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in nested.items():
        if value:
            _write_table(lines, (*path, key), value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _quote(key)


def _quote(text: str) -> str:
    """JSON's string is TOML's, but for the one control character that JSON lets through."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else f"{'-' if value < 0 else ''}inf"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"TOML has no way to write {type(value).__name__}: {value!r}")
