"""docs/results.md: up to date, and made of nothing but the files of results."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from experiments import Experiment, Variant
from outcomes import COLUMNS, write_curve
from summaries import Summary, summarize_table

STUDY = Path(__file__).parents[2] / "study"

NUMBER = re.compile(r"\d")


def test_the_page_is_up_to_date(page, capsys):
    assert page.main(["--check"]) == 0, capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of one table, without results."""
    study = tmp_path / "study"
    study.mkdir()
    shutil.copy(STUDY / "literature.csv", study)
    (study / "cifar10_net.toml").write_text(
        "[study]\ntitle = 'CIFAR-10, net'\n[study.methods]\nplain = 3\nbudget = 3\ndivision = 2\n"
        "[data]\nname = 'cifar10'\npath = 'x'\n"
    )
    return study


def test_without_results_there_is_no_number_of_ours(page, folder):
    made = page.make(folder)
    text = made["docs/results.md"]
    tables = [line for line in text.splitlines() if line.startswith("|") and "*published*" not in line]
    ours = [re.sub("CIFAR-10|95 % interval|float32", "", line) for line in tables]  # names are no results
    assert tables and not any(NUMBER.search(line) for line in ours), ours
    assert "So far: 0 of 8 runs.\n" in text and "## CIFAR-10, net" not in text
    assert "- CIFAR-10, net: nothing has been run of `plain`, `budget`, `division`" in text
    assert "No interval" not in text, "nothing is not a good result"
    assert list(made) == ["docs/results.md", "study/results/summary.json"], "no figure of nothing"


@pytest.fixture
def add(folder: Path) -> Callable[..., None]:
    """Appends a row, with the curve of two epochs."""

    def append(method: str, seed: int, accuracy: float | None, **more: object) -> None:
        experiment = Experiment.read(folder / "cifar10_net.toml")
        place = f"curves/cifar10_net/{method}-{seed}.csv"
        line = dict.fromkeys(
            (*("epoch", "accuracy", "loss", "train_loss", "images_per_second", "raw", "held", "raw_fp32", "ratio"),
             *("ratio_fp32", "conv_raw", "conv_held", "conv_raw_fp32", "conv_ratio", "conv_ratio_fp32"))
        )  # fmt: skip
        if accuracy is not None:
            points = [{**line, "epoch": epoch, "accuracy": accuracy - 0.1 + 0.05 * epoch} for epoch in (1, 2)]
            write_curve(folder / "results" / place, points)
        row = {
            "experiment": experiment.name, "key": experiment.key, "method": method, "seed": seed,
            "options": Variant.read(method, 1).written_options, "accuracy": accuracy, "images_per_second": 1000,
            "alone": False, "curve": place, "device": "abacus", "torch": "2.11", "epochs": 2, **more,
        }  # fmt: skip
        path = folder / "results" / "cifar10_net.csv"
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow({name: "" if value is None else value for name, value in row.items()})

    return append


RATIOS = {"conv_ratio_fp32_mean": 16.04, "conv_ratio_fp32": 17.06, "ratio_fp32_mean": 12.54, "ratio_fp32": 13.14}


def _fill(add: Callable[..., None], changes: tuple[float, ...] = (-0.0004, 0.0002, 0.0005), **ratios: float) -> None:
    for seed, change in enumerate(changes):
        add("plain", seed, 0.94 + 0.001 * seed)
        add("budget", seed, 0.94 + 0.001 * seed + change, **{**RATIOS, "ratio_mean": 6.3, **ratios})


def _cells(text: str, first: str) -> list[list[str]]:
    """The rows of all tables that begin with this cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if row[0] == first]


def test_every_number_is_that_of_the_rows(page, folder, add):
    _fill(add)
    add("budget", 0, None, error="out of memory")  # an earlier row counts, a failure does not
    text = page.make(folder)["docs/results.md"]
    mean = 100 * (-0.0004 + 0.0002 + 0.0005) / 3
    half = 4.302653 * 100 * 0.000458258 / math.sqrt(3)
    interval = f"{mean - half:+.2f} to {mean + half:+.2f}"
    default = _cells(text, "CIFAR-10, net")[0]
    assert default == ["CIFAR-10, net", "94.10", "94.11", f"{mean:+.2f}", interval, "16.0x", "12.5x", "met"]
    row = _cells(text, "`budget`")[0]
    assert row[:8] == [
        "`budget`",
        "3 of 3",
        "94.11",
        f"{mean:+.2f}",
        interval,
        "16.0x / 17.1x",
        "12.5x / 13.1x",
        "6.3x",
    ]
    assert "samples/s" not in text, "runs that shared the device say nothing about speed"
    assert not _cells(text, "`division`"), "it has no run"
    assert "So far: 6 of 8 runs (CIFAR-10, net)." in text
    assert "2 epochs" in text and "abacus, torch 2.11" in text and "all runs shared the device" in text
    assert "- CIFAR-10, net: `division`, seeds 0, 1" in text and "`plain`, seeds" not in text


def test_the_speed_is_that_of_runs_that_were_alone(page, folder, add):
    _fill(add)
    add("division", 0, 0.94, alone=True, images_per_second=2000)
    add("division", 1, 0.94)
    text = page.make(folder)["docs/results.md"]
    assert _cells(text, "`division`")[0][-1] == "2000" and _cells(text, "`budget`")[0][-1] == ""
    assert "all runs shared" not in text


def test_a_changed_row_changes_the_page(page, folder, add):
    _fill(add)
    before = page.make(folder)
    add("budget", 2, 0.96, **RATIOS)
    after = page.make(folder)
    assert all(after[name] != before[name] for name in ("docs/results.md", "study/results/summary.json"))
    value = json.loads(after["study/results/summary.json"])["cifar10_net"]["methods"][1]["value"]
    assert value["mean"] == pytest.approx(100 * (0.9396 + 0.9412 + 0.96) / 3)


@pytest.mark.parametrize(
    ("changes", "ratios", "verdict"),
    [
        ((-0.0004, 0.0002, 0.0005), {}, "met"),
        ((-0.002, -0.002, -0.002), {}, "missed: accuracy"),
        ((-0.0015, -0.0013, -0.0014), {}, "missed: accuracy"),  # narrow, but zero is not in it
        ((-0.0055, 0.001, 0.0005), {}, "missed: accuracy"),  # zero is in it, but it is wide
        ((0.0, 0.0, 0.0), {"conv_ratio_fp32_mean": 14.99}, "missed: convolutions"),
        ((0.0, 0.0, 0.0), {"conv_ratio_fp32_mean": 9.0, "ratio_fp32_mean": 11.9}, "missed: convolutions, all saved"),
        ((0.0, 0.0), {}, "met (2 of 3 seeds so far)"),
        ((0.0, 0.0), {"conv_ratio_fp32_mean": 9.0}, "missed (2 of 3 seeds so far): convolutions"),
        ((), {}, "not run yet"),
    ],
)
def test_what_is_said_about_the_goal(page, folder, add, changes, ratios, verdict):
    _fill(add, changes, **ratios)
    assert page.judge(_summary(folder)) == verdict


def test_test_losses_are_compared_seed_by_seed(page, folder, add):
    for seed, (plain, ours) in enumerate(((0.50, 0.51), (0.40, 0.43))):
        add("plain", seed, 0.94, loss=plain)
        add("budget", seed, 0.94, loss=ours)
    add("plain", 2, 0.94)  # a row without
    add("budget", 2, 0.94, loss=0.1)
    half = 12.706205 * 0.0141421356 / math.sqrt(2)
    found = [row for row in _cells(page.make(folder)["docs/results.md"], "CIFAR-10, net") if row[1] == "`budget`"]
    assert found == [["CIFAR-10, net", "`budget`", "2", "+0.0200", f"{0.02 - half:+.4f} to {0.02 + half:+.4f}"]]


def _summary(folder: Path) -> Summary:
    return summarize_table(Experiment.read(folder / "cifar10_net.toml"), folder / "results")


def test_losses_and_failures_are_told(page, folder, add):
    _fill(add)
    for seed, accuracy in enumerate((0.90, 0.901)):
        add("division", seed, accuracy)
    add("plain", 7, None, error="a seed that nobody asked for")
    text = page.make(folder)["docs/results.md"]
    assert re.search(r"- CIFAR-10, net: `division` differs by -4\.00 points, -4\.00 to -4\.00\.", text)
    assert "`budget` differs" not in text and "No interval" not in text
    add("division", 1, None, error="the loss is nan")
    assert "failed" not in page.make(folder)["docs/results.md"], "it has a result"


def test_no_loss_shown_is_not_taken_for_none(page, folder, add):
    _fill(add, (-0.004, 0.002, 0.001))
    text = page.make(folder)["docs/results.md"]
    low = 100 * -0.001 / 3 - 4.302653 * 100 * 0.00321455 / math.sqrt(3)
    assert "- No interval of a difference lies wholly on the worse side of zero." in text
    assert f"intervals that hold zero allow for a loss in points of {-low:.2f} with `budget`." in text


def test_a_peak_above_that_of_plain_training_is_told(page, folder, add):
    add("plain", 0, 0.94, peak=2 << 30)
    add("budget", 0, 0.94, peak=3 << 30)
    add("division", 0, 0.94, peak=1 << 30)
    text = page.make(folder)["docs/results.md"]
    assert "- CIFAR-10, net: the peak of a run is above plain training's 2.00 GiB: 3.00 GiB with `budget`.\n" in text


def test_a_run_that_only_failed_is_told(page, folder, add):
    _fill(add)
    add("division", 1, None, error="the loss is nan")
    assert "`division`, seed 1, failed: the loss is nan" in page.make(folder)["docs/results.md"]


def test_rows_of_other_settings_are_left_out(page, folder, add):
    _fill(add)
    path = folder / "cifar10_net.toml"
    path.write_text(path.read_text() + "[train]\nepochs = 30\n")
    assert "So far: 0 of 8 runs." in page.make(folder)["docs/results.md"]


def test_the_figure_has_a_line_for_each_method(page, folder, add):
    _fill(add)
    drawing = ElementTree.fromstring(page.make(folder)["study/figures/cifar10_net.svg"])
    labels = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert {"plain", "budget", "epoch", "test accuracy, %"} <= set(labels) and "division" not in labels
    lines = [element for element in drawing.iter() if element.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [2, 2, 1, 1], "all epochs, then the last third"


def test_check_names_what_is_stale(page, folder, tmp_path, capsys):
    arguments = ["--study", str(folder), "--root", str(tmp_path / "root")]
    assert page.main([*arguments, "--check"]) == 1
    assert "docs/results.md is not up to date: python study/page.py" in capsys.readouterr().out
    assert page.main(arguments) == 0 and page.main([*arguments, "--check"]) == 0
