"""Read the folders that training runs leave behind.

A run folder holds ``metrics.jsonl`` and, as far as the run came, ``config.toml``, ``environment.json``,
``sites.jsonl``, ``memory.jsonl`` and ``result.json`` (docs/report.md has their fields). A run that was stopped may have
been writing: a last line without an end is left out and noted. Anything else that cannot be read is an error that names
the file and the line.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.app.shared.specs import UsageError
from lowtide.errors import LowtideError

METRICS = "metrics.jsonl"
Row = dict[str, Any]


class RunError(LowtideError):
    """A run folder whose files contradict their format."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one training run wrote, as it wrote it."""

    name: str
    folder: Path
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    sites: list[Row] = field(default_factory=list)
    memory: list[Row] = field(default_factory=list)
    config: Row = field(default_factory=dict)
    environment: Row = field(default_factory=dict)
    result: Row = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The name of the method; ``plain`` where Lowtide was not attached."""
        return self._name_of("method") or "plain"

    @property
    def model(self) -> str:
        return self._name_of("model")

    def _name_of(self, part: str) -> str:
        """From the result, or from the configuration, where it is a text or a table with a name."""
        value = self.result.get(part) or self.config.get(part) or ""
        return str(value.get("name", "") if isinstance(value, dict) else value)

    @property
    def is_plain(self) -> bool:
        return self.method == "plain"

    @property
    def layers(self) -> list[Row]:
        """The rows of the session's last report."""
        return self.sites[-1]["sites"] if self.sites else []

    @property
    def noise(self) -> Row:
        """Of the session's last report: by site, what the controller knows about the noise it adds."""
        noise = self.sites[-1].get("noise") if self.sites else None
        return noise if isinstance(noise, dict) else {}

    @property
    def events(self) -> list[str]:
        """Of the session's last report: what a user should know of, oldest first."""
        events = self.sites[-1].get("events") if self.sites else None
        return [str(event) for event in events] if isinstance(events, list) else []


def load_runs(paths: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, each folder being a run or holding runs; every run once, by names that differ.

    In the order of ``paths``, and of the runs in one folder the plain ones first.
    """
    folders = list(dict.fromkeys(folder.resolve() for path in paths for folder in _find(Path(path))))
    runs = [read_run(folder, name) for folder, name in zip(folders, _name(folders), strict=True)]
    return sorted(runs, key=lambda run: not run.is_plain) if len(paths) == 1 else runs


def read_run(folder: Path, name: str | None = None) -> Run:
    """One run folder."""
    notes: list[str] = []
    metrics = _read_lines(folder / METRICS, notes)
    kinds: dict[Any, list[Row]] = {"step": [], "eval": []}
    for number, row in enumerate(metrics, 1):
        if row.get("kind") not in kinds:
            raise RunError(f"{folder / METRICS}:{number}: kind is 'step' or 'eval', here it is {row.get('kind')!r}")
        kinds[row["kind"]].append(row)
    sites = _read_lines(folder / "sites.jsonl", notes)
    for number, row in enumerate(sites, 1):
        rows = row.get("sites")
        if not isinstance(rows, list) or not all(isinstance(site, dict) and "name" in site for site in rows):
            raise RunError(f"{folder / 'sites.jsonl'}:{number}: 'sites' is a list of rows with names")
    result = _read_file(folder / "result.json", json.loads)
    if not result:
        notes.append("The run has no result.json: it is still going on, or it was stopped.")
    return Run(
        name=name or folder.name,
        folder=folder,
        steps=kinds["step"],
        evals=kinds["eval"],
        sites=sites,
        memory=_read_lines(folder / "memory.jsonl", notes),
        config=_read_file(folder / "config.toml", tomllib.loads),
        environment=_read_file(folder / "environment.json", json.loads),
        result=result,
        notes=tuple(notes),
    )


def number_in(row: Row, key: str) -> float | None:
    """A finite number of a row, or None where there is none."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _find(path: Path) -> list[Path]:
    """The run folders at ``path``: itself, or those directly in it."""
    if not path.exists():
        near = _nearest(path)
        raise UsageError(f"there is no folder {path}{f'. Did you mean {near}?' if near else ''}")
    if not path.is_dir():
        raise UsageError(f"{path} is a file; a run is a folder with a {METRICS}")
    if (path / METRICS).is_file():
        return [path]
    found = sorted(child for child in path.iterdir() if (child / METRICS).is_file())
    if not found:
        raise UsageError(f"{path} is no run folder and holds none: there is no {METRICS}")
    return found


def _nearest(path: Path) -> Path | None:
    if not path.parent.is_dir():
        return None
    names = [child.name for child in path.parent.iterdir() if child.is_dir()]
    near = difflib.get_close_matches(path.name, names, n=1)
    return path.parent / near[0] if near else None


def _name(folders: Sequence[Path]) -> list[str]:
    """As many of the last parts of each path as it takes to tell them apart."""
    for depth in range(1, max((len(folder.parts) for folder in folders), default=1) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names if folders else []


def _read_lines(path: Path, notes: list[str]) -> list[Row]:
    """The rows of a JSON-lines file; none if there is no such file."""
    text = _read_text(path)
    lines = text.split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                notes.append(f"The last line of {path.name} is cut off and was left out.")
                break
            raise RunError(f"{path}:{number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise RunError(f"{path}:{number}: a line is an object, here it is {type(row).__name__}")
        rows.append(row)
    return rows


def _read_file(path: Path, parse: Callable[[str], Any]) -> Row:
    text = _read_text(path)
    if not text:
        return {}
    try:
        value = parse(text)
    except ValueError as error:  # TOMLDecodeError and JSONDecodeError are ValueErrors
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} holds an object, here it is {type(value).__name__}")
    return value


def _read_text(path: Path) -> str:
    if not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not text: {error}") from error
