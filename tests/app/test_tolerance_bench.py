"""``benchmarks/tolerance.py``: noise of the energy asked for, paired runs that are not repeated, slopes of a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from repository_scripts import load_script
from torch import nn

from lowtide.app.shared.specs import UsageError


@pytest.fixture
def script() -> Any:
    return load_script("benchmarks/tolerance.py")


def rows_of(script: Any, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[dict[str, Any]]:
    given = ["--data", "digits", "--tiny", "--device", "cpu", "--batch", "600", "--epochs", "1", *flags]
    monkeypatch.setattr("sys.argv", ["tolerance.py", *given])
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(script, "show", lambda made: found.extend(made) or [])
    assert script.run_script(script.__doc__, script.configure, script.run, script.show) == 0
    return found


def test_noise_has_the_energy_of_its_dose(script: Any) -> None:
    """Of 64 x 64 normal numbers the sum of squares is within 10 % of its mean: 4.5 standard deviations."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.LayerNorm(4096))
    x = torch.randn(8, 64)

    def gradients(dose: float) -> list[torch.Tensor]:
        model.zero_grad()
        noise = script.Noise(model, dose=dose, scales=4.0, seed=1)
        (model[0](x).flatten().repeat(8) * model[1](x.repeat(1, 64)).flatten()[:4096]).sum().backward()
        noise.close()
        return [item.grad.clone() for item in model.parameters()]

    exact, lossy = gradients(0.0), gradients(0.5)
    for share, plain, noisy in zip((0.5, 2.0, 2.0), exact, lossy, strict=True):
        energy = plain.square().sum()
        assert float((noisy - plain).square().sum() / energy) == pytest.approx(share, rel=0.1)
    assert all(map(torch.equal, exact, gradients(0.0)))  # and hooks are gone


def test_runs_are_paired_and_not_repeated(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    first = rows_of(script, monkeypatch, "--seeds", "1", "--doses", "1", "--out", str(out))
    assert [(row["seed"], row["dose"]) for row in first] == [(0, 0.0), (0, 1.0)]
    assert first[0]["loss"] != first[1]["loss"]
    monkeypatch.setattr(script, "train", lambda *_: pytest.fail("a run was repeated"))
    again = rows_of(script, monkeypatch, "--seeds", "1", "--doses", "1", "--out", str(out))
    assert [row["loss"] for row in again] == pytest.approx([row["loss"] for row in first], rel=1e-5)
    flags = ("--seeds", "1", "--doses", "1", "--out", str(out))
    for other in (["--lr", "0.5"], ["--scales", "1"]):  # other settings are other runs
        with pytest.raises(pytest.fail.Exception, match="repeated"):
            rows_of(script, monkeypatch, *flags, *other)


def test_plain_runs_serve_noise_of_any_kind(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--seeds", "1", "--doses", "1", "--out", str(tmp_path / "rows.csv"))
    first = rows_of(script, monkeypatch, *flags)
    train = script.train
    trained = []
    monkeypatch.setattr(script, "train", lambda *given: trained.append(given[1].dose) or train(*given))
    second = rows_of(script, monkeypatch, *flags, "--scales", "1")
    assert trained == [1.0]
    assert [row["loss"] for row in second if row["dose"] == 0] == pytest.approx([first[0]["loss"]], rel=1e-5)
    assert second[-1]["loss"] != first[-1]["loss"]


def test_slopes_are_those_of_lines_through_the_origin(script: Any) -> None:
    rows = [
        {"seed": seed, "dose": dose, "epochs": 4, "accuracy": 0.9 - (1 + seed) * dose / 100, "loss": 0.3, "share": 0.03}
        for seed in (0, 1)
        for dose in (0.0, 0.5, 2.0)
    ]
    points, _ = script.differences(rows, "accuracy", 100.0)
    assert list(script.slopes(points).values()) == pytest.approx([-1.0, -2.0])
    told = script.show(rows)
    assert "-1.500 (-7.853 to +4.853) for a dose of 1, so -0.0450" in told[-2]  # Student's t with one degree: 12.706
    assert "+0.000 (+0.000 to +0.000) for a dose of 1" in told[-1]


def test_noise_is_compared_with_shorter_training(script: Any) -> None:
    """A quarter less training costs 2 points and a dose of 1 costs 4: half of a training less."""
    common = {"seed": 0, "loss": 0.3, "share": 0.03}
    rows = [
        {**common, "dose": 0.0, "epochs": 4, "accuracy": 0.9},
        {**common, "dose": 1.0, "epochs": 4, "accuracy": 0.86},
        {**common, "dose": 0.0, "epochs": 3, "accuracy": 0.88},
    ]
    told = script.show(rows)
    assert "points: noise of 1 % costs as much as 0.50 % less training" in told
    assert script.differences(rows, "accuracy", 100.0)[1] == pytest.approx({0: -8.0})
    assert any("  3  " in line and "-2.00" in line for line in told)


def test_a_seed_without_its_plain_run_says_nothing(script: Any) -> None:
    assert script.differences([{"seed": 3, "dose": 1.0, "epochs": 4, "loss": 0.5}], "loss", 1.0) == ({}, {})


def test_a_run_cannot_be_shorter_than_nothing(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tolerance.py", "--epochs", "2", "--shorter", "2", "--traceback"])
    with pytest.raises(UsageError, match="--shorter is less than the 2 epochs of a run, got 2"):
        script.run_script(script.__doc__, script.configure, script.run, script.show)


@pytest.mark.parametrize("text", ["", "0", "0.1,x", "-1", "inf", "1,1"])
def test_doses_that_cannot_be_read(script: Any, text: str) -> None:
    with pytest.raises(UsageError, match="as doses; write shares above zero"):
        script.read_doses(text)
