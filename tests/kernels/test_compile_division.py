"""The kernels of ``division`` compile without a GPU: nothing inexact is fused, nothing spilled, accesses are wide."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here, not compiled", allow_module_level=True)

import triton
from compile_triton import CUDA, HIP, build, fused, moves, scattered_reductions, usage
from division_cases import MAPS, ROWS

from lowtide.codecs.division import Division
from lowtide.kernels import division
from lowtide.kernels.division import Geometry
from lowtide.records import TensorSpec

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Shape, whether channels_last, dtype, bits, registers of a thread at most (encoder; Triton 3.6 needs a few less than
# 3.9): the maps of a ResNet, a row.
CASES = [
    ((256, 64, 56, 56), False, torch.float32, 2, 112),
    ((256, 64, 56, 56), True, torch.bfloat16, 2, 168),
    ((256, 2048, 7, 7), False, torch.float32, 2, 112),
    ((16384, 768), False, torch.bfloat16, 4, 128),
    ((64, 64, 112, 112), False, torch.float16, 8, 128),
]
# The dither is an integer over 256: that product is exact, and fusing it changes nothing.
_EXACT_PRODUCT = "-0.498046875"


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, whatever an earlier run has left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def geometry_of(shape: tuple[int, ...], last: bool, dtype: torch.dtype, codec: Division) -> Geometry:
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last) if last else x
    found = Geometry.of(TensorSpec(tuple(x.shape), tuple(x.stride()), dtype, torch.device("cpu")), codec)
    assert found is not None
    return found


def build_encoder(
    target: Any, shape: tuple[int, ...], last: bool, dtype: torch.dtype, bits: int, *, replayed: bool = False
) -> Any:
    codec = Division(bits)
    geometry = geometry_of(shape, last, dtype, codec)
    halves = dict.fromkeys(("mean_ptr", "low_ptr", "scale_ptr"), "*i16")
    shares = dict.fromkeys(("inner", "right", "bottom", "corner"), "fp32")
    types = {"x_ptr": f"*{TYPES[dtype]}", "codes_ptr": "*u8", "number_ptr": "*i64", **halves, **shares}
    constants = {**geometry.constants, "COLUMNS": geometry.columns, "DITHER": True, "REPLAYED": replayed}
    return build(division._encode, types, constants, target, num_warps=division._WARPS, **division._EXACT)


def build_decoder(target: Any, shape: tuple[int, ...], last: bool, dtype: torch.dtype, bits: int) -> Any:
    codec = Division(bits)
    geometry = geometry_of(shape, last, dtype, codec)
    halves = dict.fromkeys(("mean_ptr", "low_ptr", "scale_ptr"), "*bf16")
    types = {"y_ptr": f"*{TYPES[dtype]}", "codes_ptr": "*u8", **halves}
    constants = {**geometry.constants, "LARGEST": torch.finfo(dtype).max, "SOFT": False}
    return build(division._decode, types, constants, target, num_warps=division._WARPS, **division._EXACT)


@pytest.mark.parametrize("target", [CUDA["sm_90"]], ids=["sm_90"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_round_where_they_say_and_spill_nothing(target: Any, case: Any, tmp_path: Path) -> None:
    shape, last, dtype, bits, registers = case
    encoder = build_encoder(target, shape, last, dtype, bits)
    used = usage(encoder, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0, f"{used}: registers are spilled"
    assert used["REG"] <= registers, used
    inexact = [line for line in fused(encoder, tmp_path) if _EXACT_PRODUCT not in line]
    assert not inexact, f"{len(inexact)} fused, such as {inexact[:3]}"
    assert {"min.NaN.f32", "max.NaN.f32"} <= set(re.findall(r"\b(?:min|max)\.NaN\.f32", encoder.asm["ptx"]))
    decoder = build_decoder(target, shape, last, dtype, bits)
    used = usage(decoder, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= 64, used


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=str)
def test_encoder_of_graphs_is_as_lean(case: Any, tmp_path: Path) -> None:
    encoder = build_encoder(CUDA["sm_90"], *case[:4], replayed=True)
    used = usage(encoder, tmp_path)
    assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= case[4], used
    assert not [line for line in fused(encoder, tmp_path) if _EXACT_PRODUCT not in line]


@pytest.mark.parametrize(("shape", "last"), [*((shape, False) for shape in (*MAPS, *ROWS[:2])), (MAPS[2], True)])
def test_extremes_are_found_among_the_right_lanes(shape: tuple[int, ...], last: bool) -> None:
    """Small planes are spread over lanes in the oddest ways."""
    assert not scattered_reductions(build_encoder(CUDA["sm_90"], shape, last, torch.float32, 2))


@pytest.mark.skipif(not triton.__version__.startswith("3.6"), reason="later versions lay such a tile out otherwise")
def test_reductions_over_lanes_apart_would_be_seen(tmp_path: Path) -> None:
    """The two axes of a tile of 8 x 8 x 8 taken together are on the first and on the last bit of the lane."""
    path = tmp_path / "reshaping.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef reshaping(x_ptr, y_ptr):\n"
        "    at = tl.arange(0, 8)\n"
        "    x = tl.load(x_ptr + at[:, None, None] * 64 + at[None, :, None] * 8 + at[None, None, :])\n"
        "    tl.store(y_ptr + at, tl.max(x.reshape(8, 64), 1))\n"
    )
    kernel = runpy.run_path(str(path))["reshaping"]
    found = scattered_reductions(build(kernel, {"x_ptr": "*fp32", "y_ptr": "*fp32"}, {}, CUDA["sm_90"], num_warps=4))
    assert found and "lane bits [0, 4]" in found[0], found


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_contiguous_planes_move_16_bytes_at_a_time(case: Any) -> None:
    shape, last, dtype, bits, _ = case
    assert moves(build_encoder(CUDA["sm_90"], shape, last, dtype, bits))["ld", 16] >= 8
    assert moves(build_decoder(CUDA["sm_90"], shape, last, dtype, bits))["st", 16] >= 2


@pytest.mark.parametrize("name", ["sm_80", "sm_100"])
def test_other_targets(name: str, tmp_path: Path) -> None:
    encoder = build_encoder(CUDA[name], *CASES[0][:4])
    assert usage(encoder, tmp_path)["STACK"] == 0
    assert not [line for line in fused(encoder, tmp_path) if _EXACT_PRODUCT not in line]


@pytest.mark.parametrize("name", HIP)
def test_kernels_compile_for_amd(name: str) -> None:
    encoder = build_encoder(HIP[name], *CASES[1][:4])
    for compiled in (encoder, build_decoder(HIP[name], *CASES[0][:4])):
        spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert spilled and not any(map(int, spilled))


def test_other_layouts_have_no_geometry() -> None:
    def spec(x: torch.Tensor) -> TensorSpec:
        return TensorSpec(tuple(x.shape), tuple(x.stride()), x.dtype, torch.device("cpu"))

    x = torch.empty(4, 6, 8, 9, device="meta")
    assert Geometry.of(spec(x.permute(2, 0, 1, 3)), Division()) is None
    assert Geometry.of(spec(x[:0]), Division()) is None
    last = Geometry.of(spec(x.to(memory_format=torch.channels_last)), Division())
    assert last is not None and (last.channels, last.tiles) == (6, 4)
    assert Geometry.of(spec(x), Division()).tiles == 2  # of 16 planes
