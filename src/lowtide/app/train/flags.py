"""Settings as flags of the command line: every setting of the configuration has one."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from typing import Any

from lowtide.app import data
from lowtide.app.shared.specs import parse_options
from lowtide.app.train.config import SECTIONS, Setting, settings

# Where the flag is not the setting's own name.
_NAMES = {
    ("model", "name"): "model",
    ("model", "options"): "model-option",
    ("data", "name"): "data",
    ("data", "options"): "data-option",
    ("method", "name"): "method",
    ("method", "options"): "option",
    ("optimizer", "name"): "optimizer",
    ("schedule", "name"): "schedule",
}
_METAVARS = {int: "N", float: "X", str: "NAME", dict: "KEY=VALUE"}
_HIDDEN = {("data", "path")}  # written as --data NAME:PATH


def add_flags(parser: argparse.ArgumentParser, *, without: tuple[str, ...] = ()) -> None:
    """A group of flags for each section; ``without`` leaves some out by their name."""
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(kind.__doc__)
        defaults = {item.name: item.default for item in fields(kind)}
        for name, setting in settings(kind):
            flag = _flag(section, name)
            if (section, name) not in _HIDDEN and flag not in without:
                _add(group, f"--{flag}", f"{section}.{name}", setting, defaults[name])


def _add(group: Any, flag: str, place: str, setting: Setting, default: Any) -> None:
    is_silent = default is None or default is False or default is MISSING or default == ""
    note = "" if is_silent else f" (default: {default})"
    options: dict[str, Any] = {"dest": place, "default": argparse.SUPPRESS, "help": setting.help + note}
    if setting.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif setting.kind is dict:
        options |= {"action": "append", "metavar": _METAVARS[dict]}
    else:
        options |= {"type": setting.kind, "metavar": _METAVARS[setting.kind]}
        if setting.choices:
            options["help"] = f"{setting.help}: {', '.join(setting.choices)}{note}"
    group.add_argument(flag, **options)


def read_flags(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The tables of what was given."""
    tables: dict[str, dict[str, Any]] = {}
    for place, value in vars(options).items():
        section, dot, name = place.partition(".")
        if not dot:
            continue
        if name == "options":
            value = parse_options(value)
        table = tables.setdefault(section, {})
        table[name] = value
        if (section, name) == ("data", "name"):
            table["name"], table["path"] = data.parse(value)
    return tables


def _flag(section: str, name: str) -> str:
    return _NAMES.get((section, name), name.replace("_", "-"))
