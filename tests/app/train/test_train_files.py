"""Files of a run: locks, replaced files, checkpoints, metrics. Whole or not at all, whatever happens in between."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from lowtide.app.shared.specs import UsageError
from lowtide.app.train import checkpoints, rundir
from lowtide.app.train.checkpoints import CheckpointError
from lowtide.app.train.metrics import COLUMNS, Metrics
from lowtide.app.train.rundir import RunFolder

_HOLDER = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
os.write(descriptor, b'{"pid": 4711, "host": "there", "since": "noon"}')
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_and_a_lock_left_behind_is_not(tmp_path: Path):
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=r"in use by another process .process 4711 on there, since noon"):
            RunFolder(tmp_path).__enter__()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert (tmp_path / "lock").exists()
    with RunFolder(tmp_path) as folder:
        assert json.loads((folder / "lock").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock").exists()


def test_two_in_one_process_are_refused_too(tmp_path: Path):
    with RunFolder(tmp_path), pytest.raises(UsageError, match=f"process {os.getpid()}"):
        RunFolder(tmp_path).__enter__()


def test_drafts_of_killed_processes_are_removed(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    drafts = [tmp_path / ".config.toml.12.tmp", tmp_path / "checkpoints" / ".step-000000002.pt.12.tmp"]
    for draft in drafts:
        draft.write_text("half")
    with RunFolder(tmp_path):
        assert not any(draft.exists() for draft in drafts)


def test_a_folder_with_something_else_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is no empty folder and holds no run"):
        RunFolder(tmp_path).check_free()


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    path = tmp_path / "file"
    rundir.write(path, b"before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if moment != "write":
            patch.setattr(os, moment, fail)
        with pytest.raises(OSError, match="No space left"):
            rundir.write_with(path, fail if moment == "write" else lambda file: file.write(b"after"))
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def _state(value: float) -> dict[str, object]:
    return {"model": {"weight": torch.full((1000,), value)}, "seconds": 1.5}


def test_the_last_two_checkpoints_are_kept_and_the_newest_is_loaded(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    for step in (5, 40, 300):
        checkpoints.save(folder, step, _state(step))
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000040.pt", "step-000000300.pt"]
    state = checkpoints.load_newest(folder, pytest.fail)
    assert state is not None and state["step"] == 300 and state["model"]["weight"].unique().tolist() == [300]


def test_no_checkpoint_is_no_error(tmp_path: Path):
    assert checkpoints.load_newest(tmp_path / "checkpoints", pytest.fail) is None


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_broken_checkpoint_is_passed_over(tmp_path: Path, damage: str):
    checkpoints.save(tmp_path, 1, _state(1))
    newest = checkpoints.save(tmp_path, 2, _state(2))
    content = bytearray(newest.read_bytes())
    with zipfile.ZipFile(newest) as archive:
        largest = max(archive.infolist(), key=lambda item: item.file_size)
    content[largest.header_offset + 2000] ^= 1  # one bit, in the middle of the weights
    damaged = {"truncated": content[:-300], "flipped": content, "empty": b"", "text": b"hello"}[damage]
    newest.write_bytes(damaged)
    said: list[str] = []
    state = checkpoints.load_newest(tmp_path, said.append)
    assert state is not None and state["step"] == 1
    assert len(said) == 1 and newest.name in said[0] and "corrupted" in said[0]
    (tmp_path / "step-000000001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .* can be read"):
        checkpoints.load_newest(tmp_path, said.append)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path):
    torch.save({"version": 1, "step": 1, "model": Path("x")}, tmp_path / "step-000000001.pt")
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.load(tmp_path / "step-000000001.pt")


def test_another_version_is_refused(tmp_path: Path):
    torch.save({"version": 99}, tmp_path / "step-000000001.pt")
    with pytest.raises(CheckpointError, match="has version 99 of the format, this Lowtide reads version 1"):
        checkpoints.load(tmp_path / "step-000000001.pt")


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path):
    """A limit on the size of files stands for the disk: the system refuses the write in its middle."""
    checkpoints.save(tmp_path, 1, _state(1))
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(CheckpointError, match=r"cannot write .*step-000000002.pt .*step-000000001.pt is intact"):
            checkpoints.save(tmp_path, 2, _state(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001.pt"]


def _log(metrics: Metrics, step: int, loss: float = 1.0) -> None:
    metrics.log_step(step=step, epoch=1, loss=loss, lr=0.1, images_per_second=9.0, raw_nbytes=4, held_nbytes=1)


def test_resuming_cuts_the_files_back(tmp_path: Path):
    with RunFolder(tmp_path) as folder:
        metrics = Metrics(folder, step=0)
        for step in (1, 2, 3, 4):
            _log(metrics, step)
        metrics.log_evaluation(step=2, epoch=1, accuracy=0.5, loss=1.0)
        metrics.log_report(4, {"sites": [{"name": "a"}], "noise": {"a": {"share": float("inf")}}, "events": ["b"]})
        rows = [json.loads(line) for line in (folder / "sites.jsonl").read_text().splitlines()]
        assert rows == [{"step": 4, "sites": [{"name": "a"}], "noise": {"a": {"share": None}}, "events": ["b"]}]
        metrics.close()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "step": 5, "lo')  # killed while writing
        metrics = Metrics(folder, step=2)
        _log(metrics, 3, loss=float("nan"))
        metrics.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"]) for row in rows] == [("step", 1), ("step", 2), ("eval", 2), ("step", 3)]
    assert rows[-1]["loss"] is None  # JSON has no NaN
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines[0] == ",".join(COLUMNS) and [line.split(",")[0] for line in lines[1:]] == ["1", "2", "3"]
    assert not (tmp_path / "sites.jsonl").read_text()


def test_scalars_go_to_tensorboard_where_it_is_installed(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunFolder(tmp_path) as folder:
        metrics = Metrics(folder, step=0)
        _log(metrics, 1, loss=2.5)
        metrics.log_evaluation(step=1, epoch=1, accuracy=0.75, loss=1.0)
        metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.5)]
    assert [event.value for event in events.Scalars("test/accuracy")] == [0.75]
