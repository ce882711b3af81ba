"""The kernel that applies a norm with given statistics: its numbers in the interpreter, its code without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_numbers_in_the_interpreter() -> None:
    assert interpret("interpreted_normalise.py") == 6 * 4 * 4


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here, not compiled")
@pytest.mark.parametrize("mean", [True, False], ids=["layer norm", "RMS norm"])
@pytest.mark.parametrize(("target", "length"), [("sm_80", 1024), ("sm_90", 768), ("sm_90", 1024), ("sm_100", 1024)])
def test_the_kernel_is_lean(
    target: str, length: int, mean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compile_triton import CUDA, build, moves, usage

    from lowtide.kernels import _normalise_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"x_ptr": "*fp32", "made_ptr": "*bf16"}
    types |= {f"{name}_ptr": "*fp32" for name in ("mean", "inverse_std", "weight", "bias")}
    constants = {"HAS_MEAN": mean, "HAS_WEIGHT": True, "HAS_BIAS": True, "ROWS": 4, "BLOCK": 1024, "length": length}
    compiled = build(_normalise_triton._apply, types, constants, CUDA[target], num_warps=4)
    used = usage(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 128, used
    assert moves(compiled)["ld", 16] > 0, moves(compiled)
