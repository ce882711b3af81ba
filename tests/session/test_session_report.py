"""Reports: the same figures as text, dict and JSON, and they add up."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ledger import Ledger, SiteEntry
from lowtide.reports import text

KIB = 1024


@pytest.fixture
def session():
    """After one forward whose graph is still there: a conv net with every kind of need."""
    layers = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(1024, 64), nn.Tanh())
    session = lowtide.attach(model, "fixed")
    session.graph = model(torch.randn(8, 3, 16, 16))
    return session


def test_before_any_forward(mlp):
    report = lowtide.attach(mlp()).report()
    assert str(report).splitlines() == [
        "Lowtide, method budget, 0 steps",
        "saved for backward: 0 B in plain training, 0 B held at most; now 0 B",
        "nothing has been saved yet",
    ]
    assert report.to_dict()["totals"]["ratio"] is None
    assert json.loads(report.to_json())["sites"] == []


def test_json_is_the_dict(session):
    report = session.report()
    assert json.loads(report.to_json()) == report.to_dict()
    assert json.loads(report.to_json(indent=None)) == report.to_dict()
    assert set(report.to_dict()) == {"method", "totals", "needs", "sites", "left_alone", "noise", "events"}


def test_sums_add_up(session):
    """Sites, needs and totals tell the same story; nothing is counted twice, nothing is left out."""
    figures = session.report().to_dict()
    for column in ("raw", "held"):
        total = figures["totals"][f"{column}_nbytes_now"]
        assert total == figures["totals"][f"{column}_nbytes_peak"] > 0
        assert total == sum(site[f"{column}_nbytes"] for site in figures["sites"])
        assert total == sum(need[column] for need in figures["needs"].values())
    kept = [site for site in figures["sites"] if site["codec"] == "kept"]
    assert sum(site["held_nbytes"] for site in kept) == sum(row["held"] for row in figures["left_alone"].values())
    saves = sum(site["saves"] for site in figures["sites"])
    assert saves == sum(need["saves"] for need in figures["needs"].values())
    assert figures["totals"]["ratio"] == pytest.approx(
        figures["totals"]["raw_nbytes_peak"] / figures["totals"]["held_nbytes_peak"]
    )


def test_sums_add_up_when_a_site_changes_its_codec_within_a_step(x):
    """Twice in a step with a mask and then with other values: the bytes of both count."""

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gates = nn.Linear(64, 64), [(torch.rand(64, 64) > 0.5).float(), torch.rand(64, 64)]

        def forward(self, x):
            return self.linear(x) * self.gates.pop(0)

    model = Gated()
    session = lowtide.attach(model)
    graphs = [model(x), model(x)]
    sites = session.report().sites
    assert session.ledger.raw == sum(site.raw_nbytes for site in sites) == 2 * 16 * KIB
    assert session.ledger.held == sum(site.held_nbytes for site in sites)
    graphs.clear()


def test_needs_sites_and_reasons(session):
    figures = session.report().to_dict()
    assert set(figures["needs"]) == {"values", "mask", "metadata", "window", "exact"}
    sites = {site["name"]: site for site in figures["sites"]}
    norm = sites["1:native_batch_norm.input"]
    assert (norm["module"], norm["need"], norm["codec"], norm["bound"]) == ("BatchNorm2d", "values", "sz", "0.4 std")
    pool = sites["3:max_pool2d_with_indices.self"]
    assert (pool["module"], pool["codec"], pool["held_nbytes"]) == ("MaxPool2d", "shape", 0)
    (reason,) = figures["left_alone"]
    assert reason == "smaller than min_size"
    assert figures["left_alone"][reason]["held"] == figures["left_alone"][reason]["raw"] > 0


def test_the_text_says_it_all(session):
    lines = str(session.report()).splitlines()
    totals = session.report().totals
    assert lines[0] == "Lowtide, method fixed, 0 steps"
    raw, held = text.size(totals["raw_nbytes_peak"]), text.size(totals["held_nbytes_peak"])
    ratio = f"{totals['ratio']:.2f}x less"
    assert lines[1] == f"saved for backward: {raw} in plain training, {held} held at most ({ratio}); now {held}"
    assert [line.split()[0] for line in lines if line.startswith(("need ", "site ", "left "))] == [
        "need",
        "site",
        "left",
    ]
    assert any(line.startswith("1:native_batch_norm.input ") and " 0.4 std " in line for line in lines)
    assert any(line.startswith("3:max_pool2d_with_indices.self ") and line.endswith(" 0 B") for line in lines)
    assert any(line.startswith("smaller than min_size ") for line in lines)
    assert not any(line.endswith(" ") for line in lines)


def test_a_report_is_a_snapshot(mlp, x):
    model = mlp()
    session = lowtide.attach(model)
    graph = model(x)
    report = session.report()
    before = report.to_json()
    graph.sum().backward()
    session.step()
    model(x)
    assert report.to_json() == before
    assert session.report().totals["step"] == 1


def test_sites_show_their_last_step(mlp, x):
    model = mlp()
    session = lowtide.attach(model)
    for forwards in (2, 1):
        for _ in range(forwards):
            model(x).sum().backward()
        session.step()
    assert {site.saves for site in session.report().sites} == {1}


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (5 << 20, "5.00 MiB"),
        (3 << 30, "3.00 GiB"),
        (1 << 45, "32768.00 GiB"),
    ],
)
def test_sizes(nbytes, shown):
    assert text.size(nbytes) == shown


def test_tables_line_up():
    lines = text.table(("name", "n"), [("a", "100"), ("long name", "1")])
    assert lines == ["name         n", "---------  ---", "a          100", "long name    1"]


def test_groups_are_sorted_by_size():
    entries = [
        SiteEntry("a", "", "mask", "kept", "why", "", 1, 10, 10),
        SiteEntry("b", "", "values", "sz", "", "", 2, 90, 9),
    ]
    assert list(text.shares(entries).items()) == [
        ("values", {"saves": 2, "raw": 90, "held": 9}),
        ("mask", {"saves": 1, "raw": 10, "held": 10}),
    ]
    assert text.left_alone(entries) == {"why": {"saves": 1, "raw": 10, "held": 10}}


def test_cuda_peaks_appear_only_with_cuda(session):
    """Reading them must not initialise the device."""
    totals = Ledger().totals()
    assert "cuda_allocated_peak" not in totals
    shown = str(
        lowtide.reports.Report("fixed", {**totals, "cuda_allocated_peak": 1024, "cuda_reserved_peak": 2048}, ())
    )
    assert "CUDA peak: 1.00 KiB allocated, 2.00 KiB reserved" in shown
