"""CUDA C++ compiles without a GPU, and what was compiled is kept and checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_code import requires_nvrtc
from scale_kernel import FUSED, PLAIN, SOURCE

from lowtide.errors import LowtideError
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import Program

pytestmark = pytest.mark.usefixtures("kept")


def compile_plain() -> tuple[bytes, str]:
    return _nvrtc.compile(SOURCE, PLAIN, "sm_90", "scale")


# Source to machine code


@requires_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_a_gpu(arch: str) -> None:
    cubin, lowered = _nvrtc.compile(SOURCE, PLAIN, arch, "scale")
    assert cubin.startswith(b"\x7fELF")
    assert "scale" in lowered and lowered.encode() in cubin
    assert _nvrtc.compile(SOURCE, FUSED, arch, "scale")[1] != lowered


@requires_nvrtc
def test_the_binding_and_ctypes_make_the_same() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    made = []
    for place in _nvrtc._places():
        try:
            made.append(_nvrtc._Library(place))
        except OSError:
            continue
    binding = _nvrtc._nvrtc()
    options = ("--gpu-architecture=sm_90", *_nvrtc._OPTIONS)
    by_version = {tuple(nvrtc.nvrtcVersion()[1:]): nvrtc for nvrtc in made}
    other = by_version.get(tuple(binding.nvrtcVersion()[1:]))
    if other is None:
        pytest.skip("ctypes does not find the version that the binding finds")
    results = [_nvrtc._build(nvrtc, SOURCE, PLAIN, options, "scale") for nvrtc in (binding, other)]
    assert results[0] == results[1]
    for nvrtc in (binding, other):
        with pytest.raises(LowtideError, match=r"(?s)NVRTC_ERROR_COMPILATION.*broken\.cu\(1\): error: .*nonsense"):
            _nvrtc._build(nvrtc, "nonsense", PLAIN, options, "broken")


@requires_nvrtc
def test_multiply_add_is_fused_only_where_asked(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = pytest.importorskip("triton", reason="the disassembler comes with Triton").knobs.nvidia

    def fused(expression: str) -> bool:
        cubin = kept.parent / "inspected.cubin"
        cubin.write_bytes(_nvrtc.compile(SOURCE, expression, "sm_90", "scale")[0])
        path = f"{Path(tools.nvdisasm.path).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [tools.cuobjdump.path, "-sass", str(cubin)]
        code = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PATH": path})
        assert "EXIT" in code.stdout
        return re.search(r"\bFFMA\b", code.stdout) is not None

    assert not fused(PLAIN)
    assert fused(FUSED)
    monkeypatch.setattr(_nvrtc, "_OPTIONS", tuple(x for x in _nvrtc._OPTIONS if "fmad" not in x))
    assert fused(PLAIN), "the option makes no difference: this test cannot fail"


@requires_nvrtc
@pytest.mark.parametrize(
    ("source", "expression", "arch", "message"),
    [
        ("int x = ;", PLAIN, "sm_90", r"(?s)scale: nvrtcCompileProgram failed for 'scale<3, false>' .*scale\.cu\(1\)"),
        (SOURCE, "scala<3>", "sm_90", r"(?s)failed for 'scala<3>'.*identifier \"scala\" is undefined"),
        (SOURCE, PLAIN, "sm_3", r"(?s)--gpu-architecture=sm_3 .*NVRTC_ERROR_INVALID_OPTION"),
    ],
)
def test_a_compile_error_has_the_log(source: str, expression: str, arch: str, message: str, kept: Path) -> None:
    with pytest.raises(LowtideError, match=message):
        _nvrtc.compile(source, expression, arch, "scale")
    assert not kept.exists(), "a failure was kept"


@requires_nvrtc
def test_a_program_of_several_files_names_the_one_with_the_error() -> None:
    program = Program.read("rows", "dtypes.cuh", "rows.cu")
    lines = (Path(_nvrtc.__file__).parent / "rows.cu").read_text().count("\n")
    with pytest.raises(LowtideError, match=rf"rows\.cu\({lines + 1}\): error"):
        _nvrtc.compile(program.source + "int x = ;", "measure<float, 8>", "sm_90", program.name)


@requires_nvrtc
@pytest.mark.parametrize("place", ["the binding", "ctypes"])
def test_others_go_on_while_a_kernel_is_compiled(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that kept the interpreter's lock would stop them for all of it."""
    nvrtc = _nvrtc._nvrtc()
    if place == "ctypes":
        found = [path for path in _nvrtc._places() if Path(path).is_file()]
        nvrtc = _nvrtc._Library(found[0]) if found else pytest.skip("libnvrtc is not in a package")
    options = ("--gpu-architecture=sm_90", *_nvrtc._OPTIONS)
    thread = threading.Thread(target=_nvrtc._build, args=(nvrtc, SOURCE, PLAIN, options, "scale"))
    begin = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (last - begin) / 2


# Kept on disk


@requires_nvrtc
def test_a_second_process_compiles_nothing(builds: list[Any], kept: Path) -> None:
    first = compile_plain()
    assert [path.suffix for path in kept.iterdir()] == [".cubin"]
    assert compile_plain() == first
    assert len(builds) == 1


@requires_nvrtc
def test_whatever_matters_is_in_the_key(builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compile_plain()
    _nvrtc.compile(SOURCE + "\n", PLAIN, "sm_90", "scale")
    _nvrtc.compile(SOURCE, FUSED, "sm_90", "scale")
    _nvrtc.compile(SOURCE, PLAIN, "sm_80", "scale")
    monkeypatch.setattr(_nvrtc, "_OPTIONS", (*_nvrtc._OPTIONS, "-lineinfo"))
    compile_plain()
    assert len(builds) == 5


@requires_nvrtc
@pytest.mark.parametrize(
    "damage",
    [lambda old: b"", lambda old: old[:20], lambda old: old[:-1], lambda old: old[:50] + b"?" + old[51:]],
    ids=["empty", "in the digest", "truncated", "changed"],
)
def test_a_damaged_file_is_compiled_again(damage: Callable[[bytes], bytes], builds: list[Any], kept: Path) -> None:
    first = compile_plain()
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compile_plain() == first
    assert len(builds) == 2
    assert file.read_bytes() == whole, "it was not repaired"


@requires_nvrtc
def test_a_cache_that_cannot_be_written_is_done_without(builds: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "/dev/null/kept")  # not a folder: also for root, whom no mode stops
    assert compile_plain() == compile_plain()
    assert len(builds) == 2


@requires_nvrtc
def test_a_failed_write_leaves_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    compile_plain()
    assert list(kept.iterdir()) == []


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    monkeypatch.setenv("HOME", "/c")
    assert _nvrtc._path("sz", "key") == Path("/a/sz-key.cubin")
    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    assert _nvrtc._path("sz", "key") == Path("/b/lowtide/sz-key.cubin")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert _nvrtc._path("sz", "key") == Path("/c/.cache/lowtide/sz-key.cubin")


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LOWTIDE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    _nvrtc._write("sz", "key", b"cubin", "name")
    assert _nvrtc._read("sz", "key") is None


# With parts missing


def in_a_new_process(code: str) -> str:
    preamble = "import sys; sys.modules['cuda'] = None; from lowtide.kernels import _nvrtc\n"
    return subprocess.run(
        [sys.executable, "-c", preamble + code], check=True, capture_output=True, text=True, env=dict(os.environ)
    ).stdout.strip()


def test_imports_without_the_binding() -> None:
    """Nothing is loaded by importing; without the binding libnvrtc itself is found, or nothing is."""
    found = in_a_new_process("print(_nvrtc._nvrtc.cache_info().currsize, type(_nvrtc._nvrtc()).__name__)")
    assert found in ("0 _Library", "0 NoneType")


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvrtc, "_places", lambda: iter(["libnvrtc-of-nobody.so"]))
    assert _nvrtc._nvrtc.__wrapped__() is None
    monkeypatch.setattr(_nvrtc, "_nvrtc", lambda: None)
    with pytest.raises(LowtideError, match=r"scale: NVRTC, which compiles CUDA C.*pip install nvidia-cuda-nvrtc"):
        compile_plain()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not _nvrtc.available.__wrapped__()


def test_a_compiler_newer_than_torch_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    assert _nvrtc._nvrtc.__wrapped__() is None


@requires_nvrtc
def test_available_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not _nvrtc.available.__wrapped__()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    assert _nvrtc.available.__wrapped__()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not _nvrtc.available.__wrapped__()
