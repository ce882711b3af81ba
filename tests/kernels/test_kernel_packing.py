"""The kernel that packs views with gaps, under the emulator against ``clone``; what is left to torch; its code."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import Guarded
from hypothesis import given
from hypothesis import strategies as st
from machine_code import listing, requires_nvrtc, usage
from packing_cases import DTYPES, Case, Source, check, make_cases
from simt import Emulated, requires_compiler
from torch import Tensor, nn

import lowtide
from lowtide.kernels import _nvrtc, _packing
from lowtide.kernels._packing import Geometry, packed

CPU = torch.device("cpu")
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


class Launches:
    """Runs the kernel on the CPU and takes down of how many blocks."""

    def __init__(self) -> None:
        self.grids: list[int] = []

    def launch(self, grid: int, block: int, shared: int, arguments: bytes, stream: int) -> None:
        self.grids.append(grid)
        Emulated(_packing.PROGRAM).function(_packing.KERNEL).launch(grid, block, shared, arguments, stream)


@pytest.fixture
def launches(emulate: Callable[..., Guarded], monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    emulate(_packing, lambda device: launches)
    monkeypatch.setattr(_packing, "_has_kernel", lambda x: True)
    monkeypatch.setattr(_packing, "_at_once", lambda device: 3)
    return launches


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_is_a_clone_by_one_launch_where_the_kernel_reaches(dtype: torch.dtype, launches: Launches) -> None:
    for case in make_cases(dtype, CPU):
        before, count = case.x.clone(), len(launches.grids)
        found = packed(case.x)
        check(case, found)
        check(Case(f"{case}, afterwards", case.x), before)
        assert len(launches.grids) - count == case.is_reached, f"{case}: launched, or not"


@requires_compiler
@pytest.mark.parametrize(
    ("rows", "blocks"), [(64, 1), (65, 2), (192, 3), (193, 2), (384, 3), (385, 3), (640, 3), (449, 3)]
)
def test_blocks_share_the_tiles_evenly(rows: int, blocks: int, launches: Launches) -> None:
    """Rows of 16 units, tiles of 1024 units, 3 blocks at once: four tiles are two for each of two blocks."""
    case = Case("tiles", Source(torch.float32, CPU).of(rows, 17 * 4)[:, :64])
    check(case, packed(case.x))
    assert launches.grids == [blocks]


@given(st.integers(1, (1 << 31) - 1), st.integers(0, (1 << 31) - 1))
def test_a_product_and_a_shift_divide(divisor: int, number: int) -> None:
    inverse, shift = _packing.inverse(divisor)
    assert inverse < 1 << 32 and shift < 64
    multiple = number // divisor * divisor
    for i in (number, multiple, max(multiple - 1, 0), (1 << 31) - 1):
        assert i * inverse >> shift == i // divisor


def test_units_are_counted_in_31_bits() -> None:
    most = (1 << 31) - 1
    assert Geometry.of((most, 4), (8, 1), 4) is None, "reaches too far"
    assert Geometry.of((most // 2, 4), (8, 1), 4) is not None
    assert Geometry.of((most, 4), (0, 1), 4) is not None
    assert Geometry.of((most + 1, 4), (0, 1), 4) is None, "too many"
    assert Geometry.of((2, 4), (4 * most, 1), 4) is None


def test_without_a_device_it_is_a_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CUDA is there and NVRTC is not."""
    x = Source(torch.float32, CPU).of(9, 32)[:, :16]
    check(Case("on the CPU", x), packed(x))
    fallen_back: list[Tensor] = []

    class OnDevice:
        is_cuda = True

        def clone(self) -> Tensor:
            fallen_back.append(x)
            return x.clone()

    monkeypatch.setattr(_nvrtc, "available", lambda: False)
    packed(OnDevice())  # type: ignore[arg-type]
    assert len(fallen_back) == 1


def test_lazy_conjugates_and_negatives_are_left_to_torch(launches: Launches) -> None:
    """Their bits in memory are not their values."""
    x = torch.randn(9, 8, dtype=torch.complex64)[:, :4].conj()
    for lazy in (x, torch.randn(9, 16, dtype=torch.complex64).conj().imag[:, :4]):
        assert lazy.is_conj() or lazy.is_neg()
        assert torch.equal(packed(lazy), lazy)
    assert not launches.grids


def test_no_kernel_is_loaded_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was loaded before, or torch copies."""
    loaded: list[str] = []
    monkeypatch.setattr(_packing, "PROGRAM", Emulated(_packing.PROGRAM))
    monkeypatch.setattr(Emulated, "function", lambda self, kernel, device: loaded.append(kernel) or kernel)
    monkeypatch.setattr(_packing, "_FUNCTIONS", {})
    monkeypatch.setattr(_packing, "_has_kernel", lambda x: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    x = Source(torch.float32, CPU).of(9, 32)[:, :16]
    check(Case("in a capture", x), packed(x))
    assert not loaded and _packing._function(0) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert _packing._function(0) == "pack"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert _packing._function(0) == "pack" and loaded == ["pack"]


class Attention(nn.Module):
    """Heads of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@requires_compiler
def test_what_attention_saves_is_packed_by_the_kernel(launches: Launches) -> None:
    """Query, key and value: three launches, and the gradients that clones give."""

    def gradient() -> Tensor:
        torch.manual_seed(0)
        model = Attention()
        lowtide.attach(model, "fixed", min_size=0)
        model(torch.randn(2, 16, 32)).square().sum().backward()
        assert model.qkv.weight.grad is not None
        return model.qkv.weight.grad

    found = gradient()
    assert len(launches.grids) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_packing, "_has_kernel", lambda x: False)
        assert torch.equal(found, gradient())
    assert len(launches.grids) == 3


@requires_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_suffice_and_loads_do_not_wait_for_stores(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six blocks of 256 threads fit where a thread has 40 registers, and its four loads come before its stores."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    cubin, _ = _nvrtc.compile(_packing.PROGRAM.source, _packing.KERNEL, arch, "packing")
    used = usage(cubin, tmp_path)
    assert used["STACK"] == used["LOCAL"] == used["SHARED"] == 0 and used["REG"] <= 40, used
    moves: list[Any] = re.findall(r"\b(LDG|STG)\.E\.(?:\w+\.)*?128", listing(cubin, tmp_path))
    assert moves[:8] == ["LDG"] * 4 + ["STG"] * 4, moves
