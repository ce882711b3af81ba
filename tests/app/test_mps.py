"""Processes that share a GPU, with a stand-in for NVIDIA's daemon that writes down what it is told."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lowtide.app.compare.runs import Runner
from lowtide.app.shared import mps
from lowtide.app.shared.mps import shared_gpu

PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-in writes: a line for each call, with its arguments, its input and the folder of its pipes."""
    told = tmp_path / "told"
    told.touch()
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f"""#!/bin/sh
if [ "$1" = -d ]; then words=""; else words=$(cat); fi
echo "$* $words $CUDA_MPS_PIPE_DIRECTORY" >> {told}
exit ${{STATUS:-0}}
""")
    control.chmod(control.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(mps, "_PATIENCE", 300)
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return told


def test_a_daemon_is_there_for_as_long_as_it_is_needed(told: Path) -> None:
    with pytest.raises(KeyError), shared_gpu(2) as variables:
        folder = variables[PIPES]
        assert variables == {PIPES: folder, LOGS: folder} and Path(folder).is_dir()
        assert told.read_text().split() == ["-d", folder]
        raise KeyError
    assert told.read_text().splitlines()[1].split() == ["quit", folder]
    assert not Path(folder).exists() and PIPES not in os.environ


@pytest.mark.parametrize("why", ["one process", "not installed", "the user runs it", "no GPU", "it fails"])
def test_there_is_none_where_it_is_of_no_use(why: str, told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "not installed":
        monkeypatch.setenv("PATH", "")
    elif why == "the user runs it":
        monkeypatch.setenv(PIPES, "/tmp/theirs")
    elif why == "no GPU":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    elif why == "it fails":
        monkeypatch.setenv("STATUS", "1")
    with shared_gpu(1 if why == "one process" else 2) as variables:
        assert variables == {}
    assert len(told.read_text().splitlines()) == (1 if why == "it fails" else 0)


@pytest.mark.parametrize("threads", [None, 1])
def test_runs_at_the_same_time_are_given_it(threads: int | None, told: Path, tmp_path: Path) -> None:
    runner = Runner(tmp_path, 2, threads=threads)
    assert list(runner.carry_out([])) == []
    folder = told.read_text().split()[1]
    assert runner._environment()[PIPES] == folder and runner._environment()["OMP_NUM_THREADS"]
