"""What launches of ``division`` in CUDA C++ are given, and what NVRTC makes of the kernels: no GPU is needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from division_cases import DTYPES
from machine_code import listing, requires_nvrtc, usage

pytest.importorskip("triton")

from lowtide.codecs.division import Division
from lowtide.kernels import _division_cuda, _nvrtc
from lowtide.kernels._division_cuda import Job, job_of
from lowtide.records import TensorSpec

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
# The maps of a ResNet, and a row.
SHAPES = [(256, 64, 56, 56), (256, 256, 28, 28), (256, 512, 14, 14), (256, 2048, 7, 7), (16384, 768)]
MOST_REGISTERS = 40  # with which six blocks of 256 threads run on a multiprocessor


def job(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, codec: Division | None = None) -> Job | None:
    x = torch.empty(shape, dtype=dtype, device="meta")
    return job_of(TensorSpec(tuple(x.shape), tuple(x.stride()), dtype, torch.device("cpu")), codec or Division())


def test_numbers_of_a_tile_are_divided_by_products() -> None:
    """Those that a kernel divides are below the size of a tile; the divisor is no larger than a plane."""
    largest = _division_cuda._SHARED_NBYTES // 4
    numbers = torch.arange(largest)
    for divisor in (*range(1, 300), 784, 3136, 12544, largest):
        inverse = _division_cuda._inverse(divisor)
        assert inverse < 1 << 32
        assert torch.equal(2 * numbers * inverse >> 32, numbers // divisor), divisor


def test_planes_too_large_for_shared_memory_are_left_to_triton() -> None:
    assert job((8, 64, 112, 112)) is not None
    assert job((8, 3, 224, 224)) is None
    assert job((4, 1 << 17)) is None
    assert job((8, 64, 112, 112), torch.float32, Division(faithful=True)) is None


def test_tiles_begin_where_they_can_be_loaded_at_once() -> None:
    for shape in (*SHAPES, (64, 64, 9, 13), (64, 31, 33, 31)):
        for dtype in DTYPES.values():
            found = job(shape, dtype)
            assert found is not None
            together = -(-found.blocks.planes.count // found.grid)
            assert together * found.blocks.planes.area * dtype.itemsize % 16 == 0, (shape, dtype)


@requires_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_suffice_and_accesses_are_wide(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All shapes for one generation, one of aligned and one of odd parts for the others."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    for shape in SHAPES if arch == "sm_90" else (SHAPES[0], SHAPES[3]):
        found = job(shape)
        assert found is not None
        for kernel, wide in ((found.encoder, "LDG.E.128"), (found.decoder, "STG.E.128")):
            cubin, _ = _nvrtc.compile(_division_cuda.PROGRAM.source, kernel, arch, "division")
            used = usage(cubin, tmp_path)
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= MOST_REGISTERS, f"{kernel}: {used}"
            assert wide in listing(cubin, tmp_path), kernel


@requires_nvrtc
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_other_widths_and_dtypes_spill_nothing(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    dtype = torch.float16 if bits == 4 else torch.bfloat16
    for shape in ((64, 64, 112, 112), (64, 64, 8, 14)):
        found = job(shape, dtype, Division(bits))
        assert found is not None
        for kernel in (found.encoder, found.decoder):
            used = usage(_nvrtc.compile(_division_cuda.PROGRAM.source, kernel, "sm_90", "division")[0], tmp_path)
            assert used["STACK"] == used["LOCAL"] == 0, f"{kernel}: {used}"
