"""The kernels that fold a norm's input with what ReLU made, under the emulator; what is left to torch; their code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fold_cases import check, make_cases
from machine_code import requires_nvrtc, usage
from simt import Emulated, EmulatedFunction, requires_compiler

from lowtide.coding import fold as plain
from lowtide.kernels import _fold, _nvrtc
from lowtide.records import TensorSpec

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CPU = torch.device("cpu")


@pytest.fixture
def launched(emulate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels run on the CPU; gives the names of those that were asked for."""
    names: list[str] = []

    def emulated(kernel: str, device: int) -> EmulatedFunction:
        names.append(kernel)
        return Emulated(_fold.PROGRAM).function(kernel)

    emulate(_fold, emulated)
    monkeypatch.setattr(_fold, "_has_kernel", lambda x: True)
    return names


@requires_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_give_the_bits_of_torch(dtype: str, launched: list[str]) -> None:
    for case in make_cases(DTYPES[dtype], CPU):
        before = case.x.clone(), case.y.clone()
        check(case)
        assert torch.equal(case.x, before[0]) and torch.equal(case.y, before[1]), f"{case.name}: its input was changed"
    name = {"fp32": "float", "fp16": "Half", "bf16": "Bfloat"}[dtype]
    assert set(launched) == {"tabulate", f"fold<{name}>", f"unfold<{name}, 0>", f"unfold<{name}, 1>", f"gate<{name}>"}


@pytest.mark.races
@requires_compiler
def test_values_that_are_none(launched: list[str]) -> None:
    case = next(iter(make_cases(torch.float32, CPU)))
    table = case.table()
    x, y = case.x.clone(), case.y.clone()
    x.view(-1)[:7] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e38, -1e38])
    y.view(-1)[:7] = torch.tensor([torch.nan, torch.inf, 0.0, -0.0, 0.0, 1e38, 0.0])
    t = _fold.fold(x, y, table)
    assert torch.equal(t.nan_to_num(7.0), plain.fold(x, y, table).nan_to_num(7.0)) and bool(t.view(-1)[0].isnan())
    for function, other in ((_fold.source, plain.source), (_fold.made, plain.made)):
        got, expected = function(t, table, torch.float32), other(t, table, torch.float32)
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0)) and bool(got.view(-1)[0].isnan())


def test_what_the_kernels_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fold, "_has_kernel", lambda x: True)
    monkeypatch.setattr(_fold, "_function", lambda kernel, device: pytest.fail(f"{kernel} was asked for"))
    for case in make_cases(torch.float64, CPU):
        check(case)
    huge, like = TensorSpec((1 << 19, 8, 16, 32), (4096, 512, 32, 1), torch.float32, CPU), torch.float32
    assert _fold._places(huge) is None and _fold._places(TensorSpec((0, 3), (3, 1), like, CPU)) is None
    assert _fold._places(TensorSpec((4, 3, 5), (30, 10, 2), like, CPU)) is None, "it has gaps"


def test_without_a_device_torch_does_the_work() -> None:
    case = next(iter(make_cases(torch.float32, CPU)))
    assert not _fold._has_kernel(case.x)
    check(case)


@requires_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "kernel", ["fold<Bfloat>", "fold<float>", "unfold<Bfloat, 0>", "unfold<float, 1>", "gate<Half>", "tabulate"]
)
def test_registers_suffice(arch: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 leave four blocks on a multiprocessor."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    cubin, _ = _nvrtc.compile(_fold.PROGRAM.source, kernel, arch, "fold")
    used = usage(cubin, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 64, used
