"""The kernels of ``sz`` compile without a GPU, for three generations of NVIDIA and for one of AMD.

What bounds and bytes rest on is read from the machine code: no multiply-add is fused. What speed rests on as well: how
much the registers overflow.
"""

from __future__ import annotations

import os
import re
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
POINTERS = {"step": "*fp32", "inverse": "*fp32", "bound": "*fp32", "words": "*i32", "short": "*i16"}
POINTERS |= {"headers": "*u8", "counts": "*i32", "scratch": "*i32", "offsets": "*i32"}
HALF = {"fp32": False, "fp16": True, "bf16": True}
# The terms of a bound's index are never made constants: kernels differ by their number alone.
TERMS: dict[int, dict[str, int]] = {0: {}, 1: {}, 2: {}}

# The dither is an integer over 256: that product is exact, and fusing it changes nothing.
_EXACT_PRODUCT = "0.00390625"
# Bytes of the stack that spilled registers take now, at most, by terms. Indices have 64 bits and are divided.
SPILLED = {0: 8, 1: 152, 2: 560}

# dtype, terms, dither, code for zero, type of the element count: every value of each occurs, not every combination.
ENCODERS = [
    ("fp32", 0, True, 0, "i32"),
    ("fp32", 2, False, 1, "i64"),
    ("fp16", 1, False, 0, "i32"),
    ("bf16", 2, True, 1, "i32"),
]
# As above, and whether it is the mask that is decoded.
DECODERS = [
    ("fp32", 0, True, 1, "i32", False),
    ("fp32", 2, False, 0, "i64", False),
    ("fp16", 1, True, 1, "i32", False),
    ("bf16", 2, True, 0, "i32", False),
    ("bf16", 0, True, 1, "i32", True),
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


def _constants(dtype: str, terms: int, dithered: bool, zero: int, mask: bool = False) -> dict[str, Any]:
    switches = {"TERMS": terms, "DITHER": dithered, "ZERO": zero, "MASK": mask, "HALF": HALF[dtype]}
    return {**switches, "SOFT": False, "CHUNKS": sz._CHUNKS, **TERMS[terms]}


def build_encoder(target: GPUTarget, dtype: str, terms: int, dithered: bool, zero: int, count: str) -> Any:
    constants = _constants(dtype, terms, dithered, zero)
    return build(sz._encode, {"x_ptr": f"*{dtype}", "count": count}, constants, target)


def build_decoder(target: GPUTarget, dtype: str, terms: int, dithered: bool, zero: int, count: str, mask: bool) -> Any:
    types = {"y_ptr": f"*{dtype}", "bits_ptr": "*i16" if HALF[dtype] else "*i32", "count": count}
    types["offsets_ptr"] = "*i64" if count == "i64" else "*i32"
    return build(sz._decode, types, _constants(dtype, terms, dithered, zero, mask), target)


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


def fused(compiled: Any) -> list[str]:
    """Instructions that multiply and add floats with one rounding: as Triton wrote them, and as ptxas made them."""
    written = [line.strip() for line in compiled.asm["ptx"].splitlines() if re.search(r"\bfma\.", line)]
    made = [line.strip() for line in inspect(compiled, "-sass").splitlines() if re.search(r"\b[FD]FMA", line)]
    return written + [line for line in made if _EXACT_PRODUCT not in line]


def assert_exact_and_lean(compiled: Any, what: str, *, spilled: int) -> None:
    used = usage(compiled)
    found = fused(compiled)
    what = f"{what}: {used}, shared memory asked for {compiled.metadata.shared}"
    assert used["STACK"] <= spilled and used["LOCAL"] == 0, f"{what}: more is spilled than {spilled} bytes"
    assert compiled.metadata.shared <= 4096, what
    assert not found, f"{what}: {len(found)} fused, such as {found[:3]}"


def _variants(combinations: list[Any]) -> Iterator[Any]:
    """All of them for one target, the first and the last for the others."""
    for (name, target), (index, combination) in product(CUDA.items(), enumerate(combinations)):
        if name == "sm_90" or index in (0, len(combinations) - 1):
            label = "-".join(str(part) for part in combination)
            yield pytest.param(target, combination, id=f"{name}-{label}")


@pytest.mark.parametrize(("target", "combination"), list(_variants(ENCODERS)))
def test_encoder_rounds_where_it_says(target: GPUTarget, combination: Any) -> None:
    assert_exact_and_lean(
        build_encoder(target, *combination), f"encode {combination} for {target}", spilled=SPILLED[combination[1]]
    )


@pytest.mark.parametrize(("target", "combination"), list(_variants(DECODERS)))
def test_decoder_rounds_where_it_says(target: GPUTarget, combination: Any) -> None:
    assert_exact_and_lean(
        build_decoder(target, *combination), f"decode {combination} for {target}", spilled=SPILLED[combination[1]]
    )


@pytest.mark.parametrize("name", CUDA)
@pytest.mark.parametrize(("span", "offsets"), [(1024, "*i32"), (512, "*i64")])
def test_compaction_compiles(name: str, span: int, offsets: str) -> None:
    compiled = build(sz._compact, {"offsets_ptr": offsets}, {"SPAN": span}, CUDA[name])
    used = usage(compiled)
    assert used["STACK"] == used["LOCAL"] == 0, f"compact for {name}: {used}: registers are spilled"


def test_fusion_would_be_seen() -> None:
    """With the default of Triton the same kernel has fused instructions: the checks above can fail."""
    exact = sz._EXACT
    assert exact == {"enable_fp_fusion": False}
    try:
        sz._EXACT = {"enable_fp_fusion": True}
        assert fused(build_decoder(CUDA["sm_90"], *DECODERS[0]))
    finally:
        sz._EXACT = exact


@pytest.mark.parametrize("name", HIP)
def test_kernels_compile_for_amd(name: str) -> None:
    """Where no bound needs the division of integers, which is done with fused floats there."""
    encoder = build_encoder(HIP[name], *ENCODERS[0])
    decoder = build_decoder(HIP[name], *DECODERS[0])
    for compiled in (encoder, decoder):
        code = compiled.asm["amdgcn"]
        assert not re.findall(r"v_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_f32.*", code)
        spilled = re.findall(r"\.vgpr_spill_count:\s*(\d+)", code)
        registers = re.findall(r"\.vgpr_count:\s*(\d+)", code)
        assert spilled and not any(map(int, spilled)), f"{spilled} spilled of {registers} registers"
    assert build(sz._compact, {}, {"SPAN": 1024}, HIP[name]).asm["hsaco"]
