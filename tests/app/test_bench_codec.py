"""``lowtide bench codec`` from end to end, and what it does when a codec is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.app.bench import codec, roundtrip, sources
from lowtide.codecs.cast import Cast
from lowtide.codecs.sz import Sz
from lowtide.records import Bound


def test_a_row_for_every_case(bench_codec, read_rows, capsys):
    kinds = ("--codecs", "sz:blocks,cast:bf16", "--bounds", "1.0 std,0.4 std", "--dtypes", "float32,bfloat16")
    assert bench_codec(*kinds, "--sources", "relu,norm", "--repeats", "2", "--warm", "1") == 0
    rows = read_rows()
    assert len(rows) == 2 * 2 * 2 + 2  # sz: sources, dtypes, bounds; cast: sources, in float32
    assert set(rows[0]) == set(codec.COLUMNS)
    assert all(row["ok"] == "True" and float(row["coding_over_copy"]) > 0 for row in rows)
    assert len({row["run"] for row in rows}) == 1
    shown = capsys.readouterr()
    assert "cast:bf16 does not take bfloat16: left out" in shown.err
    assert "[10/10] norm (drawn) bfloat16, sz:blocks 0.4 std: " in shown.err
    assert len(shown.out.splitlines()) == 2 + len(rows)


def test_the_figures_of_a_row_belong_together(bench_codec, read_rows):
    assert bench_codec("--codecs", "cast:bf16", "--repeats", "3") == 0
    row = read_rows()[0]
    figures = {name: float(row[name]) for name in row if name.endswith(("_ms", "_gb_s", "_nbytes"))}
    assert row["shape"] == "1x64x16x16" and figures["raw_nbytes"] == 65536 and row["bound"] == ""
    assert 16 <= float(row["bits"]) < 16.1
    assert figures["copy_gb_s"] == pytest.approx(2 * 65536 / figures["copy_ms"] / 1e6, rel=1e-4)
    assert figures["encode_gb_s"] == pytest.approx(65536 / figures["encode_ms"] / 1e6, rel=1e-4)
    both = figures["encode_ms"] + figures["decode_ms"]
    assert float(row["coding_over_copy"]) == pytest.approx(both / figures["copy_ms"], rel=1e-4)
    assert float(row["encode_ms_min"]) <= figures["encode_ms"] <= float(row["encode_ms_max"])


def test_a_codec_that_breaks_its_bound_fails_the_run_and_is_not_timed(bench_codec, read_rows, monkeypatch, capsys):
    decode = Sz.decode
    monkeypatch.setattr(Sz, "decode", lambda self, encoded: decode(self, encoded) * 3)
    assert bench_codec("--codecs", "sz:blocks,cast:bf16") == 1
    broken, sound = read_rows()
    assert broken["ok"] == "False" and broken["error"].startswith("gate bound:") and not broken["encode_ms"]
    assert sound["ok"] == "True"
    shown = capsys.readouterr()
    assert "FAILED, gate bound: " in shown.err and "FAILED" in shown.out


def test_a_codec_that_moves_zeros_fails(bench_codec, read_rows, monkeypatch):
    nonzero = Sz.nonzero
    monkeypatch.setattr(Sz, "nonzero", lambda self, encoded: torch.ones_like(nonzero(self, encoded)))
    assert bench_codec() == 1
    assert read_rows()[0]["error"].startswith("gate zeros: the mask")


def test_a_codec_that_goes_wrong_while_it_is_timed_fails(bench_codec, read_rows, monkeypatch):
    decode, calls = Cast.decode, iter(range(100))
    monkeypatch.setattr(Cast, "decode", lambda self, encoded: decode(self, encoded) / (next(calls) == 0))
    assert bench_codec("--codecs", "cast:bf16") == 1
    assert read_rows()[0]["error"].startswith("after the timed turns: gate finite")


def test_a_codec_that_raises_is_a_row_and_the_run_goes_on(bench_codec, read_rows, monkeypatch, capsys):
    def fail(self, encoded):
        raise RuntimeError("no kernel\nat all")

    monkeypatch.setattr(Cast, "decode", fail)
    assert bench_codec("--codecs", "cast:bf16,sz:blocks", "--traceback") == 1
    assert [(row["ok"], row["error"]) for row in read_rows()] == [("False", "RuntimeError: no kernel"), ("True", "")]
    assert "Traceback" in capsys.readouterr().err


def test_rows_are_appended_by_the_next_run(bench_codec, read_rows):
    assert bench_codec() == bench_codec("--seed", "1") == 0
    assert [row["seed"] for row in read_rows()] == ["0", "1"]


def test_a_file_with_other_columns_is_refused_before_any_work(bench_codec, tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.csv").write_text("source,bits\nrelu,2\n")
    for module, name in ((roundtrip, "measure"), (sources, "Net"), (sources, "draw")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("worked"))
    assert bench_codec() == bench_codec("--real", "resnet18", "--tiny") == 2
    assert "has other columns" in capsys.readouterr().err
    assert (tmp_path / "rows.csv").read_text() == "source,bits\nrelu,2\n"


def test_an_interrupted_run_keeps_its_rows(bench_codec, read_rows, monkeypatch, capsys):
    def interrupt(self, x, bound=None, *, seed=0):
        raise KeyboardInterrupt

    monkeypatch.setattr(Cast, "encode", interrupt)
    assert bench_codec("--codecs", "sz:blocks,cast:bf16") == 130
    assert [row["codec"] for row in read_rows()] == ["sz:blocks"]
    assert capsys.readouterr().err.endswith("lowtide: interrupted; what was written so far is kept\n")


class Ticketed:
    """A codec with plans, codes and tickets, as the twins for the GPU have them."""

    name, carries_values, takes_bound, ticketed = "ticketed", True, True, True

    def __init__(self) -> None:
        self.tickets: list[Any] = []
        self.plans: list[Any] = []
        self.inner = Cast()

    def plan(self, x, bound):
        return {"for": x.shape}

    def codes(self, x, bound, *, seed, plan):
        return torch.arange(x.numel()).remainder(4).int()

    def encode(self, x, bound, *, seed, plan, ticket=None):
        self.tickets.append(ticket)
        self.plans.append(plan)
        return self.inner.encode(x)

    def decode(self, encoded):
        return self.inner.decode(encoded)


def test_plans_and_tickets_are_used_where_a_twin_has_them():
    twin, x = Ticketed(), torch.rand(2, 64, 4, 4)
    row = roundtrip.measure(twin, x, Bound.absolute(1.0), with_mask=False, seed=0, warm=1, repeats=2)
    assert row["ok"] and row["planned"] and row["ticketed"]
    assert row["entropy_bits"] == pytest.approx(2) and row["bits_over_entropy"] == pytest.approx(row["bits"] / 2)
    assert all(plan == {"for": x.shape} for plan in twin.plans)
    given = [ticket for ticket in twin.tickets if ticket is not None]
    # The gate before the timed turns, and both after them, go without.
    assert [ticket is not None for ticket in twin.tickets] == [False, True, True, True, False, False]
    assert len({ticket.data_ptr() for ticket in given}) == 3
    assert all(ticket.dtype == torch.int64 and ticket.tolist() == [-1] for ticket in given)


def test_the_entropy_is_taken_of_leading_samples(monkeypatch):
    monkeypatch.setattr(roundtrip, "_SAMPLE", 3 * 64)
    seen = []
    twin = Ticketed()
    twin.codes = lambda x, bound, *, seed, plan: seen.append(tuple(x.shape)) or torch.zeros(4, dtype=torch.int32)
    coder = roundtrip.Coder(twin, torch.rand(8, 4, 4, 4), Bound.absolute(1.0), seed=0)
    assert coder.entropy() == 0 and seen == [(3, 4, 4, 4)]
