"""The kernel that makes probabilities of log-probabilities: its numbers in the interpreter, its code without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from run_interpreted import interpret

pytest.importorskip("triton")


def test_numbers_in_the_interpreter() -> None:
    assert interpret("interpreted_probabilities.py") == 4 * 3 * 3 + 2


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted here, not compiled")
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "replayed"])
@pytest.mark.parametrize(
    ("target", "kind"), [("sm_80", "fp32"), ("sm_90", "fp32"), ("sm_90", "bf16"), ("sm_100", "bf16")]
)
def test_the_kernel_is_lean(
    target: str, kind: str, replayed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from compile_triton import CUDA, build, moves, usage

    from lowtide.kernels import _probabilities_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"y_ptr": f"*{kind}", "p_ptr": "*fp32", "number_ptr": "*i64", "unit": "fp32", "inverse": "fp32"}
    constants = {"REPLAYED": replayed, "BLOCK": _probabilities_triton._BLOCK}
    compiled = build(
        _probabilities_triton._round, types, constants, CUDA[target], num_warps=_probabilities_triton._WARPS
    )
    used = usage(compiled, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 64, used
    assert moves(compiled)["st", 16] > 0, moves(compiled)
