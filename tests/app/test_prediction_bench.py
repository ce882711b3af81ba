"""benchmarks/prediction.py: what its figures mean, by hand, and a run from end to end at tiny size."""

from __future__ import annotations

import argparse
import csv
from types import ModuleType
from typing import Any

import pytest
import torch
from repository_scripts import load_script
from torch import Tensor, nn

from lowtide.app.shared.specs import UsageError
from lowtide.bounds import BoundRule
from lowtide.codecs.sz import Sz


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("benchmarks/prediction.py")


def options(bench: ModuleType, *arguments: str, out: Any = "-") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.configure(parser)
    return parser.parse_args([*arguments, "--tiny", "--device", "cpu", "--out", str(out)])


def quantise(bench: ModuleType, x: Tensor, layer: nn.Module, bound: str, rounding: str = "nearest") -> Any:
    read = bench.Read("here", x, *bench.find_need(layer))
    return bench.Codes.of(read, BoundRule.parse(bound), rounding, len(x))


CONVOLUTION, NORM = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_a_net_in_training_from_end_to_end(bench, tmp_path):
    out = tmp_path / "prediction.csv"
    settings = ("--batch", "32", "--steps", "1,3", "--samples", "8", "--bounds", "0.4")
    rows = bench.run(options(bench, *settings, out=out))
    sites = {row["site"]: row for row in rows}
    assert len(rows) == 2 * len(sites) and [row["step"] for row in rows] == [1] * len(sites) + [3] * len(sites)
    assert rows[0]["loss"] != rows[-1]["loss"] and rows[0]["entropy_plain"] != rows[len(sites)]["entropy_plain"]
    assert "conv1" not in sites and "bn1" in sites, "the model's own input is not coded"
    assert "layer2.0.conv1" in sites and "layer2.0.downsample.0" not in sites, "the shortcut reads the same tensor"
    assert sites["layer1.0.conv1"]["shape"] == "32x8x8x8" and sites["layer1.0.conv1"]["zeros"] > 0.25
    assert {row["family"] for row in rows if "bn" in row["site"]} == {"norm"}
    for row in rows:
        bits = [row[name] for name in bench.COLUMNS if name.startswith(("entropy_", "coded_"))]
        assert len(bits) == 14 and all(0.5 < item < 10 for item in bits), row
        assert row["entropy_plain"] < row["coded_plain"], "so small maps leave nothing to be known from neighbours"
    with out.open(newline="") as file:
        assert tuple(next(csv.reader(file))) == bench.COLUMNS
    lines = bench.show(rows)
    assert len(lines) == 2 * (3 + 2 * 3) + 1 and "bits a value, coded" in lines


@pytest.mark.parametrize("steps", ["", "0,3", "3.5", "many"])
def test_steps_are_whole_numbers(bench, steps):
    with pytest.raises(UsageError, match="--steps are numbers of 1 or more, as 300,900; got"):
        bench.run(options(bench, "--steps", steps))


def test_entropy_with_tables_by_hand(bench):
    """Two values of one bit each, two of none; three entries of 16 bits, shared by 96 values."""
    counts = torch.tensor([[1.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    assert bench.entropy(counts, 96) == pytest.approx(2 / 4 + 3 * 16 / 96)


@pytest.mark.parametrize("within", ["row", "plane"])
def test_what_is_left_after_prediction_is_enough_to_decode(bench, within):
    """Value by value, each from those decoded before and from where zeros are, which their symbol tells."""
    codes = quantise(bench, normal(2, 3, 5, 6).relu(), CONVOLUTION, "0.2 std")
    assert codes.zero is not None and codes.zero.any() and not codes.zero.all()
    left, zero = (part.view(6, 5, 6).tolist() for part in (codes.predicted(within).q, codes.zero))
    planes = []
    for plane in range(6):
        done = [[0] * 7 for _ in range(6)]  # with a row and a column of zeros before the first
        for y in range(5):
            for x in range(6):
                above = done[y][x + 1] - done[y][x] if within == "plane" else 0
                done[y + 1][x + 1] = 0 if zero[plane][y][x] else left[plane][y][x] + done[y + 1][x] + above
        planes.append([row[1:] for row in done[1:]])
    assert torch.equal(torch.tensor(planes, dtype=torch.int32).flatten(), codes.q)


def test_prediction_gains_on_smooth_maps_and_loses_on_noise(bench):
    ramp = torch.linspace(-1, 1, 32)
    smooth = (normal(8, 4, 1, 1) * ramp + normal(8, 4, 1, 1) * ramp.unsqueeze(1)).contiguous()
    found = bench.measure(quantise(bench, smooth, NORM, "0.1 std"), 1 << 20)
    for kind, context in bench.CONTEXT.items():
        assert all(found[f"{kind}_{way}"] < 0.75 * found[f"{kind}_plain"] for way in ("row", "plane", context)), found
    found = bench.measure(quantise(bench, normal(8, 4, 32, 32), NORM, "0.1 std"), 1 << 20)
    assert found["entropy_plain"] + 0.45 < found["entropy_row"] < found["entropy_plane"] - 0.45, "half a bit a sum"
    assert found["entropy_left8"] == pytest.approx(found["entropy_plain"], abs=0.02)


def test_channels_of_like_codes_share_a_table(bench):
    """Eight channels of four scales, under one bound: four groups do as well as each channel by itself would."""
    scale = torch.tensor([1.0, 4.0, 0.25, 16.0]).repeat(2)
    codes = quantise(bench, normal(32, 8, 16, 16) * scale.view(-1, 1, 1), CONVOLUTION, "0.05 std")
    counts = bench.count(codes.symbols(), codes.channel, 8)
    groups = bench.group(counts, 4).tolist()
    assert groups[:4] == groups[4:] and len(set(groups)) == 4
    found = bench.measure(codes, 1 << 30)
    assert found["entropy_groups4"] == pytest.approx(bench.entropy(counts, 1 << 30), abs=0.02)
    assert found["entropy_groups4"] < found["entropy_plain"] - 0.5 and found["coded_groups4"] < found["coded_plain"]


def test_features_far_from_zero_are_counted_from_their_means(bench):
    """Of a linear layer: a bound for all of them, means of many steps. Zeros behind a ReLU stay where they are."""
    x = normal(64, 32, 8) + 4 * normal(8)
    codes = quantise(bench, x, nn.Linear(8, 8), "0.2 std")
    centred = codes.centred()
    shift = (codes.q - centred.q).view(-1, 8)
    assert (shift == shift[0]).all() and centred.q.view(-1, 8).double().mean(0).abs().max() <= 0.5
    found = bench.measure(codes, 1 << 30)
    assert found["entropy_centred"] < found["entropy_plain"] - 0.5 and found["coded_centred"] < found["coded_plain"]
    rectified = quantise(bench, x.relu(), nn.Linear(8, 8), "0.2 std")
    assert rectified.zero is not None and rectified.centred() is rectified


def test_what_a_lane_loads_shares_a_table(bench):
    """Features of two scales in turn: neighbours in memory, so that four of them have one table for the coder."""
    x = normal(256, 64, 8) * torch.tensor([1.0, 16.0]).repeat(4)
    found = bench.measure(quantise(bench, x, nn.Linear(8, 8), "0.05 std"), 1 << 30)
    assert found["entropy_groups4"] < found["entropy_plain"] - 0.5
    assert found["coded_groups4"] == pytest.approx(found["coded_plain"], abs=0.02)
    found = bench.measure(quantise(bench, x.mT.contiguous(), nn.Conv1d(8, 8, 1), "0.05 std"), 1 << 30)
    assert found["coded_groups4"] < found["coded_plain"] - 0.5, "as maps, each channel by itself"


def test_a_lane_knows_the_value_before(bench):
    """32 levels, each four times in a row: of four values three are known but for the two bits within a class."""
    x = torch.randint(32, (64, 4, 16, 4), generator=torch.Generator().manual_seed(0)).repeat_interleave(4, -1)
    found = bench.measure(quantise(bench, x.float(), NORM, "0.05 std"), 1 << 30)
    assert found["digits"] == 1
    assert found["coded_lane8"] - found["coded_plain"] == pytest.approx(-3 / 4 * 3, abs=0.05)


@pytest.mark.parametrize("bound", ["1.0 std", "0.4 std", "0.1 std"])
def test_coded_is_what_the_coder_makes_of_it(bench, bound, monkeypatch):
    x = normal(32, 16, 16, 16).relu()
    monkeypatch.setattr(bench, "LARGE", x.numel())
    found = bench.measure(quantise(bench, x, CONVOLUTION, bound, "dither"), x.numel())
    need, _ = bench.find_need(CONVOLUTION)
    payload = Sz(coder="rans").encode(x, BoundRule.parse(bound).resolve(x, need))
    assert payload.meta["kind"] == "rans"
    assert found["coded_plain"] == pytest.approx(8 * payload.nbytes / x.numel(), rel=0.03)


def test_figures_follow_the_plane_whatever_the_layout(bench):
    """Only what neighbours in memory make up is another: symbols of several values, and what a lane knows."""
    x = normal(8, 4, 16, 16).relu() + 0.01 * normal(8, 4, 1, 1)
    plain = bench.measure(quantise(bench, x, CONVOLUTION, "0.2 std"), 1 << 20)
    other = bench.measure(
        quantise(bench, x.contiguous(memory_format=torch.channels_last), CONVOLUTION, "0.2 std"), 1 << 20
    )
    same = [name for name in plain if name.startswith("entropy_")]
    assert {name: plain[name] for name in same} == pytest.approx({name: other[name] for name in same}, rel=1e-12)


def test_each_site_chooses_its_best(bench):
    """Weighted by size: 3 values at 1 bit and 1 at 2 bits."""
    rows = [
        {"shape": "3", "coded_plain": 1.0, "coded_row": 4.0},
        {"shape": "1x1", "coded_plain": 3.0, "coded_row": 2.0},
    ]
    assert bench.total(rows, "coded", ("plain",)) == 1.5 and bench.total(rows, "coded", ("row",)) == 3.5
    assert bench.total(rows, "coded", ("plain", "row")) == 1.25
