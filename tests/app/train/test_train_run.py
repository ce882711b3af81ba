"""Whole runs on the digits: what is written, what is equal when it is interrupted, what is said when it fails."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.app.train import checkpoints
from lowtide.app.train.batches import Batches
from lowtide.app.train.memory import Meter
from lowtide.app.train.progress import Progress
from lowtide.app.train.trainer import Trainer

_HARD = ("--crop", "1", "--flip", "--cutout", "2", "--label-smoothing", "0.1", "--clip", "1.0", "--log-every", "4")
_VARIANTS = {
    "plain": (),
    "fixed": ("--method", "fixed", "--option", "linear=0.2 std"),
    "adamw": ("--method", "careful", "--optimizer", "adamw", "--schedule", "cosine", "--precision", "bf16"),
    "fp16": ("--method", "exact", "--precision", "fp16", "--channels-last"),
}


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int = signal.SIGINT) -> None:
    original = Trainer.step

    def stepping(self: Trainer, at: int, timeline: Any = None) -> Tensor:
        if at == step:
            os.kill(os.getpid(), number)
        return original(self, at, timeline)

    monkeypatch.setattr(Trainer, "step", stepping)


def test_a_run_leaves_what_the_documentation_says(train, tmp_path, read_lines, capsys):
    assert train("--method", "fixed", "--log-every", "4", "--out", "run") == 0
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir() if path.name != "tensorboard") == [
        "checkpoints", "config.toml", "environment.json", "memory.jsonl", "metrics.csv", "metrics.jsonl", "result.json",
        "sites.jsonl",
    ]  # fmt: skip
    rows = read_lines(run / "metrics.jsonl")
    assert [(row["kind"], row["step"], row["epoch"]) for row in rows] == [
        ("step", 4, 1), ("step", 6, 1), ("eval", 6, 1), ("step", 8, 2), ("step", 12, 2), ("eval", 12, 2),
    ]  # fmt: skip
    steps = [row for row in rows if row["kind"] == "step"]
    for row in steps:
        assert set(row) == {
            "kind", "step", "epoch", "loss", "lr", "images_per_second", "raw_nbytes", "held_nbytes", "ratio",
            "peak_nbytes", "seconds",
        }  # fmt: skip
        assert row["ratio"] == row["raw_nbytes"] / row["held_nbytes"] > 3
    with (run / "metrics.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in steps]
    sites = read_lines(run / "sites.jsonl")
    assert [line["step"] for line in sites] == [6, 12]
    assert {"name", "codec", "bound", "raw_nbytes", "held_nbytes", "reason"} <= set(sites[0]["sites"][0])
    result = json.loads((run / "result.json").read_text())
    assert result["accuracy"] == rows[-1]["accuracy"] and result["best"] >= result["accuracy"]
    assert (result["method"], result["seed"], result["steps"]) == ("fixed", 0, 12)
    shown = capsys.readouterr()
    assert shown.out.startswith("fixed: accuracy ") and "x less" in shown.out
    assert "epoch 2/2  step 12/12  loss" in shown.err and "images/s  held" in shown.err


def test_the_memory_within_a_step(train, tmp_path, read_lines):
    assert train("--out", "run") == 0
    samples = read_lines(tmp_path / "run" / "memory.jsonl")
    assert {sample["step"] for sample in samples} == {12}  # that of the last epoch
    assert [sample["at"] for sample in samples] == sorted(sample["at"] for sample in samples)
    phases = [sample["phase"] for sample in samples]
    assert phases == sorted(phases, reverse=True) and set(phases) == {"forward", "backward"}
    raw = json.loads((tmp_path / "run" / "result.json").read_text())["raw"]
    peak = max(sample["allocated"] for sample in samples)
    assert raw <= peak < 3 * raw  # what is saved, and what a layer works with


def test_the_configuration_makes_the_same_run_again(train, lowtide, tmp_path, read_weights, assert_same):
    assert train("--method", "careful", "--seed", "3", "--out", "first") == 0
    assert lowtide("train", "--config", "first/config.toml", "--out", "second") == 0
    assert_same(read_weights(tmp_path / "first"), read_weights(tmp_path / "second"))
    assert (tmp_path / "first" / "config.toml").read_text() == (tmp_path / "second" / "config.toml").read_text()
    assert lowtide("train", "--config", "first/config.toml", "--seed", "4", "--out", "third") == 0
    assert not torch.equal(read_weights(tmp_path / "first")[0], read_weights(tmp_path / "third")[0])


def test_exact_is_plain(train, tmp_path, read_weights, assert_same):
    """The same first weights, the same batches, the same dropout: only the method differs."""
    assert train("--out", "plain") == 0
    assert train("--method", "exact", "--out", "exact") == 0
    assert_same(read_weights(tmp_path / "plain"), read_weights(tmp_path / "exact"))
    plain, exact = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "exact"))
    assert plain["raw"] == exact["raw"] == plain["held"]


@pytest.mark.parametrize("variant", _VARIANTS)
def test_an_interrupted_run_continues_bit_equal(
    train, tmp_path, monkeypatch, read_weights, read_lines, assert_same, variant
):
    """Interrupted in the middle of an epoch and of a log interval, then again; metrics are equal too."""
    arguments = (*_HARD, *_VARIANTS[variant])
    assert train(*arguments, "--out", "whole") == 0
    for step in (2, 8):
        with monkeypatch.context() as patch:
            _interrupt_at(patch, step)
            assert train(*arguments, "--out", "parts", "--resume") == 130
    assert train("--out", "parts", "--resume") == 0  # nothing has to be said again
    assert_same(read_weights(tmp_path / "whole"), read_weights(tmp_path / "parts"))
    # When a coder's new table is taken depends on a thread: it changes sizes, never values (docs/dataflow.md, rule 14).
    free = ("seconds", "images_per_second", "held_nbytes", "ratio")
    whole, parts = (
        [{key: row[key] for key in row if key not in free} for row in read_lines(tmp_path / name / "metrics.jsonl")]
        for name in ("whole", "parts")
    )
    assert whole == parts and len(whole) == 6


def test_a_signal_ends_the_step_and_says_how_to_go_on(train, tmp_path, monkeypatch, capsys):
    _interrupt_at(monkeypatch, 3, signal.SIGTERM)
    assert train("--out", "run") == 143
    assert capsys.readouterr().err.endswith(
        "lowtide: stopped after step 4; a checkpoint is written, --resume continues from it\n"
    )
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000004.pt"]
    assert not (tmp_path / "run" / "lock").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_interrupt_does_not_wait(train, monkeypatch, capsys):
    original = Trainer.step

    def stepping(self: Trainer, at: int, timeline: Any = None) -> Tensor:
        if at == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on after the second")
        return original(self, at, timeline)

    monkeypatch.setattr(Trainer, "step", stepping)
    assert train("--out", "run") == 130
    assert "interrupted" in capsys.readouterr().err


def test_checkpoints_within_an_epoch(train, tmp_path):
    assert train("--checkpoint-every", "5", "--out", "run") == 0
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-000000010.pt", "step-000000012.pt"]


def test_weights_load_into_the_model_without_lowtide(train, tmp_path, net):
    assert train("--method", "fixed", "--out", "run") == 0
    state = torch.load(tmp_path / "run" / "checkpoints" / "step-000000012.pt", weights_only=True)
    space: dict[str, Any] = {}
    exec(Path(net.removesuffix(":net")).read_text(), space)
    space["net"](10).load_state_dict(state["model"])


def test_a_finished_run_is_not_done_again(train, monkeypatch, capsys):
    assert train("--out", "run", "--json") == 0
    first = capsys.readouterr().out
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("trained again"))
    assert train("--out", "run", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(first)


def test_a_run_that_lacks_only_its_result_gets_it(train, tmp_path, monkeypatch):
    assert train("--out", "run") == 0
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").unlink()
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("trained again"))
    assert train("--out", "run", "--resume") == 0
    again = json.loads((tmp_path / "run" / "result.json").read_text())
    assert {**first, "seconds": 0} == {**again, "seconds": 0}


def test_a_run_is_not_overwritten(train, capsys):
    assert train("--out", "run", "--epochs", "1") == 0
    assert train("--out", "run", "--epochs", "1") == 2
    assert "run holds a run already; --resume continues it" in capsys.readouterr().err


def test_a_run_that_never_got_to_a_checkpoint_is_begun_anew(train, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save", lambda *_: pytest.fail("no"))
        with pytest.raises(pytest.fail.Exception):
            train("--out", "run", "--epochs", "1")
    assert train("--out", "run", "--epochs", "1", "--seed", "5") == 0


def test_resuming_as_something_else_is_refused(train, monkeypatch, capsys):
    _interrupt_at(monkeypatch, 3)
    assert train("--out", "run") == 130
    assert train("--out", "run", "--resume", "--batch", "16", "--seed", "1") == 2
    assert (
        "another run than the one to resume: train.batch is 16, not 32; train.seed is 1, not 0"
        in capsys.readouterr().err
    )


def test_a_checkpoint_of_another_run_is_refused(train, tmp_path, monkeypatch, capsys):
    _interrupt_at(monkeypatch, 3)
    assert train("--out", "run") == 130
    assert train("--out", "other", "--seed", "7") == 130
    for path in (tmp_path / "other" / "checkpoints").iterdir():
        path.replace(tmp_path / "run" / "checkpoints" / path.name)
    assert train("--out", "run", "--resume") == 1
    assert "belongs to another configuration than config.toml" in capsys.readouterr().err


def _raise_at(monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException) -> None:
    original = Trainer.step

    def stepping(self: Trainer, at: int, timeline: Any = None) -> Tensor:
        if at == step:
            raise error
        return original(self, at, timeline)

    monkeypatch.setattr(Trainer, "step", stepping)


@pytest.mark.parametrize(
    ("method", "messages"),
    [
        ("plain", ("plain training saves", "--method careful")),
        ("exact", ("was held for backward instead of", "--method careful")),
        ("fixed", ("was held for backward instead of", "wider bounds: --method bold")),
    ],
)
def test_out_of_memory_says_what_would_need_less(train, monkeypatch, capsys, method, messages):
    _raise_at(monkeypatch, 7, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert train("--out", "run", "--method", method) == 1
    shown = capsys.readouterr().err.splitlines()[-1]
    assert "out of memory on cpu in step 8, batch 32" in shown and "try --batch 16" in shown
    assert all(message in shown for message in messages)


@pytest.mark.parametrize(
    ("owner", "method", "when"),
    [
        (
            Batches,
            "__init__",
            "before the first step, batch 32, method 'plain'; the weights take 7.70 KiB; try a smaller",
        ),
        (nn.Module, "to", "before the first step, batch 32, method 'plain'; the weights take"),
        (Meter, "begin", "before the first step, batch 32"),
        (Trainer, "evaluate", "in the evaluation after step 6, batch 32"),
        (Trainer, "state_dict", "in the checkpoint after step 6, batch 32"),
    ],
)
def test_memory_that_runs_out_beside_the_steps_is_explained_too(train, monkeypatch, capsys, owner, method, when):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(owner, method, fail)
    assert train("--out", "run") == 1
    assert f"OutOfMemoryError: out of memory on cpu {when}" in capsys.readouterr().err.splitlines()[-1]


def test_memory_that_runs_out_in_loading_a_checkpoint_does_not_make_it_another_runs(train, monkeypatch, capsys):
    _raise_at(monkeypatch, 9, RuntimeError("stop here"))
    assert train("--out", "run", "--checkpoint-every", "7") == 1

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", fail)
    assert train("--out", "run", "--resume", "--checkpoint-every", "7") == 1
    assert "out of memory on cpu before the first step" in capsys.readouterr().err.splitlines()[-1]


def test_a_full_disk_is_one_line(train, tmp_path, monkeypatch, capsys):
    def fail(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write", fail)
    assert train("--out", "run") == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("lowtide: CheckpointError: cannot write the checkpoint run/checkpoints/step-000000006.pt")
    assert "(No space left on device); there is none before it" in last
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_loss_that_is_no_number_ends_the_run(train, capsys):
    assert train("--lr", "1e30", "--out", "run") == 1
    assert "DivergedError: the loss is nan at step" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _values(step: int) -> dict[str, Any]:
    return {
        "step": step, "loss": 0.5, "images_per_second": 1234.6, "held_nbytes": 2048, "ratio": 8.0,
        "peak_nbytes": 1 << 30, "seconds_per_step": 0.5,
    }  # fmt: skip


def test_a_terminal_gets_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    terminal = _Terminal()
    progress = Progress(epochs=2, steps=10, unit="images", stream=terminal)
    progress.step(_values(5))
    progress.step(_values(10))
    progress.evaluation(1, 0.912, 0.3, 65)
    lines = terminal.getvalue().split("\r")[1:]
    assert all(len(line.split("\n")[0]) == 79 for line in lines)
    assert lines[0].rstrip() == "1/2  5/20  loss 0.500  1235/s  held 2.00 KiB (8.0x)  peak 1.00 GiB  0:08"
    assert lines[1].startswith("1/2  10/20")
    assert terminal.getvalue().endswith("\nepoch 1/2  test accuracy 91.20 %  test loss 0.3000  1:05\n")


def test_elsewhere_every_interval_is_a_line():
    stream = io.StringIO()
    progress = Progress(epochs=2, steps=10, unit="images", stream=stream)
    progress.step(_values(5))
    progress.step(_values(20))
    assert stream.getvalue().count("\n") == 2 and "\r" not in stream.getvalue()
    assert "epoch 1/2  step 5/20  loss 0.500  1235 images/s  held 2.00 KiB (8.0x less)  peak" in stream.getvalue()
    assert stream.getvalue().endswith("0:00 left\n")


def test_following_the_memory_changes_nothing(train, tmp_path, monkeypatch, read_weights, assert_same):
    arguments: Callable[[str], tuple[str, ...]] = lambda out: ("--method", "fixed", "--out", out)  # noqa: E731
    assert train(*arguments("followed")) == 0
    monkeypatch.setattr("lowtide.app.train.loop.Loop._is_followed", lambda self: False)
    assert train(*arguments("not")) == 0
    assert not (tmp_path / "not" / "memory.jsonl").exists()
    assert_same(read_weights(tmp_path / "followed"), read_weights(tmp_path / "not"))
