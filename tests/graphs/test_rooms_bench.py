"""benchmarks/rooms.py: what its figures mean."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from repository_scripts import load_script

from lowtide.graphs.rooms import OWN, Reserve, Rooms
from lowtide.graphs.schedule import Mode

BENCH = load_script("benchmarks/rooms.py")


def ways(slack: float = 1 / 16) -> list[Any]:
    return [BENCH.Slack(Rooms(slack)), BENCH.InCommon(Reserve(slack))]


def trace(*replays: dict[str, float]) -> list[tuple[Mode, dict[str, float]]]:
    """An eager step in which two payloads take 100 words each, a capture, and replays."""
    modes = [Mode.REHEARSE, Mode.CAPTURE, *[Mode.REPLAY] * (len(replays) - 1)]
    return list(zip(modes, [{"a": 100.0, "b": 100.0}, *replays], strict=True))


@pytest.mark.parametrize(
    ("needed", "overflows"),
    [
        ({"a": 101.0, "b": 101.0}, (0, 0)),
        ({"a": 120.0, "b": 80.0}, (1, 0)),
        ({"a": 126.0, "b": 100.0}, (1, 0)),
        ({"a": 127.0, "b": 101.0}, (1, 1)),
        ({"a": 115.0, "b": 114.0}, (1, 1)),
    ],
)
def test_what_fits(needed: dict[str, float], overflows: tuple[int, int]) -> None:
    """100 words and a 16th; or 100, a 64th, and 25 in common."""
    found = tuple(BENCH.judge(way, trace(needed, needed))["overflows"] for way in ways())
    assert found == overflows, "the second time there is room for it"


def test_spare() -> None:
    spare = [BENCH.judge(way, trace({"a": 100.0, "b": 60.0}))["spare"] for way in ways()]
    assert spare == pytest.approx([212.5 / 160 - 1, (200 * (1 + OWN) + 25) / 160 - 1])


def test_growth() -> None:
    assert BENCH.growth(trace({"a": 90.0, "b": 130.0}, {"a": 110.0, "b": 100.0})) == pytest.approx((0.3, 0.1))


def test_a_net_in_training(tmp_path: Any) -> None:
    parser = argparse.ArgumentParser()
    BENCH.configure(parser)
    out = tmp_path / "rooms.csv"
    given = ["resnet18", "--tiny", "--data-set", "size=16", "--batch", "16", "--steps", "18", "--out", str(out)]
    rows = BENCH.run(parser.parse_args(given))
    assert [row["way"] for row in rows] == ["slack", "reserve"]
    assert all(row["replays"] == 6 and row["sites"] > 10 and row["spare"] > 0 for row in rows), "12 steps come before"
    assert rows[0]["most_of_a_site"] > rows[0]["most_of_all"]
    assert tuple(out.read_text().splitlines()[0].split(",")) == BENCH.COLUMNS
    assert len(BENCH.show(rows)) == 2 + 2 + 1
