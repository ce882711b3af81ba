"""The CUDA twin of ``sz`` compiled by NVRTC for three generations of GPUs: registers, and what is spilled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_code import requires_nvrtc, usage

from lowtide.errors import LowtideError
from lowtide.kernels import _nvrtc, _sz_functions, _sz_jobs

TENSOR, RUNS, INNER, ANY, FIXED = _sz_jobs._TENSOR, _sz_jobs._RUNS, _sz_jobs._INNER, _sz_jobs._ANY, _sz_jobs._FIXED
V, M, G = "ONLY_VALUES", "ONLY_MASK", "GATED"
# Kernel, dtype, kind, zero, dither, values, what is given. For one architecture all, for others the first of a kernel.
COMPILED = [
    ("blocks_encode", "float", TENSOR, 0, True, 0, V),
    ("blocks_encode", "Bfloat", RUNS, 1, True, 0, V),
    ("blocks_decode", "Bfloat", TENSOR, 1, True, 0, V),
    ("blocks_decode", "float", INNER, 0, False, 0, V),
    ("rans_encode", "Bfloat", TENSOR, 2, True, 4, V),
    ("rans_encode", "float", RUNS, 0, True, 3, V),
    ("rans_encode", "Half", INNER, 1, True, 2, V),
    ("rans_encode", "Bfloat", INNER, 0, True, 3, V),
    ("rans_encode", "Bfloat", FIXED, 0, True, 3, V),
    ("rans_encode", "Bfloat", ANY, 1, True, 1, V),
    ("rans_decode", "Bfloat", TENSOR, 1, True, 4, V),
    ("rans_decode", "float", RUNS, 0, True, 2, V),
    ("rans_decode", "Half", INNER, 1, False, 3, V),
    ("rans_decode", "Bfloat", INNER, 0, True, 3, V),
    ("rans_decode", "Bfloat", FIXED, 0, True, 3, V),
    ("rans_decode", "Bfloat", TENSOR, 1, True, 1, M),
    ("rans_decode", "Bfloat", TENSOR, 1, True, 3, G),
    ("rans_decode", "float", TENSOR, 1, True, 3, G),
    ("rans_decode", "float", TENSOR, 1, True, 2, G),
    ("blocks_decode", "Bfloat", TENSOR, 1, True, 0, G),
]
# The same where values are predicted from those before them.
PREDICTED = [
    ("rans_encode", "Bfloat", RUNS, 0, True, 3, V),
    ("rans_encode", "float", RUNS, 0, True, 2, V),
    ("rans_encode", "float", RUNS, 0, True, 4, V),
    ("rans_encode", "Bfloat", INNER, 0, True, 3, V),
    ("rans_encode", "Half", ANY, 0, False, 1, V),
    ("rans_decode", "Bfloat", RUNS, 0, True, 3, V),
    ("rans_decode", "float", RUNS, 0, True, 2, V),
    ("rans_decode", "float", RUNS, 0, True, 4, V),
    ("rans_decode", "Bfloat", INNER, 0, True, 3, V),
    ("rans_decode", "Half", ANY, 0, False, 1, V),
]
# Bytes that kernels held to few registers spill for now, at most: none but these do.
SPILLED = {
    ("sm_80", "blocks_encode<float, 0, 0, true>"): 8,
    ("sm_80", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 8,
    ("sm_90", "blocks_encode<Bfloat, 1, 1, true>"): 64,
    ("sm_90", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 8,
    ("sm_100", "blocks_encode<float, 0, 0, true>"): 24,
    ("sm_100", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 8,
}
REGISTERS = {"blocks_encode": 64, "blocks_decode": 48, "rans_encode": 64, "rans_decode": 48}


def _compiled() -> Iterator[Any]:
    first = {instance[0]: instance for instance in reversed(COMPILED)}
    for arch in ("sm_80", "sm_90", "sm_100"):
        for instance in COMPILED if arch == "sm_90" else first.values():
            yield pytest.param(arch, instance, id=f"{arch}-{_sz_functions.expression(*instance)}")


@requires_nvrtc
@pytest.mark.parametrize(("arch", "instance"), list(_compiled()))
def test_registers_suffice(arch: str, instance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    expression = _sz_functions.expression(*instance)
    cubin, lowered = _nvrtc.compile(_sz_functions.PROGRAM.source, expression, arch, "sz")
    assert instance[0] in lowered
    used = usage(cubin, tmp_path)
    spilled = SPILLED.get((arch, expression), 0)
    assert used["STACK"] <= spilled and used["LOCAL"] == 0, f"{used}: more is spilled than {spilled} bytes"
    assert used["REG"] <= REGISTERS[instance[0]] and used["SHARED"] <= 48 << 10, used


# The same for kernels in graphs: the first of each kernel, and the one that has no register left.
IN_GRAPHS = [
    pytest.param(arch, instance, id=f"{arch}-{_sz_functions.expression(*instance)}")
    for arch in ("sm_80", "sm_90", "sm_100")
    for instance in [*{instance[0]: instance for instance in reversed(COMPILED)}.values(), COMPILED[8]]
]
SPILLED_IN_GRAPHS = {
    ("sm_80", "rans_encode<Bfloat, 3, 3, 6, 0, true>"): 24,
    ("sm_80", "blocks_encode<float, 0, 0, true>"): 8,
    ("sm_80", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 8,
    ("sm_90", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 8,
    ("sm_90", "rans_encode<Bfloat, 3, 3, 6, 0, true>"): 24,
    ("sm_100", "blocks_encode<float, 0, 0, true>"): 24,
    ("sm_100", "blocks_decode<Bfloat, 0, 1, true, ONLY_VALUES>"): 16,
}


@requires_nvrtc
@pytest.mark.parametrize(("arch", "instance"), IN_GRAPHS)
def test_registers_suffice_in_graphs(arch: str, instance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    expression, program = _sz_functions.expression(*instance), _sz_functions.REPLAYED
    used = usage(_nvrtc.compile(program.source, expression, arch, program.name)[0], tmp_path)
    spilled = SPILLED_IN_GRAPHS.get((arch, expression), 0)
    assert used["STACK"] <= spilled and used["LOCAL"] == 0, f"{used}: more is spilled than {spilled} bytes"
    assert used["REG"] <= REGISTERS[instance[0]] and used["SHARED"] <= 48 << 10, used


SPILLED_PREDICTED = {
    ("sz_replayed", "sm_80", "rans_encode<Bfloat, 3, 3, 1, 0, true, true>"): 8,
    ("sz", "sm_90", "rans_encode<float, 4, 4, 1, 0, true, true>"): 8,
    ("sz", "sm_90", "rans_decode<Bfloat, 3, 3, 2, 0, true, ONLY_VALUES, true>"): 8,
    ("sz_replayed", "sm_80", "rans_encode<float, 4, 4, 1, 0, true, true>"): 16,
    ("sz_replayed", "sm_90", "rans_encode<float, 4, 4, 1, 0, true, true>"): 16,
    ("sz_replayed", "sm_100", "rans_decode<Bfloat, 3, 3, 1, 0, true, ONLY_VALUES, true>"): 8,
    ("sz_replayed", "sm_100", "rans_decode<Bfloat, 3, 3, 2, 0, true, ONLY_VALUES, true>"): 16,
    ("sz_replayed", "sm_80", "rans_decode<Half, 1, 1, 4, 0, false, ONLY_VALUES, true>"): 8,
}


@requires_nvrtc
@pytest.mark.parametrize("program", [_sz_functions.PROGRAM, _sz_functions.REPLAYED], ids=lambda program: program.name)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("instance", PREDICTED, ids=lambda instance: _sz_functions.expression(*instance))
def test_registers_suffice_for_prediction(
    instance: Any, arch: str, program: _nvrtc.Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    expression = _sz_functions.expression(*instance, predicted=True)
    used = usage(_nvrtc.compile(program.source, expression, arch, program.name)[0], tmp_path)
    spilled = SPILLED_PREDICTED.get((program.name, arch, expression), 0)
    assert used["STACK"] <= spilled and used["LOCAL"] == 0, f"{used}: more is spilled than {spilled} bytes"
    assert used["REG"] <= REGISTERS[instance[0]] and used["SHARED"] <= 48 << 10, used


@requires_nvrtc
@pytest.mark.parametrize(
    "expression",
    [
        "rans_encode<float, 2, 2, 0, 1, true, true>",
        "rans_decode<float, 2, 2, 0, 1, true, ONLY_VALUES, true>",
        "rans_decode<float, 2, 2, 0, 0, true, ONLY_MASK, true>",
        "rans_encode<Folded<Bfloat, 2>, 3, 3, 0, 0, true, true>",
    ],
)
def test_zeros_masks_and_pairs_are_not_predicted(expression: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    with pytest.raises(LowtideError, match=r"not predicted|nothing but values"):
        _nvrtc.compile(_sz_functions.PROGRAM.source, expression, "sm_90", "sz")


@requires_nvrtc
def test_an_instance_that_does_not_exist_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path))
    with pytest.raises(LowtideError, match=r"sz: nvrtc.* failed for 'blocks_encode<double"):
        _nvrtc.compile(_sz_functions.PROGRAM.source, "blocks_encode<double, 0, 0, true>", "sm_90", "sz")
