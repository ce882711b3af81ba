"""Compiles a Triton kernel as a launch would, without a GPU, and reads what the compiler made of it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CUDA = {f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 90, 100)}
HIP = {"gfx942": GPUTarget("hip", "gfx942", 64)}
_WIDTHS = {"v4.b32": 16, "v2.b64": 16, "v2.b32": 8, "b64": 8, "b32": 4, "b16": 2, "b8": 1}


def build(kernel: Any, types: dict[str, str], constants: dict[str, Any], target: GPUTarget, **options: Any) -> Any:
    """Arguments are pointers aligned to 16 bytes and int32, where ``types`` does not say otherwise."""
    names = kernel.arg_names
    assert set(constants) | set(types) <= set(names), f"{kernel} has the arguments {names}"
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name.endswith("_ptr")},
    )
    return triton.compile(source, target=target, options=options)


def usage(compiled: Any, folder: Path) -> dict[str, int]:
    """Registers, stack, shared and local memory of the kernel; what is spilled lies on the stack."""
    report = _inspect(compiled, folder, "--dump-resource-usage")
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    assert found.keys() == {"REG", "STACK", "SHARED", "LOCAL"}, report
    return found


def fused(compiled: Any, folder: Path) -> list[str]:
    """Instructions of the machine code that multiply and add floats with one rounding."""
    return [line.strip() for line in _inspect(compiled, folder, "-sass").splitlines() if re.search(r"\b[FD]FMA", line)]


def moves(compiled: Any) -> Counter[tuple[str, int]]:
    """How often the kernel loads ("ld") or stores ("st") how many bytes of global memory at once."""
    found = re.findall(r"\b(ld|st)\.global\.((?:v\d\.)?b\d+)\b", compiled.asm["ptx"])
    return Counter((kind, _WIDTHS[width]) for kind, width in found)


def scattered_reductions(compiled: Any) -> list[str]:
    """Reductions over lanes of a warp that are not neighbours, for which Triton 3.6 shuffles the wrong ones.

    It halves a run of neighbours, whatever the layout says; a later one goes by the layout (triton-lang/triton#9219).
    A tensor that was reshaped may have such a layout. Values are wrong without any sign of it, and only on a device.
    """
    code = compiled.asm["ttgir"]
    lanes = {
        name: ast.literal_eval(bases) for name, bases in re.findall(r"(#linear\d*) = .*?\blane = (\[.*?\]), warp", code)
    }
    found = []
    for axis, layout in re.findall(r'"tt\.reduce".*?axis = (\d+).*?\}\) : \(tensor<\w+, (.*?)>[,)]', code, re.DOTALL):
        of_lanes = lanes.get(re.search(r"#linear\d*|$", layout)[0])
        if of_lanes is None:
            continue  # of other layouts, each axis has its lanes in a row
        for dim in reversed(re.findall(r"slice<\{dim = (\d+)", layout)):
            of_lanes = [[*basis[: int(dim)], *basis[int(dim) + 1 :]] for basis in of_lanes]
        places = [place for place, basis in enumerate(of_lanes) if basis[int(axis)]]
        if places and places != list(range(places[0], places[0] + len(places))):
            found.append(f"axis {axis} of {layout}: lane bits {places}")
    return found


def _inspect(compiled: Any, folder: Path, option: str) -> str:
    """What NVIDIA's tool says about the machine code; it comes with Triton."""
    cubin = folder / "inspected.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tools = triton.knobs.nvidia
    path = f"{Path(tools.nvdisasm.path).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [tools.cuobjdump.path, option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path}).stdout
