"""benchmarks/architectures.py: what its figures mean; models only where transformers is installed."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository_scripts import load_script

from lowtide.app.shared.specs import UsageError


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/architectures.py")


def options(bench: ModuleType, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*given])


def test_two_small_nets(bench, tmp_path):
    pytest.importorskip("transformers")
    out, threads = tmp_path / "architectures.csv", torch.get_num_threads()
    rows = bench.run(options(bench, "llama,resnet", "--precision", "fp32", "--steps", "6", "--out", str(out)))
    torch.set_num_threads(threads)
    with out.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == bench.COLUMNS and len(written) == 2
    for row in rows:
        assert row["ok"] and row["repeats"] and row["exact"] and bench.is_fine(row)
        assert 0 < row["noise"] < 0.06 and row["smaller"] > 4 and 0 < row["kept_share"] < 0.1
    assert len(bench.show(rows)) == 4


def test_what_is_fine(bench):
    good = {"ok": True, "repeats": True, "exact": True, "noise": 0.03}
    assert bench.is_fine(good)
    assert not bench.is_fine({**good, "exact": False})
    assert not bench.is_fine({**good, "noise": 0.07})
    assert not bench.is_fine({**good, "ok": False})
    assert bench.is_fine({**good, "repeats": False, "exact": False, "noise": 1.0}), "it cannot be judged"


def test_names_that_are_not_known(bench):
    with pytest.raises(UsageError, match=r"lama, fp8: not known here; known: gpt2, llama"):
        bench.run(options(bench, "lama,bert", "--precision", "fp32,fp8", "--out", "-"))


def test_a_number_of_layers_is_not_for_all(bench, monkeypatch):
    monkeypatch.setattr(bench, "choose", lambda options: (options.architectures.split(","), ["fp32"], "0"))
    with pytest.raises(UsageError, match=r"resnet: configured by other words than a number of layers"):
        bench.run(options(bench, "llama,resnet", "--layers", "8", "--out", "-"))


def test_a_failure_has_a_row(bench):
    row = {"architecture": "a", "precision": "fp32", "ok": False, "error": "TypeError: no"}
    assert bench._cells(row) == ("a", "fp32", "failed", "", "", "TypeError: no")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return load_script("benchmarks/architectures_others.py")


def test_nets_of_plain_torch(others, tmp_path):
    out, threads = tmp_path / "others.csv", torch.get_num_threads()
    rows = others.run(options(others, "graph_net", "--precision", "fp32", "--steps", "6", "--out", str(out)))
    torch.set_num_threads(threads)
    with out.open(newline="") as file:
        (written,) = csv.DictReader(file)
    assert tuple(written) == others.COLUMNS and written["diffusers"] == ""
    assert others.is_fine(rows[0]) and rows[0]["smaller"] > 8 and rows[0]["kept_share"] < 0.05


def test_every_net_of_plain_torch_runs(others):
    for name in others.TORCH:
        assert all(grad.isfinite().all() for grad in others.bench_of(name, "bf16").gradients().values())


def test_other_names_that_are_not_known(others):
    with pytest.raises(UsageError, match=r"unet, fp8: not known here; known: unet_2d, .*, fourier_operator; fp32"):
        others.run(options(others, "unet", "--precision", "fp8", "--out", "-"))


def test_a_model_of_diffusers(others):
    pytest.importorskip("diffusers")
    rows = others.run(options(others, "dit", "--precision", "fp32", "--steps", "6", "--out", "-"))
    assert others.is_fine(rows[0]) and rows[0]["diffusers"]


def test_compiled_beside_eager(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    compiled, out, threads = (
        load_script("benchmarks/architectures_compiled.py"),
        tmp_path / "c.csv",
        torch.get_num_threads(),
    )
    rows = compiled.run(options(compiled, "llama", "--precision", "fp32", "--out", str(out)))
    torch.set_num_threads(threads)
    (row,) = rows
    assert row["ok"] and row["same"] and row["graphs"] == 1
    assert row["held_compiled"] <= 1.01 * row["held"] and row["noise"] == row["noise_compiled"] > 0
    assert len(compiled.show(rows)) == 3
