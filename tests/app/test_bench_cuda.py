"""The benchmarks on a device: the columns that only a GPU fills."""

from __future__ import annotations

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Please use the new API settings to control TF32:UserWarning"),
]


def test_codecs_on_a_device(bench_codec, read_rows):
    assert (
        bench_codec("--device", "cuda", "--codecs", "sz", "--bytes", "1M", "--warm", "1", "--sources", "relu,norm") == 0
    )
    assert all(row["ok"] == "True" and "cpu" not in row["device"] for row in read_rows())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_steps_on_a_device(bench_step, read_rows, tmp_path):
    arguments = ("--device", "cuda", "--precision", "tf32,bf16", "--methods", "checkpoint,bold,exact", "--warm", "2")
    assert bench_step(*arguments, "--sync-check", "--profile", str(tmp_path / "profile.txt"), model="resnet18") == 0
    rows = read_rows()
    assert len(rows) == 10
    for row in rows:
        assert int(row["peak"]) >= int(row["held"]) >= int(row["held_requested"]) > 0
    assert all(row["waits"] == "ok" for row in rows if row["method"] in ("plain", "checkpoint"))
    assert all(float(row["held_x_less"]) > 1 for row in rows if row["method"] in ("checkpoint", "bold"))
    assert "bf16, bold" in (tmp_path / "profile.txt").read_text()
