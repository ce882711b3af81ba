"""Checkpoints: written whole or not at all, the last two kept, read with ``weights_only``.

A file is a zip with a checksum for each of its parts (torch writes it so). All of them are compared before anything is
loaded; a file that fails is passed over for the one before it.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowtide.app.train.rundir import write
from lowtide.errors import LowtideError

VERSION = 1
_KEPT = 2
_PATTERN = "step-*.pt"


class CheckpointError(LowtideError):
    """Checkpoints that cannot be read, written or used."""


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the state after ``step`` steps, then remove all but the last two."""
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:09d}.pt"
    buffer = io.BytesIO()  # a full disk is then an OSError of one write, not an error of torch's archive
    torch.save({"version": VERSION, "step": step, **state}, buffer)
    try:
        write(path, buffer.getvalue())
    except OSError as error:
        before = _list(folder)
        rest = f"{before[0].name} is intact, --resume continues from it" if before else "there is none before it"
        reason = error.strerror or error
        raise CheckpointError(f"cannot write the checkpoint {path} ({reason}); {rest} once there is room") from error
    for old in _list(folder)[_KEPT:]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest checkpoint that is whole, None if there never was one."""
    files = _list(folder)
    for path in files:
        try:
            return load(path)
        except CheckpointError as error:
            say(f"{error}; trying the one before it")
    if files:
        raise CheckpointError(f"none of the checkpoints in {folder} can be read; remove the folder to start again")
    return None


def load(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        if broken is not None:
            raise CheckpointError(f"{path}: {broken} fails its checksum: corrupted")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, zipfile.BadZipFile, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): truncated or corrupted") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        found = state.get("version") if isinstance(state, dict) else None
        raise CheckpointError(f"{path} has version {found} of the format, this Lowtide reads version {VERSION}")
    return state


def _list(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted(folder.glob(_PATTERN), reverse=True)
