"""kill -9 at any moment: ``--resume`` always works, and the weights at the end are those of a run left alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from lowtide.app import cli

_KILLS = 8
_RUN = ("--data", "digits", "--data-option", "train=192", "--data-option", "test=64", "--batch", "32", "--epochs", "4",
        "--method", "fixed", "--option", "linear=0.2 std", "--checkpoint-every", "1", "--log-every", "3")  # fmt: skip
NET = """
from torch import nn

def net(num_classes, width=8):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(width, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36 * width, num_classes),
    )
"""


@pytest.fixture(scope="module")
def processes() -> Iterator[multiprocessing.context.ForkServerContext]:
    """Children of a server that has imported everything once: they begin within milliseconds."""
    context = multiprocessing.get_context("forkserver")
    # Optimizers import the second when they are made, children the third to find their function here.
    context.set_forkserver_preload(["lowtide.app.cli", "torch._inductor.config", "pytest"])
    yield context
    forkserver._forkserver._stop()


def _command(folder: Path, out: str) -> list[str]:
    model = f"{folder / 'nets.py'}:net"
    return ["train", "--model", model, *_RUN, "--device", "cpu", "--out", str(folder / out), "--resume"]


def _work(arguments: list[str], moment: str, count: int) -> None:
    """In the child: train, and die at the ``count``-th call of a function of ``os``, before or after it."""
    torch.set_num_threads(1)
    when, _, name = moment.partition(" ")
    if name:
        original, calls = getattr(os, name), iter(range(1, 1 << 20))

        def deadly(*given: object) -> object:
            is_last = next(calls) == count
            if is_last and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*given)
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(os, name, deadly)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        sys.exit(cli.main(arguments))


def _run(processes, arguments: list[str], moment: str = "", count: int = 0, seconds: float | None = None) -> int:
    """The exit status of a child; one that is given ``seconds`` is killed then, unless it has ended."""
    child = processes.Process(target=_work, args=(arguments, moment, count))
    child.start()
    child.join(seconds)
    child.kill()
    child.join()
    return child.exitcode


@pytest.fixture(scope="module")
def folder(processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the net, and with a run that nobody disturbs in ``whole``."""
    folder: Path = tmp_path_factory.mktemp("kill")
    (folder / "nets.py").write_text(NET)
    assert _run(processes, _command(folder, "whole")) == 0
    return folder


def test_killed_at_random_moments(processes, folder, read_weights, assert_same):
    """Where a run gets to its end before it is killed, another one is begun."""
    chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID", "0"))
    killed, number, limit = 0, 0, 0.3
    while killed < _KILLS:
        status = _run(processes, _command(folder, f"random-{number}"), seconds=chance.uniform(0.0, limit))
        if status == 0:
            number += 1
            limit /= 2
            continue
        assert status == -signal.SIGKILL
        killed += 1
        limit *= 1.2  # however slow the machine, it gets on
    assert _run(processes, _command(folder, f"random-{number}")) == 0
    for run in range(number + 1):
        assert_same(read_weights(folder / "whole"), read_weights(folder / f"random-{run}"))


def test_killed_while_a_checkpoint_is_written(processes, folder, read_weights, assert_same):
    """In the draft, before and after it takes its name, and before the oldest is removed: each after a resumption."""
    for number, moment in enumerate(("before fsync", "before replace", "after replace", "before unlink")):
        status = _run(processes, _command(folder, "writes"), moment, 9 + number)
        assert status == -signal.SIGKILL, f"{moment}: it ended with {status}"
    assert _run(processes, _command(folder, "writes")) == 0
    assert_same(read_weights(folder / "whole"), read_weights(folder / "writes"))
    assert not [path for path in (folder / "writes").rglob("*") if path.name.startswith(".")]
