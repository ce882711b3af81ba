"""Pairs that the kernels of ``rans`` fold and unfold themselves, under the emulator; what they leave to others; their
code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fold_cases import LAST
from machine_code import requires_nvrtc, usage
from pair_cases import CASES, DTYPES, PLACES, SZ, check, make_pair, plan_for
from same_payload import assert_same_values
from simt import requires_compiler
from test_kernel_sz_cuda import emulated

from lowtide.kernels import _nvrtc, _sz_cuda, _sz_functions, _sz_jobs
from lowtide.kernels._fold import Folding
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import TensorSpec


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> None:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    emulate(_sz_cuda, emulated)


@requires_compiler
@pytest.mark.parametrize(("place", "dtype", "values"), CASES)
def test_both_ways(place: str, dtype: str, values: int) -> None:
    pair = make_pair(place, DTYPES[dtype], odd=True)
    t = pair.folded()
    plan = plan_for(t.nan_to_num(2.0).clamp(-9, 9), values)
    encoding = _sz_jobs.encoding_of(SZ, TensorSpec.of(t), plan, DTYPES[dtype])
    assert encoding is not None and f", {PLACES[place][0]}>" in encoding.template[0]
    check(pair, plan)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_that_are_raw(dtype: str) -> None:
    """A table made for another tensor: no symbol has a share worth its name."""
    pair = make_pair("inner", DTYPES[dtype])
    plan = plan_for(pair.folded(), 3)
    pair.source.mul_(300)
    assert (check(pair, plan).tensors["heads"][1::3] < 0).any()


@pytest.mark.races
@requires_compiler
def test_at_any_address() -> None:
    """Loads and stores of four values at once are not always possible."""
    pair = make_pair("fixed", torch.bfloat16)
    moved = torch.empty(pair.numel() + 1, dtype=torch.bfloat16)[1:].as_strided(pair.shape, pair.stride(), 1)
    pair = Folding(moved.copy_(pair.source), pair.made, pair.table)
    check(pair, plan_for(pair.folded(), 2))


@requires_compiler
def test_without_a_table_of_the_coder_pairs_are_folded_first() -> None:
    pair = make_pair("runs", torch.bfloat16)
    t, twin = pair.folded(), SzCuda(SZ).folding(torch.bfloat16)
    plan = replace(plan_for(t, 2), model=None)
    got = twin.encode(pair, seed=3, plan=plan)
    assert got.meta["kind"] == "blocks"
    assert_same_values(twin.decode(got), SZ.decode(SZ.encode(t, seed=3, plan=plan)), "values")
    assert twin.unfold(got, pair.table, torch.bfloat16) is None


@pytest.mark.parametrize(
    ("shape", "order"),
    [((4, 6, 5, 5), torch.contiguous_format), ((4, 6, 5, 5), LAST), ((4, 1, 5, 8), torch.contiguous_format)],
)
def test_what_the_kernels_do_not_reach(shape: tuple[int, ...], order: torch.memory_format) -> None:
    t = torch.randn(shape).contiguous(memory_format=order)
    plan, spec = plan_for(t, 2), TensorSpec.of(t)
    encoding = _sz_jobs.encoding_of(SZ, spec, plan, torch.bfloat16)
    assert encoding is not None and not encoding.is_folded
    assert _sz_jobs.unfolding_of(spec, encoding.meta, torch.bfloat16) is None


KERNELS = [
    ("rans_encode", "Folded<Bfloat, 2>", 3, "ONLY_VALUES"),
    ("rans_encode", "Folded<Bfloat, 6>", 3, "ONLY_VALUES"),
    ("rans_encode", "Folded<Bfloat, 6>", 2, "ONLY_VALUES"),
    ("rans_encode", "Folded<float, 5>", 3, "ONLY_VALUES"),
    ("rans_decode", "Folded<Bfloat, 2>", 3, "MADE"),
    ("rans_decode", "Folded<Bfloat, 6>", 3, "SOURCE_AND_GATED"),
    ("rans_decode", "Folded<Bfloat, 2>", 2, "SOURCE_AND_GATED"),
    ("rans_decode", "Folded<float, 5>", 3, "SOURCE_AND_GATED"),
    ("rans_decode", "Folded<float, 5>", 3, "MADE"),
]


@requires_nvrtc
@pytest.mark.parametrize("program", [_sz_functions.PROGRAM, _sz_functions.REPLAYED], ids=lambda program: program.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(("kernel", "dtype", "values", "give"), KERNELS)
def test_registers_suffice(
    kernel: str, dtype: str, values: int, give: str, arch: str, program: _nvrtc.Program, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    expression = _sz_functions.expression(kernel, dtype, 0, 0, True, values, give)
    used = usage(_nvrtc.compile(program.source, expression, arch, program.name)[0], tmp_path)
    assert used["LOCAL"] == 0 and used["STACK"] <= 40, f"{used}: more is spilled than a few bytes"
    assert used["REG"] <= (80 if kernel == "rans_encode" else 64), used
