"""Run a kernel's CUDA C++ on the CPU: g++ compiles the same source against ``simt.h``, which says what is emulated.

    kernel = Emulated(program).function("encode<float, 4, true>")
    kernel.launch(blocks, threads, shared, arguments)

Pointers in ``arguments`` are addresses of the host: ``Tensor.data_ptr()`` of tensors on the CPU. The source includes
nothing, and keeps inline PTX behind ``#ifdef __CUDA_ARCH__``.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import LowtideError
from lowtide.kernels._nvrtc import Program

HEADER, HOOKED = (Path(__file__).with_name(name) for name in ("simt.h", "races.cpp"))
# Ignored by git, removed by `make clean`.
BUILDS = Path(__file__).parents[2] / ".pytest_cache" / "simt"

# As on a GPU: no product is fused with a sum, signed numbers wrap, memory may be read as another type. Stack frames are
# left by longjmp, which _FORTIFY_SOURCE forbids; and two builds must not share a variable that has the same name.
FLAGS = ["-std=c++17", "-O1", "-w", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing"]
FLAGS += ["-U_FORTIFY_SOURCE", "-fno-gnu-unique", "-fvisibility=hidden", "-fno-threadsafe-statics"]
# A trap, which simt.h reports, where a GPU would fail or give another result than the CPU.
FLAGS += ["-fsanitize=alignment,bounds,null,shift-exponent", "-fsanitize-undefined-trap-on-error"]
# Hooks at every access to memory: of races.cpp, so nothing is linked with them.
HOOKS = ["-DSIMT_RACES", "-fsanitize=thread", "--param=tsan-distinguish-volatile=1"]

names_races = False  # whether a launch ends where accesses to memory race; conftest.py sets it

requires_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="the emulator needs Linux and g++"
)

# The source is in a namespace without a name: what it declares stays in its own library.
UNIT = """\
#include "{header}"
namespace {{
#line 1 "{name}.cu"
{source}
#line 1 "expression"
constexpr auto simt_kernel = &{expression};
}}
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT size_t simt_argument_nbytes() {{ return simt::argument_nbytes(simt_kernel); }}
EXPORT const char* simt_launch(unsigned grid, unsigned block, unsigned shared, const void* arguments) {{
    return simt::launch(simt_kernel, grid, block, shared, arguments);
}}
"""
# `extern __shared__ __align__(16) unsigned char memory[];`: the type and the name. All are aligned to 1024 bytes.
EXTERN = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?([\w\s:]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)
# `__shared__ __align__(16) float a[8][N + 1], b;`: the alignment, the type, and names with their sizes.
STATIC = re.compile(
    r"__shared__\s+(?:(?:__align__|alignas)\s*\(([^)]*)\)\s*)?([\w\s:]+?)\s+(\w+(?:\s*\[[^\]]*\])*(?:\s*,\s*\w+(?:\s*\[[^\]]*\])*)*)\s*;"
)

# Fibres, signal handlers and static shared memory belong to one launch at a time.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class Emulated:
    """A program whose kernels run on the CPU. It stands in for ``Program`` where one is asked for functions."""

    program: Program

    def function(self, expression: str, device: int = 0) -> EmulatedFunction:
        return _load(self.program, expression, names_races)


@dataclass(frozen=True, slots=True)
class EmulatedFunction:
    """Launched as ``lowtide.kernels._nvrtc.Function`` is, and done when the launch returns."""

    name: str
    library: Any

    def launch(self, grid: int, block: int, shared: int, arguments: Any, stream: int = 0) -> None:
        expected = self.library.simt_argument_nbytes()
        nbytes = len(arguments) if isinstance(arguments, bytes) else ctypes.sizeof(arguments)
        if nbytes < expected:
            raise LowtideError(f"{self.name}: its argument has {expected} bytes, received {nbytes}")
        with _ONE_AT_A_TIME:
            message = self.library.simt_launch(grid, block, shared, arguments)
        if message:
            raise LowtideError(f"{self.name}: {self._with_lines(message.decode())}")

    def _with_lines(self, message: str) -> str:
        """A message with lines of the source in place of ``[0x12, 0x34]``, which are places in the library."""
        found = re.search(r" \[(0x[0-9a-f]+), (0x[0-9a-f]+)\]$", message)
        if found is None or shutil.which("addr2line") is None:
            return message
        command = ["addr2line", "-e", self.library._name, *found.groups()]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")
        places = [Path(line.partition(" ")[0]).name for line in lines if line]
        return f"{message[: found.start()]} ({' and '.join(places)})"


@cache
def _load(program: Program, expression: str, races: bool) -> EmulatedFunction:
    source = _with_shared_memory(program.source)
    unit = UNIT.format(header=HEADER, name=program.name, source=source, expression=expression)
    library = ctypes.CDLL(str(_build(program.name, unit, races)))
    library.simt_argument_nbytes.restype = ctypes.c_size_t
    library.simt_launch.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]
    library.simt_launch.restype = ctypes.c_char_p
    return EmulatedFunction(f"{program.name}: {expression}", library)


def _with_shared_memory(source: str) -> str:
    """Declarations of shared memory become pointers and references to memory that can be filled and watched.

    Static variables with a section of their own would not do: g++ ignores the section in templates."""
    number = itertools.count()

    def declared(match: re.Match[str]) -> str:
        alignment, kind, names = match.groups()
        parts = []
        for item in re.split(r"\s*,\s*(?![^\[]*\])", names):
            name = re.match(r"\w+", item)[0]  # type: ignore[index]
            place = f"simt::shared_of<simt_{name}, {next(number)}, {alignment or 1}>()"
            parts.append(f"typedef {kind} simt_{item}; simt_{name}& {name} = {place};")
        return " ".join(parts)

    source = EXTERN.sub(r"\1* const \2 = reinterpret_cast<\1*>(simt::dynamic_shared);", source)
    return STATIC.sub(declared, source)


def _build(name: str, unit: str, races: bool) -> Path:
    """The compiled library, from an earlier run where nothing has changed since."""
    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    flags = [*FLAGS, *(["-gdwarf-4", *HOOKS] if races else [])]
    parts = [unit, HEADER.read_text(encoding="utf-8"), *([HOOKED.read_text(encoding="utf-8")] if races else [])]
    key = hashlib.sha256(repr((parts, flags, version)).encode()).hexdigest()
    built = BUILDS / f"{name}-{key[:32]}.so"
    if built.exists():
        return built
    BUILDS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILDS) as folder:
        draft, made = Path(folder) / built.name, Path(folder) / "unit.o"
        if not races:
            _compile(name, [*flags, "-shared", "-x", "c++", "-", "-o", str(draft)], unit)
        else:
            _compile(name, [*flags, "-c", "-x", "c++", "-", "-o", str(made)], unit)
            _compile(name, ["-O2", "-std=c++17", "-fPIC", "-shared", str(made), str(HOOKED), "-o", str(draft)], "")
        os.replace(draft, built)
    return built


def _compile(name: str, arguments: list[str], source: str) -> None:
    done = subprocess.run(["g++", *arguments], input=source, capture_output=True, text=True)
    if done.returncode:
        raise LowtideError(f"{name}: g++ failed\n{done.stderr}")
