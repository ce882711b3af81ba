"""Rows of results: appended to a CSV file as they are measured, so that an interrupted run keeps what it has."""

from __future__ import annotations

import csv
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lowtide._version import ARCHIVED
from lowtide.app.shared.specs import UsageError

ENVIRONMENT = ("run", "date", "revision", "device", "torch", "triton")
_PACKAGE = Path(__file__).parents[2]


class ResultFile:
    """A CSV file that only grows. Made before any work is done: it refuses a file that has other columns."""

    def __init__(self, path: Path | None, columns: Sequence[str]) -> None:
        """``path`` None writes nothing."""
        self.path, self.columns = path, tuple(columns)
        if path is not None and path.exists() and (text := path.read_text(encoding="utf-8")):
            self._check_header(path, next(csv.reader(text.splitlines())))

    def begin(self) -> ResultFile:
        """Write the header of a new file, and see that rows can be written."""
        if self.path is None:
            return self
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        if text:
            self._write("" if text.endswith("\n") else "\n")
        else:
            self._write_cells(self.columns)
        return self

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row now; what it does not name stays empty, what has no column is a mistake of ours."""
        unknown = set(row) - set(self.columns)
        assert not unknown, f"no columns for {sorted(unknown)}"
        if self.path is not None:
            self._write_cells([_cell(row.get(column)) for column in self.columns])

    def _check_header(self, path: Path, header: list[str]) -> None:
        if tuple(header) == self.columns:
            return
        missing = [column for column in self.columns if column not in header]
        foreign = [column for column in header if column not in self.columns]
        difference = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("it lacks", missing), ("it has", foreign)) if names
        )
        raise UsageError(
            f"{path} has other columns than this version writes ({difference or 'another order'}). "
            "Move it away, or name another file with --out"
        )

    def _write_cells(self, cells: Sequence[str]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow(cells)

    def _write(self, text: str) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)


def describe_environment(device: torch.device, revision: str | None = None) -> dict[str, str]:
    """What a row says about where it was measured; ``run`` is the same for all rows of one command."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"
    return {
        "run": now(),
        "revision": find_revision() if revision is None else revision,
        "device": name,
        "torch": torch.__version__,
        "triton": _version_of("triton"),
    }


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find_revision() -> str:
    """The commit of the sources, with a plus if they differ from it; empty where neither git nor an archive says it."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return "" if ARCHIVED.startswith("$") else ARCHIVED[:12]
    commit, changes = _git("rev-parse", "--short=12", "HEAD"), _git("status", "--porcelain", "--", ".")
    return f"{commit or ''}{'+' if changes else ''}"


def explain(error: BaseException) -> str:
    """An exception as a cell of a table: its type and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
