"""The kernels of ``bitmask`` and ``window_index`` compile without a GPU: nothing is spilled, accesses are wide."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here, not compiled", allow_module_level=True)

from compile_triton import CUDA, HIP, build, moves, usage

from lowtide.kernels import bitmask, window_index

SQUARE, CUBE = ((3, 2, 1, 1),) * 2, ((3, 2, 1, 2),) * 3
# A name, the kernel, types and constants, the widest access; registers of a thread and bytes of shared memory, at most.
KERNELS: list[tuple[str, Any, dict[str, str], dict[str, Any], tuple[str, int], tuple[int, int]]] = [
    ("relu of fp32", bitmask._encode, {"x_ptr": "*fp32"}, {"TEST": "not_le", "WIDTH": 1}, ("ld", 16), (64, 512)),
    ("relu of bf16", bitmask._encode, {"x_ptr": "*bf16"}, {"TEST": "not_le", "WIDTH": 1}, ("ld", 16), (80, 0)),
    ("clamp of fp16", bitmask._encode, {"x_ptr": "*fp16"}, {"TEST": "inside_closed", "WIDTH": 1}, ("ld", 16), (80, 0)),
    ("sign of fp32", bitmask._encode, {"x_ptr": "*fp32"}, {"TEST": "sign", "WIDTH": 2}, ("ld", 16), (96, 0)),
    ("truth", bitmask._encode, {"x_ptr": "*u8"}, {"TEST": "truth", "WIDTH": 1}, ("ld", 8), (64, 0)),
    ("a bit to 32", bitmask._decode, {"y_ptr": "*i32", "count": "i64"}, {"WIDTH": 1}, ("st", 16), (96, 0)),
    ("a bit to 16", bitmask._decode, {"y_ptr": "*i16"}, {"WIDTH": 1}, ("st", 16), (96, 0)),
    ("a gradient of 16", bitmask._gate, {"y_ptr": "*i16", "gradient_ptr": "*i16"}, {}, ("ld", 16), (96, 0)),
    ("a gradient of 32", bitmask._gate, {"y_ptr": "*i32", "gradient_ptr": "*i32"}, {}, ("st", 16), (112, 0)),
    ("two bits to 16", bitmask._decode, {"y_ptr": "*i16"}, {"WIDTH": 2}, ("st", 16), (96, 0)),
    ("indices to 3x3", window_index._encode, {"x_ptr": "*i64"}, {"WINDOW": SQUARE, "WIDTH": 4}, ("ld", 16), (80, 16)),
    ("indices to 3x3x3", window_index._encode, {"x_ptr": "*i64"}, {"WINDOW": CUBE, "WIDTH": 8}, ("ld", 8), (128, 16)),
    ("3x3 to indices", window_index._decode, {"y_ptr": "*i64"}, {"WINDOW": SQUARE, "WIDTH": 4}, ("st", 16), (64, 0)),
]  # fmt: skip
ON_EVERY_TARGET = ("relu of fp32", "a bit to 16", "a gradient of 16", "indices to 3x3")


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, whatever an earlier run has left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _build(target: Any, kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> Any:
    module = bitmask if kernel in (bitmask._encode, bitmask._decode, bitmask._gate) else window_index
    known = {"codes_ptr": "*u8", "misfits_ptr": "*i64", "a": "fp32", "b": "fp32", **types}
    known = {name: kind for name, kind in known.items() if name in kernel.arg_names}
    constants = {"BLOCK": module._BLOCK, **constants}
    if module is window_index:
        constants["INNER"] = True
    return build(kernel, known, constants, target, num_warps=module._WARPS)


def _variants() -> Iterator[Any]:
    for name, row in product(CUDA, KERNELS):
        if name == "sm_90" or row[0] in ON_EVERY_TARGET:
            yield pytest.param(CUDA[name], *row[1:], id=f"{name}-{row[0]}")


@pytest.mark.parametrize(("target", "kernel", "types", "constants", "widest", "limits"), list(_variants()))
def test_kernels_are_lean(
    target: Any,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    widest: tuple[str, int],
    limits: tuple[int, int],
    tmp_path: Path,
) -> None:
    compiled = _build(target, kernel, types, constants)
    used = usage(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, f"{used}: registers are spilled"
    assert used["REG"] <= limits[0] and compiled.metadata.shared <= limits[1], (used, compiled.metadata.shared)
    assert moves(compiled)[widest] > 0, moves(compiled)


@pytest.mark.parametrize("name", HIP)
def test_kernels_compile_for_amd(name: str) -> None:
    for label, kernel, types, constants, _, _ in KERNELS:
        if label in ON_EVERY_TARGET:
            code = _build(HIP[name], kernel, types, constants).asm["amdgcn"]
            spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", code)
            assert spilled and not any(map(int, spilled)), label
