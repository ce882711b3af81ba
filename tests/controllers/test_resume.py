"""A run that was killed and resumed has the losses and bounds of the run that was not, bit for bit."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_run import EVERY, Run

from lowtide.controllers.comet import Comet

METHODS = {
    "budget": ("budget", {"period": 4, "noise": 0.02}),
    "memory": ("budget", {"period": 4, "memory": 0.2}),
    "comet": ("comet", {"period": 4, "momentum": 0.0}),
    "acgc": ("acgc", {"period": 4, "keep": 2}),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_run_resumed_at_any_step_is_bit_equal(name):
    """Also between a measurement and its use, when numbers are under way, and in the middle of a shadow momentum."""
    method, options = METHODS[name]
    straight = Run(method, dict(options))
    steps, states = [], []
    for number in range(10):
        file = io.BytesIO()
        torch.save({part: getattr(straight, part).state_dict() for part in ("model", "optimizer", "session")}, file)
        states.append(file)
        steps.append(straight.step(number))
    assert len({bound for step in steps for bound in step[1:] if "sz" in bound}) > 4, "bounds have moved"
    for start in (1, 3, 6):
        resumed = Run(method, dict(options))
        states[start].seek(0)
        state = torch.load(states[start], weights_only=True)
        for part in ("model", "optimizer", "session"):
            getattr(resumed, part).load_state_dict(state[part])
        for number in range(start, start + 4):
            assert resumed.step(number) == steps[number], f"step {number} after a start at {start}"
        resumed.session.detach()
    straight.session.detach()


def test_without_the_controllers_state_it_is_another_run():
    """That the test above can fail."""
    method, options = METHODS["budget"]
    straight = Run(method, dict(options))
    for number in range(5):
        straight.step(number)
    resumed = Run(method, dict(options))
    state = straight.session.state_dict()
    fresh = resumed.session.state_dict()
    for part in ("model", "optimizer"):
        getattr(resumed, part).load_state_dict(getattr(straight, part).state_dict())
    resumed.session.load_state_dict({**state, "controller": fresh["controller"], "statistics": fresh["statistics"]})
    assert resumed.step(5) != straight.step(5)
    straight.session.detach()
    resumed.session.detach()


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    method, options = METHODS["budget"]
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("train_run.py")
    return subprocess.Popen([sys.executable, script, folder, str(steps), method, json.dumps(options)])


def read(folder: Path) -> dict[int, list[str]]:
    """Every step as it was last run; a line that the kill has cut off does not count."""
    steps = {}
    for line in (folder / "steps.jsonl").read_text().splitlines():
        try:
            number, *rest = json.loads(line)
        except ValueError:
            continue
        steps[number] = rest
    return steps


def test_kill_9_in_the_middle_of_an_epoch(tmp_path):
    """Killed at some step behind the first checkpoint, whichever it is by then; then to a few steps beyond it."""
    file = tmp_path / "killed" / "steps.jsonl"
    with start(tmp_path / "killed", 1_000_000) as killed:
        try:
            deadline = time.monotonic() + 300
            while not file.exists() or len(file.read_text().splitlines()) < EVERY + 3:
                assert time.monotonic() < deadline and killed.poll() is None, "the run did not get under way"
                time.sleep(0.02)
        finally:
            killed.kill()
    assert killed.returncode == -signal.SIGKILL
    before = max(read(tmp_path / "killed"))
    assert before >= EVERY + 1, "behind a checkpoint"
    steps = before + 1 + EVERY
    runs = [start(tmp_path / name, steps) for name in ("plain", "killed")]
    assert [run.wait() for run in runs] == [0, 0]
    expected, found = read(tmp_path / "plain"), read(tmp_path / "killed")
    assert [found[number] for number in range(steps)] == [expected[number] for number in range(steps)]
    assert sum(line.startswith("[0,") for line in file.read_text().splitlines()) == 1, "it went on, not from the start"


def test_the_window_of_comet_is_part_of_its_state():
    comet = Comet(period=8)
    comet._window, comet._next = 4, 21
    other = Comet(period=8)
    other.load_state_dict(comet.state_dict())
    assert (other.window, other._is_due(19)) == (4, True)
