"""The kernels of ``groups`` compile without a GPU: nothing inexact is fused, nothing spilled, accesses are wide."""

from __future__ import annotations

import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here, not compiled", allow_module_level=True)

from compile_triton import CUDA, HIP, build, fused, moves, usage

from lowtide.codecs.groups import Groups
from lowtide.kernels import groups

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# dtype, bits, dither, type of the element count, all groups or those of chosen rows: every value of each occurs, not
# every combination.
ENCODERS = [
    ("fp32", 2, True, "i32", "all"),
    ("bf16", 2, True, "i64", "chosen"),
    ("fp16", 4, False, "i32", "all"),
    ("bf16", 1, True, "i32", "all"),
    ("fp32", 8, True, "i32", "all"),
    ("fp32", 2, True, "i32", "chosen"),
]
DECODERS = [
    ("fp32", 2, "i32", "all"),
    ("bf16", 2, "i64", "chosen"),
    ("fp16", 1, "i32", "all"),
    ("bf16", 8, "i32", "all"),
    ("fp32", 4, "i32", "chosen"),
]
# Registers of a thread now, at most, by kernel and the size of an element: with 128 of them four blocks of four warps
# run on a multiprocessor, which holds enough reads in flight.
REGISTERS = {("encode", 4): 96, ("encode", 2): 128, ("decode", 4): 40, ("decode", 2): 64}
# The dither is an integer over 256: that product is exact, and fusing it changes nothing.
_EXACT_PRODUCT = "-0.498046875"


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, whatever an earlier run has left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _options() -> dict[str, Any]:
    return {"num_warps": groups._WARPS, **groups._EXACT}


def build_encoder(
    target: Any, dtype: str, bits: int, dithered: bool, count: str, which: str, *, replayed: bool = False
) -> Any:
    tile = groups._tile(Groups(bits), DTYPES[dtype])
    types = {"x_ptr": f"*{dtype}", "low_ptr": f"*{dtype}", "scale_ptr": "*i16", "codes_ptr": "*u8", "count": count}
    types |= {"index_ptr": "*i64", "number_ptr": "*i64"}
    constants = {"BITS": bits, "GROUP": 256, "GROUPS": tile, "CHOSEN": which == "chosen", "DITHER": dithered}
    constants["REPLAYED"] = replayed
    return build(groups._encode, types, constants, target, **_options())


def build_decoder(target: Any, dtype: str, bits: int, count: str, which: str) -> Any:
    tile = groups._tile(Groups(bits), DTYPES[dtype])
    types = {"y_ptr": f"*{dtype}", "low_ptr": f"*{dtype}", "scale_ptr": "*bf16", "codes_ptr": "*u8", "count": count}
    types["index_ptr"] = "*i64"
    constants = {"BITS": bits, "GROUP": 256, "GROUPS": tile, "CHOSEN": which == "chosen", "SOFT": False}
    constants["LARGEST"] = torch.finfo(DTYPES[dtype]).max
    return build(groups._decode, types, constants, target, **_options())


def _variants(combinations: list[Any]) -> list[Any]:
    """All of them for one target, the first for an older one, the first two for a newer one."""
    shown = {"sm_80": 1, "sm_90": len(combinations), "sm_100": 2}
    return [
        pytest.param(CUDA[name], combination, id=f"{name}-{'-'.join(map(str, combination))}")
        for name, (index, combination) in product(CUDA, enumerate(combinations))
        if index < shown[name]
    ]


def assert_lean(compiled: Any, kernel: str, dtype: str, bits: int, folder: Path) -> None:
    """Whole blocks move the values of a thread in as few pieces as its parts are, and as many bytes of codes."""
    used = usage(compiled, folder)
    itemsize = DTYPES[dtype].itemsize
    assert used["STACK"] == used["LOCAL"] == 0, f"{used}: registers are spilled"
    assert used["REG"] <= REGISTERS[kernel, itemsize], used
    assert compiled.metadata.shared <= 256, "more than the extremes of groups crosses threads"
    codec = Groups(bits)
    vector = min(16 // itemsize, 32 // codec.parts)
    values, codes = ("ld", "st") if kernel == "encode" else ("st", "ld")
    assert moves(compiled)[values, vector * itemsize] >= codec.parts
    assert moves(compiled)[codes, vector] >= codec.parts * bits // 8


@pytest.mark.parametrize(("target", "combination"), _variants(ENCODERS))
def test_encoder_rounds_where_it_says(target: Any, combination: Any, tmp_path: Path) -> None:
    compiled = build_encoder(target, *combination)
    assert_lean(compiled, "encode", *combination[:2], tmp_path)
    inexact = [line for line in fused(compiled, tmp_path) if _EXACT_PRODUCT not in line]
    assert not inexact, f"{len(inexact)} fused, such as {inexact[:3]}"
    assert {"min.NaN.f32", "max.NaN.f32"} <= set(re.findall(r"\b(?:min|max)\.NaN\.f32", compiled.asm["ptx"]))


@pytest.mark.parametrize("combination", [ENCODERS[0], ENCODERS[1]], ids=["fp32", "bf16"])
def test_encoder_of_graphs_is_as_lean(combination: Any, tmp_path: Path) -> None:
    """One load more, of the replay's number."""
    plain, replayed = (build_encoder(CUDA["sm_90"], *combination, replayed=flag) for flag in (False, True))
    assert_lean(replayed, "encode", *combination[:2], tmp_path)
    assert moves(replayed)["ld", 8] == moves(plain)["ld", 8] + 1
    assert not [line for line in fused(replayed, tmp_path) if _EXACT_PRODUCT not in line]


@pytest.mark.parametrize(("target", "combination"), _variants(DECODERS))
def test_decoder_is_lean(target: Any, combination: Any, tmp_path: Path) -> None:
    """Its one product is exact, so that it may be fused."""
    assert_lean(build_decoder(target, *combination), "decode", *combination[:2], tmp_path)


def test_fusion_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default of Triton the same kernel has fused instructions: the checks above can fail."""
    assert groups._EXACT == {"enable_fp_fusion": False}
    monkeypatch.setattr(groups, "_EXACT", {})
    found = fused(build_encoder(CUDA["sm_90"], *ENCODERS[0]), tmp_path)
    assert any(_EXACT_PRODUCT not in line for line in found)


@pytest.mark.parametrize("name", HIP)
def test_kernels_compile_for_amd(name: str) -> None:
    encoder = build_encoder(HIP[name], *ENCODERS[2])
    for compiled in (encoder, build_decoder(HIP[name], *DECODERS[0])):
        spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", compiled.asm["amdgcn"])
        assert spilled and not any(map(int, spilled))
    assert not re.findall(r"v_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_f32.*", encoder.asm["amdgcn"])
