"""The folder of a run: who is at work in it, and files that are there whole or not at all.

config.toml       the configuration, complete: `lowtide train --config` makes the same run again
environment.json  versions, device, revision, command
metrics.jsonl     a line for every log interval ("step") and after every epoch ("eval")
metrics.csv       the same steps
sites.jsonl       after every epoch: what is held at each place of the model
memory.jsonl      samples of the memory within one step
checkpoints/      the last two
result.json       at the end
lock              while a process is at work: its id
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import torch

from lowtide._version import __version__
from lowtide.app.shared import allocator
from lowtide.app.shared.rows import describe_environment
from lowtide.app.shared.specs import UsageError
from lowtide.app.train import toml
from lowtide.app.train.config import Config, read_file

try:
    import fcntl
except ImportError:  # not on Windows: there the file only tells who was here last
    fcntl = None  # type: ignore[assignment]


class RunFolder:
    """A folder that this process alone writes to, from ``with`` to its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path / "lock")
        for draft in (*self.path.glob(".*.tmp"), *self.checkpoints.glob(".*.tmp")):
            draft.unlink(missing_ok=True)  # of a process that was killed
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        assert self._lock is not None
        release(self.path / "lock", self._lock)
        self._lock = None

    @property
    def is_locked(self) -> bool:
        return self._lock is not None

    @property
    def holds_run(self) -> bool:
        """Whether there is something that a new run must not overwrite."""
        return (self / "result.json").exists() or any(self.checkpoints.glob("*.pt"))

    def check_free(self) -> None:
        """Refuse a folder that holds a run, or something else than a run."""
        if self.holds_run:
            raise UsageError(f"{self.path} holds a run already; --resume continues it, --out names another folder")
        known = ("config.toml", "environment.json", "lock")
        foreign = self.path.exists() and any(self.path.iterdir()) and not any((self / name).exists() for name in known)
        if foreign:
            raise UsageError(f"{self.path} is no empty folder and holds no run; name another one with --out")

    def read_config(self) -> Config | None:
        """The configuration of the run in this folder, None if there is none."""
        path = self / "config.toml"
        return Config.read(read_file(path)) if path.exists() else None

    def read_result(self) -> dict[str, Any] | None:
        """The result of the run, None if it has not ended."""
        try:
            result: dict[str, Any] = json.loads((self / "result.json").read_text(encoding="utf-8"))
            return result
        except FileNotFoundError:
            return None

    def begin(self, config: Config, device: torch.device) -> None:
        """Write what a new run is. The configuration comes last: where it is, there is a run."""
        write_json(self / "environment.json", _describe(device))
        write(self / "config.toml", toml.dumps(config.tables()).encode())


def lock(path: Path) -> int:
    """Take the lock of a folder, or say who has it. The system lets go of it when its process ends, however that ends,
    so a file that a killed process left behind is no obstacle."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if fcntl is not None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                owner = os.read(descriptor, 1000).decode(errors="replace")
                os.close(descriptor)
                raise UsageError(f"{path.parent} is in use by another process ({_describe_owner(owner)})") from None
        if _is_same(path, descriptor):  # and not one that its owner has just removed
            break
        os.close(descriptor)
    about = {"pid": os.getpid(), "host": platform.node(), "since": _now()}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(about).encode())
    return descriptor


def release(path: Path, descriptor: int) -> None:
    """Remove the lock, then let go of it."""
    path.unlink(missing_ok=True)
    os.close(descriptor)


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        return "which has not said who it is"


def write(path: Path, content: bytes) -> None:
    """Replace a file: whoever looks finds the old content or the new, also after a crash."""
    write_with(path, lambda file: file.write(content))


def write_with(path: Path, fill: Callable[[BinaryIO], Any]) -> None:
    """The same, with a function that writes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _sync_folder(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write(path, (json.dumps(value, indent=2) + "\n").encode())


def _sync_folder(path: Path) -> None:
    """Put a rename on disk; folders cannot be opened everywhere."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _describe(device: torch.device) -> dict[str, Any]:
    about = describe_environment(device)
    about.pop("run")
    return {
        "date": _now(),
        "command": sys.argv,
        "lowtide": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": allocator.describe_setting(),
        **about,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
