"""``lowtide compare``: pairs that share all but the method, runs that are not repeated, failures that are told."""

from __future__ import annotations

import csv
import json
import re
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.app.compare import command
from lowtide.app.compare import runs as runs_module
from lowtide.app.compare.runs import COLUMNS, Run, Runner
from lowtide.app.train.config import Config, Model, Train
from lowtide.app.train.trainer import Trainer


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_methods_over_seeds(compare, calls, tmp_path, capsys):
    assert compare("--methods", "plain,exact,fixed(linear=4 std)", "--seeds", "2") == 0
    rows = _rows(tmp_path / "out" / "results.csv")
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("plain", "0"), ("exact", "0"), ("fixed(linear=4 std)", "0"),
        ("plain", "1"), ("exact", "1"), ("fixed(linear=4 std)", "1"),
    ]  # fmt: skip
    shown = capsys.readouterr()
    assert re.search(r"^plain +2 +\d+\.\d\d +\d", shown.out, re.MULTILINE)
    assert "exact - plain: +0.00 points: equal with each of 2 seeds" in shown.out
    assert re.search(r"fixed\(linear=4 std\) - plain: .* 95 % interval \[[-+]\d.*, 2 paired seeds", shown.out)
    assert "[6/6]" in shown.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [item["method"] for item in summary["methods"]] == ["plain", "exact", "fixed(linear=4 std)"]
    assert summary["methods"][1]["difference"] == summary["methods"][1]["low"] == 0.0
    assert float(rows[2]["ratio"]) > 3 and rows[0]["ratio"] == "1" and rows[0]["torch"] == torch.__version__


def test_pairs_begin_with_the_same_weights_and_see_the_same_batches(compare, calls, monkeypatch):
    seen: dict[tuple[str, int], list[Any]] = {}
    original = Trainer.step

    def step(self: Trainer, number: int, timeline: Any = None) -> torch.Tensor:
        key = (self.config.method.name, self.config.train.seed)
        if number == 0:
            seen[key] = [[parameter.detach().clone() for parameter in self.model.parameters()]]
        seen[key].append(self.batches.training(number))
        return original(self, number, timeline)

    monkeypatch.setattr(Trainer, "step", step)
    assert compare("--methods", "plain,fixed", "--seeds", "2") == 0
    flat = {key: [tensor for part in parts for tensor in part] for key, parts in seen.items()}
    for seed in (0, 1):
        pairs = list(zip(flat["plain", seed], flat["fixed", seed], strict=True))
        assert pairs and all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(flat["plain", 0][0], flat["plain", 1][0])


def test_what_is_there_is_not_repeated(compare, calls, tmp_path, capsys):
    assert compare("--methods", "plain,exact", "--seeds", "1") == 0
    assert len(calls) == 2
    assert compare("--methods", "plain,exact,fixed", "--seeds", "2") == 0
    assert len(calls) == 6  # a seed more, and a method more with both
    assert "2 of 6 runs are in out/results.csv already" in capsys.readouterr().err
    assert compare("--methods", "exact,plain", "--seeds", "2") == 0
    assert len(calls) == 6  # nothing new; the other one is the base now
    assert "plain - exact" in capsys.readouterr().out
    assert compare("--methods", "plain", "--seeds", "1", "--epochs", "1") == 0
    assert len(calls) == 7  # another configuration
    assert len(_rows(tmp_path / "out" / "results.csv")) == 7


def test_a_lost_table_is_made_again_from_the_runs(compare, calls, tmp_path, monkeypatch):
    assert compare("--methods", "plain", "--seeds", "1") == 0
    first = _rows(tmp_path / "out" / "results.csv")
    (tmp_path / "out" / "results.csv").unlink()
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("trained again"))
    assert compare("--methods", "plain", "--seeds", "1") == 0
    assert _rows(tmp_path / "out" / "results.csv")[0]["accuracy"] == first[0]["accuracy"]


def test_a_failure_is_a_row_and_takes_no_other_along(compare, calls, tmp_path, capsys, monkeypatch):
    original = Trainer.step

    def step(self: Trainer, number: int, timeline: Any = None) -> torch.Tensor:
        if self.config.method.name == "exact":
            raise RuntimeError("the tide is out")
        return original(self, number, timeline)

    monkeypatch.setattr(Trainer, "step", step)
    assert compare("--methods", "plain,exact", "--seeds", "1") == 1
    shown = capsys.readouterr()
    assert "exact, seed 0: failed: RuntimeError: the tide is out" in shown.err and "plain" in shown.out
    assert [row["error"] for row in _rows(tmp_path / "out" / "results.csv")] == ["", "RuntimeError: the tide is out"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "plian"), "unknown method 'plian'; .*Did you mean 'plain'"),
        (("--methods", "fixed(linaer=1)"), "unknown option .* 'linaer'; .*Did you mean 'linear'"),
        (("--methods", "fixed(linear"), r"cannot read 'fixed\(linear'; write NAME"),
        (("--methods", ","), "no methods given"),
        (("--methods", "plain", "--seeds", "none"), "cannot read 'none' as seeds"),
        (("--methods", "plain", "--metric", "acuracy"), "unknown metric 'acuracy'; .*Did you mean 'accuracy'"),
        (("--methods", "plain", "--jobs", "0"), "--jobs has to be at least 1, got 0"),
        (("--methods", "plain", "--data", "mnist:nowhere"), "there is no nowhere"),
        ((), "the following arguments are required: --methods"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(compare, calls, capsys, tmp_path, arguments, message):
    assert compare(*arguments) == 2
    assert re.fullmatch(rf"lowtide.*: .*{message}.*\n", capsys.readouterr().err)
    assert not calls and not (tmp_path / "out").exists()


def test_a_table_of_something_else_is_refused(compare, calls, capsys, tmp_path):
    (tmp_path / "mine.csv").write_text("a,b\n1,2\n")
    assert compare("--methods", "plain", "--results", "mine.csv") == 2
    assert "mine.csv has other columns" in capsys.readouterr().err and not calls


@pytest.mark.slow
def test_processes_side_by_side_stop_at_a_checkpoint(compare, tmp_path, capsys, monkeypatch):
    """The real thing: two at a time, each `python -m lowtide train`. The first result interrupts the command; what runs
    then writes a checkpoint, and is continued later."""
    carry_out = command.Runner.carry_out

    def interrupted(self: command.Runner, runs: Any) -> Any:
        for item in carry_out(self, runs):
            yield item
            raise KeyboardInterrupt

    arguments = ("--methods", "plain,exact", "--seeds", "1", "--jobs", "2")
    with monkeypatch.context() as patch:
        patch.setattr(command.Runner, "carry_out", interrupted)
        assert compare(*arguments) == 130
    assert len(_rows(tmp_path / "out" / "results.csv")) == 1
    assert not list((tmp_path / "out").glob("*/lock"))
    assert compare(*arguments) == 0
    assert len(_rows(tmp_path / "out" / "results.csv")) == 2
    assert "exact - plain: +0.00 points with one seed" in capsys.readouterr().out
    logs = sorted(path.name for path in (tmp_path / "out").glob("*.log"))
    assert len(logs) == 2 and logs[0].startswith("exact-0-")


class _Clock:
    """Time that passes only while a run is under way."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def begun(monkeypatch) -> list[int]:
    """Seeds of runs that were begun, by a clock that runs in them alone: one of AlexNet takes 2 seconds, others 10."""
    clock, seeds = _Clock(), []

    def call(self: Runner, run: Run, command: list[str]) -> tuple[int, str, str]:
        seeds.append(run.seed)
        clock.now += 2 if run.config.model.name == "alexnet" else 10
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True)
        (folder / "environment.json").write_text('{"revision": "r", "device": "d", "torch": "t"}')
        return 0, json.dumps(dict.fromkeys(COLUMNS, 1)), ""

    monkeypatch.setattr(Runner, "_call", call)
    monkeypatch.setattr(runs_module.time, "monotonic", clock.monotonic)
    monkeypatch.setattr(Runner, "_set_timer", lambda self: threading.Timer(0, print))
    return seeds


def test_what_would_not_be_done_in_time_is_not_begun(tmp_path, begun):
    """Runs of 10 seconds, a deadline after 25: two of them, not three, though there are 5 seconds left."""
    runner = Runner(tmp_path, 1, deadline=25.0)
    done = list(runner.carry_out([Run("plain", Config(train=Train(seed=seed))) for seed in range(4)]))
    assert begun == [0, 1] and [run.seed for run, _ in done] == begun
    assert all(runner.was_alone(run) for run, _ in done)


def test_what_a_run_takes_is_told_by_those_of_its_own_net(tmp_path, begun):
    """2, 10, 2 and 2 seconds, a deadline after 18: the last ones are begun though one of their method took 10."""
    nets = ("alexnet", "resnet18", "alexnet", "resnet18", "alexnet")
    runs = [Run("plain", Config(model=Model(name=net), train=Train(seed=seed))) for seed, net in enumerate(nets)]
    done = list(Runner(tmp_path, 1, deadline=18.0).carry_out(runs))
    assert begun == [0, 1, 2, 4] and [run.seed for run, _ in done] == begun


def test_at_the_deadline_runs_are_stopped_and_leave_no_row(tmp_path, monkeypatch):
    """Two processes side by side that would sleep for ten minutes."""
    monkeypatch.setattr(runs_module.sys, "executable", str(_script(tmp_path)))
    two = [Run("plain", Config(train=Train(seed=seed))) for seed in range(2)]
    for seconds in (2, 8, 32, 128):  # on a machine that is busy, processes take a while to begin
        heard: list[tuple[int, str]] = []
        begin = time.monotonic()
        runner = Runner(
            tmp_path, 2, begin + seconds, threads=1, watch=lambda run, line, to=heard: to.append((run.seed, line))
        )
        assert list(runner.carry_out(two)) == []
        assert time.monotonic() - begin < 500
        if len(heard) == len(two):
            break
    assert sorted(heard) == [(0, "at work, threads 1"), (1, "at work, threads 1")]
    assert not any(runner.was_alone(run) for run in two)


def test_rows_come_in_the_order_in_which_runs_end(tmp_path, monkeypatch):
    """Also those of runs that have all ended before the first row is asked for."""
    submit = ThreadPoolExecutor.submit

    def submit_and_wait(*arguments: Any) -> Future[Any]:
        future = submit(*arguments)
        wait([future])
        return future

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_and_wait)
    monkeypatch.setattr(Runner, "_carry_out", lambda self, run: {"seed": run.seed})
    runs = [Run("plain", Config(train=Train(seed=seed))) for seed in range(12)]
    assert [row["seed"] for _, row in Runner(tmp_path, 2).carry_out(runs)] == [*range(12)]


def _script(folder: Path) -> Path:
    """What is called in place of Python."""
    path = folder / "sleeps"
    path.write_text('#!/bin/sh\necho "at work, threads $OMP_NUM_THREADS" >&2\nexec sleep 600\n')
    path.chmod(0o755)
    return path
