"""Metrics as JSON lines, CSV and, where it is installed, TensorBoard.

``metrics.jsonl`` is what counts: a run that is resumed cuts its files back to the step it resumes from (the last line
of a killed process may be half a line), and the CSV is made from it.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lowtide.app.timeline import Sample
from lowtide.app.train.rundir import RunFolder, write

COLUMNS = (
    *("step", "epoch", "loss", "lr", "images_per_second", "raw_nbytes", "held_nbytes", "ratio", "peak_nbytes"),
    "seconds",
)
_FILES = ("metrics.jsonl", "sites.jsonl", "memory.jsonl")


class Metrics:
    """The metric files of a run; each line is written at once."""

    def __init__(self, folder: RunFolder, *, step: int) -> None:
        """``step`` steps have been done: what the files say of later ones is removed."""
        self._folder = folder
        for name in _FILES:
            _cut_back(folder, name, step)
        steps = [row for row in read_lines(folder, "metrics.jsonl") if row.get("kind") == "step"]
        write(folder / "metrics.csv", _csv_lines([dict(zip(COLUMNS, COLUMNS, strict=True)), *steps]).encode())
        self._board = _open_board(folder, step)

    def log_step(self, **values: Any) -> None:
        self._append("metrics.jsonl", {"kind": "step", **values})
        with (self._folder / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_lines([values]))
        self._show("train", values)

    def log_evaluation(self, **values: Any) -> None:
        self._append("metrics.jsonl", {"kind": "eval", **values})
        self._show("test", values)

    def log_report(self, step: int, report: Mapping[str, Any]) -> None:
        """What a session's report says about each site."""
        self._append("sites.jsonl", {"step": step, **{key: report[key] for key in ("sites", "noise", "events")}})

    def log_memory(self, step: int, samples: Iterable[Sample]) -> None:
        """The memory within one step, in place of that of an earlier one."""
        rows = [
            {"step": step, "phase": item.phase, "at": item.index, "label": item.place, "allocated": item.allocated}
            for item in samples
        ]
        write(self._folder / "memory.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with (self._folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")

    def _show(self, group: str, values: Mapping[str, Any]) -> None:
        if self._board is None:
            return
        for key, value in values.items():
            if key not in ("step", "epoch") and isinstance(value, int | float):
                self._board.add_scalar(f"{group}/{key}", value, values["step"])


def read_lines(folder: RunFolder, name: str) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, up to the first line that is none."""
    rows: list[dict[str, Any]] = []
    try:
        lines = (folder / name).read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        return rows
    for line in lines[:-1]:  # a whole line ends
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _cut_back(folder: RunFolder, name: str, step: int) -> None:
    if not (folder / name).exists():
        return
    rows = [row for row in read_lines(folder, name) if row["step"] <= step]
    write(folder / name, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _csv_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([row.get(column, "") for column in COLUMNS])
    return text.getvalue()


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_board(folder: RunFolder, step: int) -> Any:
    try:
        board = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return board.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
