"""Help reads well in a terminal of 80 columns."""

from __future__ import annotations

import pytest

from lowtide.app import cli

LEAVES = [(name,) for name in cli._COMMANDS]


@pytest.mark.parametrize("command", [(), ("bench",), *LEAVES, ("bench", "codec"), ("bench", "step")], ids=" ".join)
def test_help_fits_and_says_what_and_how(lowtide, capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    assert lowtide(*command, "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith(" ".join(("usage: lowtide", *command)))
    assert "None" not in " ".join(lines)
    if command and command != ("bench",):
        assert "examples:" in lines and any(line.startswith(f"  lowtide {' '.join(command)}") for line in lines)


def test_every_command_is_in_the_list(lowtide, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lowtide("--help")
    shown = capsys.readouterr().out
    for (name,) in [*LEAVES, ("bench",)]:
        assert f"\n    {name} " in shown
