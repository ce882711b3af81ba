"""benchmarks/methods.py from end to end at tiny size: what its figures mean, and that a failure is a row."""

from __future__ import annotations

import argparse
import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from repository_scripts import load_script

from lowtide.app.shared.specs import UsageError
from lowtide.codecs.division import Division
from lowtide.registry import METHODS


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/methods.py")


def options(bench: ModuleType, *arguments: str, out: str = "-") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    shared = ["--tiny", "--device", "cpu", "--batch", "4", "--warm", "2", "--repeats", "1", "--batches", "3"]
    return parser.parse_args(["alexnet", *shared, "--precision", "fp32", "--out", out, *arguments])


def test_one_table_with_memory_time_and_noise(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, plot = tmp_path / "methods.csv", tmp_path / "methods.svg"
    methods = "exact,lossless,division,actnn(level=L2,bits=1),cast(to=fp8_e5m2)"
    bench.run(options(bench, "--methods", methods, "--plot", str(plot), out=str(out)))
    with out.open(newline="") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    assert [*rows] == ["plain", "exact", "lossless", "division", "actnn(level=L2,bits=1)", "cast(to=fp8_e5m2)"]
    assert tuple(rows["plain"]) == bench.COLUMNS and all(row["ok"] == "True" for row in rows.values())
    share = {name: float(row["noise_share"]) for name, row in rows.items()}
    assert share["plain"] == share["exact"] == share["lossless"] == 0, "what is bit-equal adds no noise"
    assert 0 < share["cast(to=fp8_e5m2)"] < share["division"] < share["actnn(level=L2,bits=1)"]
    assert all(float(row["floor_share"]) == 0 for row in rows.values())
    ratio = {name: float(row["ledger_x_less"]) for name, row in rows.items() if name != "plain"}
    assert 1 < ratio["exact"] < ratio["lossless"] < ratio["cast(to=fp8_e5m2)"] < ratio["division"]
    assert float(rows["division"]["step_x_plain"]) == pytest.approx(
        float(rows["division"]["step_ms"]) / float(rows["plain"]["step_ms"]), rel=1e-3
    )
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    drawing = ElementTree.parse(plot).getroot()
    labels = [element.text for element in drawing.iter() if element.tag.endswith("text")]
    assert "division" in labels and "exact" not in labels, "zero noise has no place on a logarithmic axis"


def test_rows_that_are_there_are_shown_and_drawn(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest one of each method that went well; other models, batches and precisions are left out."""
    path, plot = tmp_path / "methods.csv", tmp_path / "methods.svg"
    shared = {"model": "alexnet", "batch": "4", "precision": "fp32", "ok": "True", "ledger_x_less": "10"}
    rows = [
        {"method": "gact", "noise_share": "0.5", "step_ms": "2"},
        {"method": "division", "noise_share": "0.2", "step_ms": "1"},
        {"method": "gact", "noise_share": "0.1", "step_ms": "3"},
        {"method": "gact", "ok": "False", "error": "OutOfMemoryError"},
        *({"method": "cast", "noise_share": "0.3", name: "x"} for name in ("model", "batch", "precision")),
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, bench.COLUMNS)
        writer.writeheader()
        writer.writerows({**shared, **row} for row in rows)
    found = bench.run(options(bench, "--rows", str(path), "--plot", str(plot)))
    assert [(row["method"], row["step_ms"]) for row in found] == [("gact", 3.0), ("division", 1.0)]
    assert ">division<" in plot.read_text() and len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(UsageError, match="has no row of alexnet, batch 5"):
        bench.run(options(bench, "--rows", str(path), "--batch", "5"))
    with pytest.raises(UsageError, match=r"no rows can be read from .*nowhere"):
        bench.run(options(bench, "--rows", str(tmp_path / "nowhere.csv")))


def test_noise_is_relative_to_what_batches_differ_by(bench: ModuleType) -> None:
    """By hand: gradients 1 and 3 of two batches vary by 2; errors of 0.1 and 0.3 have a mean square of 0.05."""

    class Fixed:
        values = iter([1.0, 3.0])

    def gradient(task: Fixed, batch: object, number: int) -> list[torch.Tensor]:
        return [torch.tensor([next(task.values)], dtype=torch.float64)]

    lossy = [[torch.tensor([1.1], dtype=torch.float64)], [torch.tensor([3.3], dtype=torch.float64)]]
    before, bench.gradient = bench.gradient, gradient
    try:
        found = bench.compare(Fixed(), [None, None], lossy)
    finally:
        bench.gradient = before
    assert (found["sgd_noise"], found["gradient"]) == (2, 4)
    assert found["noise_share"] == pytest.approx(0.025)


def test_a_method_that_fails_is_a_row_and_not_the_end(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Division, encoded: object) -> torch.Tensor:
        raise ValueError("no such luck")

    monkeypatch.setattr(Division, "decode", broken)
    rows = bench.run(options(bench, "--methods", "division,exact"))
    assert [row["ok"] for row in rows] == [True, False, True]
    assert rows[1]["error"] == "ValueError: no such luck" and "step_ms" not in rows[1]


def test_a_method_that_is_too_slow_is_left_out(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still but for the first encoding by division, which takes 2 seconds."""
    encode, clock = Division.encode, [0.0]

    def slow(self: Division, x: torch.Tensor, *rest: object, **options: object) -> object:
        clock[0] = 2.0
        return encode(self, x, *rest, **options)

    monkeypatch.setattr(Division, "encode", slow)
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rows = bench.run(options(bench, "--methods", "division,exact", "--patience", "1.5"))
    assert [row["ok"] for row in rows] == [True, False, True]
    assert rows[1]["error"] == "skipped: its first forward took 2 s, --patience is 1.5"


def test_all_methods_are_the_default(bench: ModuleType) -> None:
    assert {text.split("(")[0] for text in bench.default_methods()} == set(METHODS.names())


def test_one_batch_has_no_noise(bench: ModuleType) -> None:
    with pytest.raises(UsageError, match="needs 2 or more --batches, got 1"):
        bench.run(options(bench, "--batches", "1"))
