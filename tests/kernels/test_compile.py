"""The Triton kernels of ``sz`` compile without a GPU, for three generations of NVIDIA and for one of AMD.

What bounds and bytes rest on is read from the machine code: no multiply-add is fused but the one that rounds x / s to
an integer. What speed rests on as well: registers do not overflow, and lanes do not talk through shared memory.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted here, not compiled", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from lowtide.kernels import sz  # noqa: E402

CUDA = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)}
HIP = {"gfx942": GPUTarget("hip", "gfx942", 64)}
POINTERS = {"step": "*bf16", "centre": "*bf16", "inverse": "*fp32", "bound": "*fp32", "words": "*i32", "short": "*i16"}
POINTERS |= {"headers": "*u8", "counts": "*i32", "scratch": "*i32", "offsets": "*i32"}
HALF = {"fp32": False, "fp16": True, "bf16": True}

# dtype, kind and number of terms of the bound's index, centres, dither, code for zero, elements beyond 32 bits: every
# value of each occurs, not every combination.
ENCODERS = [
    ("fp32", sz._TENSOR, 0, False, True, 0, False),
    ("fp32", sz._ANY, 2, False, False, 1, True),
    ("fp16", sz._RUNS, 2, True, False, 0, False),
    ("bf16", sz._INNER, 1, True, True, 1, False),
]
# As above, and whether it is the mask that is decoded.
DECODERS = [
    ("fp32", sz._TENSOR, 0, False, True, 1, False, False),
    ("fp32", sz._ANY, 2, False, False, 0, True, False),
    ("fp16", sz._RUNS, 1, True, True, 1, False, False),
    ("bf16", sz._TENSOR, 0, False, True, 1, False, True),
    ("bf16", sz._INNER, 1, True, True, 1, False, False),
]


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, whatever an earlier run has left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget) -> Any:
    """Compile as a launch would: pointers aligned to 16 bytes, the options that ``sz`` passes."""
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else _type_of(name, types) for name in kernel.arg_names}
    aligned = [index for index, name in enumerate(kernel.arg_names) if name.endswith("_ptr")]
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    return triton.compile(source, target=target, options={"num_warps": sz._WARPS, **sz._EXACT})


def _type_of(name: str, types: dict[str, str]) -> str:
    return types.get(name) or POINTERS.get(name.removesuffix("_ptr"), "i32")


def _constants(
    dtype: str, kind: int, terms: int, centred: bool, dithered: bool, zero: int, wide: bool, mask: bool = False
) -> dict[str, Any]:
    switches = {"KIND": kind, "TERMS": terms, "CENTRED": centred, "DITHER": dithered, "ZERO": zero, "WIDE": wide}
    launched = {"HALF": HALF[dtype], "INTERPRETED": False, "CHUNKS": sz._CHUNKS}
    return {**switches, **launched, "MASK": mask, **({} if centred else {"centre_ptr": None})}


def _types(dtype: str, wide: bool) -> dict[str, str]:
    types = {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "bits_ptr": "*i16" if HALF[dtype] else "*i32"}
    return {**types, "count": "i64", "offsets_ptr": "*i64"} if wide else types


def build_encoder(target: GPUTarget, *combination: Any) -> Any:
    return build(sz._encode, _types(combination[0], combination[6]), _constants(*combination), target)


def build_decoder(target: GPUTarget, *combination: Any) -> Any:
    return build(sz._decode, _types(combination[0], combination[6]), _constants(*combination), target)


def inspect(compiled: Any, *options: str) -> str:
    """What NVIDIA's tool says about the machine code; it comes with Triton."""
    cubin = Path(os.environ["TRITON_CACHE_DIR"]) / "inspected.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tools = triton.knobs.nvidia
    nvdisasm = Path(tools.nvdisasm.path).parent
    environment = {**os.environ, "PATH": f"{nvdisasm}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [tools.cuobjdump.path, *options, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def usage(compiled: Any) -> dict[str, int]:
    """Registers, stack, shared and local memory of the kernel; what is spilled lies on the stack."""
    report = inspect(compiled, "--dump-resource-usage")
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    assert found.keys() == {"REG", "STACK", "SHARED", "LOCAL"}, report
    return found


def fused(compiled: Any) -> dict[str, int]:
    """How many products of floats are summed with one rounding: as Triton wrote them, and as ptxas made them."""
    return {
        "ptx": _count(compiled.asm["ptx"], r"\bfma\.rn\.f32\b", r"\bfma\.rn\.f32x2\b"),
        "sass": _count(inspect(compiled, "-sass"), r"\b[FD]FMA\b", r"\bFFMA2\b"),
    }


def _count(code: str, single: str, double: str) -> int:
    return len(re.findall(single, code)) + 2 * len(re.findall(double, code))


def assert_lean(compiled: Any, what: str, *, wide: bool = False) -> None:
    """Nothing is spilled; a little is allowed where indices have 64 bits, which some compilers do not fit in."""
    used = usage(compiled)
    assert used["LOCAL"] == 0 and used["STACK"] <= (128 if wide else 0), f"{what}: {used}: registers are spilled"
    # Some compilers add up over lanes by shuffles, others through a little shared memory.
    assert compiled.metadata.shared <= 2048, f"{what}: {compiled.metadata.shared} bytes of shared memory"


def _variants(combinations: list[Any]) -> Iterator[Any]:
    """All of them for one target, one for each of the others."""
    chosen = {"sm_80": combinations[:1], "sm_90": combinations, "sm_100": combinations[-1:]}
    for (name, target), combination in product(CUDA.items(), combinations):
        if combination in chosen[name]:
            label = "-".join(str(part) for part in combination)
            yield pytest.param(target, combination, id=f"{name}-{label}")


@pytest.mark.parametrize(("target", "combination"), list(_variants(ENCODERS)))
def test_encoder_rounds_where_it_says(target: GPUTarget, combination: Any) -> None:
    """32 elements a lane, and four more where escapes are found once more: one multiply-add each, and no other."""
    compiled = build_encoder(target, *combination)
    what = f"encode {combination} for {target}"
    assert_lean(compiled, what, wide=combination[6])
    assert fused(compiled) == {"ptx": 36, "sass": 36}, what


@pytest.mark.parametrize(("target", "combination"), list(_variants(DECODERS)))
def test_decoder_rounds_where_it_says(target: GPUTarget, combination: Any) -> None:
    compiled = build_decoder(target, *combination)
    what = f"decode {combination} for {target}"
    assert_lean(compiled, what, wide=combination[6])
    assert fused(compiled) == {"ptx": 0, "sass": 0}, what


@pytest.mark.parametrize(("name", "span", "offsets"), [("sm_80", 1024, "*i32"), ("sm_90", 512, "*i64")])
def test_compaction_compiles(name: str, span: int, offsets: str) -> None:
    compiled = build(sz._compact, {"offsets_ptr": offsets}, {"SPAN": span}, CUDA[name])
    used = usage(compiled)
    assert used["STACK"] == used["LOCAL"] == 0, f"compact for {name}: {used}: registers are spilled"


def test_fusion_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that adds to a product has a fused instruction unless told otherwise: the checks above can fail."""
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "fusing.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n@triton.jit\ndef fusing(x_ptr, y_ptr):\n"
        "    at = tl.arange(0, 32)\n    tl.store(y_ptr + at, tl.load(x_ptr + at) * tl.load(y_ptr + at) + 1.5)\n"
    )
    kernel = runpy.run_path(str(path))["fusing"]
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    assert sz._EXACT == {"enable_fp_fusion": False}
    assert fused(build(kernel, types, {}, CUDA["sm_90"])) == {"ptx": 0, "sass": 0}
    monkeypatch.setattr(sz, "_EXACT", {"enable_fp_fusion": True})
    assert all(fused(build(kernel, types, {}, CUDA["sm_90"])).values())


@pytest.mark.parametrize("name", HIP)
def test_kernels_compile_for_amd(name: str) -> None:
    """Where no bound needs the division of integers, which is done with fused floats there. 64 lanes: 16 elements each,
    and two where escapes are found once more."""
    encoder, decoder = build_encoder(HIP[name], *ENCODERS[0]), build_decoder(HIP[name], *DECODERS[0])
    for compiled, meant in ((encoder, 18), (decoder, 0)):
        code = compiled.asm["amdgcn"]
        assert _count(code, r"\bv_(?:fma|fmac|fmamk|fmaak|mad|mac)_f32", r"\bv_pk_fma_f32") == meant
        spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", code)
        registers = re.findall(r"\.vgpr_count:\s*(\d+)", code)
        assert spilled and not any(map(int, spilled)), f"{spilled} spilled of {registers} registers"
    assert build(sz._compact, {}, {"SPAN": 1024}, HIP[name]).asm["hsaco"]
