"""CUDA C++ at run time: a kernel is compiled by NVRTC when it is first asked for, and launched through the driver.

1. ``compile`` turns source into machine code, through ``cuda.bindings`` or, where that is missing, through ctypes on
   libnvrtc. It needs no GPU. What it made is kept on disk: a second process only reads a file.
   ``Program.compile_ahead`` has that done by other threads, several kernels at a time; both ways release the GIL.
2. ``Program.function`` loads that code on a device, into the context that torch uses. Ask before a graph is captured:
   CUDA forbids loading to the thread that captures, and where a capture has the mode ``global``, to all others.
   Threads that compile ahead never load.
3. ``Function.launch`` is one call of the driver: no allocation on the device, no synchronisation, from any thread.

Multiply-adds are not fused: bounds and bytes rest on every rounding. A kernel that wants one calls ``fmaf``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from ctypes import addressof, byref, c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p, sizeof
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from lowtide.background import Background, Once
from lowtide.errors import LowtideError

__all__ = ["Function", "Program", "available", "compile", "current_stream"]

_OPTIONS = ("-std=c++17", "--fmad=false", "-default-device")
_MOST_COMPILERS = 4  # threads, and no more than half of the cores: training needs some, too

# CUfunction_attribute and CUresult, from cuda.h.
_SHARED_NBYTES, _LOCAL_NBYTES, _REGISTERS, _MAX_DYNAMIC_SHARED = 1, 3, 4, 8
_INVALID_CONTEXT, _INVALID_HANDLE = 201, 400
# Static and dynamic shared memory together that a kernel may use without asking for more.
_UNASKED_SHARED_NBYTES = 48 * 1024

_Arguments = bytes | ctypes.Array[c_char] | ctypes.Structure
_ToBytes, _ToBuffer = c_char_p * 1, c_void_p * 1


@dataclass(frozen=True, slots=True)
class Program:
    """CUDA C++ source; kernels are templates, instantiated and compiled when first asked for."""

    name: str
    source: str

    @classmethod
    def read(cls, name: str, *files: str) -> Program:
        """From files that lie beside this one, in their order: nothing is included by a name that NVRTC has to find."""
        folder = resources.files("lowtide.kernels")
        texts = [f'#line 1 "{file}"\n{folder.joinpath(file).read_text(encoding="utf-8")}' for file in files]
        return cls(name, "".join(texts))

    def function(self, expression: str, device: int) -> Function:
        """The kernel that ``expression`` names, such as ``encode<float, 4, true>``, loaded on ``device``."""
        return _load(self, expression, device)

    def compile_ahead(self, expression: str, device: int) -> Future[None]:
        """Have it compiled by another thread, so that ``function`` need not; done at once if one is at it already."""
        arch = _arch(device)
        return _COMPILERS.submit(lambda: _compile.unless_begun(self, expression, arch))


class Function:
    """A kernel loaded on one device. It takes one argument: a struct, by value."""

    __slots__ = ("_context", "_handle", "_launch", "_lock", "_nbytes", "_shared", "name")

    def __init__(self, name: str, cubin: bytes, lowered: str, device: int) -> None:
        ordinal, module, handle = c_int(), c_void_p(), c_void_p()
        self.name, self._context, self._lock = name, c_void_p(), threading.Lock()
        _call(name, "cuInit", 0)
        _call(name, "cuDeviceGet", byref(ordinal), device)
        _call(name, "cuDevicePrimaryCtxRetain", byref(self._context), ordinal)
        with self._current():
            _call(name, "cuModuleLoadData", byref(module), cubin)
            _call(name, "cuModuleGetFunction", byref(handle), module, lowered.encode())
        self._handle, self._launch = handle.value, _driver().cuLaunchKernel
        self._nbytes = self._argument_nbytes()
        self._shared = _UNASKED_SHARED_NBYTES - self._attribute(_SHARED_NBYTES)

    @property
    def registers(self) -> int:
        """Registers a thread."""
        return self._attribute(_REGISTERS)

    @property
    def local_nbytes(self) -> int:
        """Local memory a thread: what registers could not hold, and arrays with computed indices."""
        return self._attribute(_LOCAL_NBYTES)

    def launch(self, grid: int, block: int, shared: int, arguments: _Arguments, stream: int) -> None:
        """Launch ``grid`` blocks of ``block`` threads with ``shared`` bytes of dynamic shared memory.

        ``arguments`` holds the struct and is read before this returns; ``stream`` is a raw stream of the device.
        """
        pointers: ctypes.Array[Any]
        if isinstance(arguments, bytes):
            nbytes, pointers = len(arguments), _ToBytes(arguments)
        else:
            nbytes, pointers = sizeof(arguments), _ToBuffer(addressof(arguments))
        if nbytes < self._nbytes:
            raise LowtideError(f"{self.name}: its argument has {self._nbytes} bytes, received {nbytes}")
        if shared > self._shared:
            self._allow(shared)
        status = self._launch(self._handle, grid, 1, 1, block, 1, 1, shared, stream, pointers, None)
        if status in (_INVALID_CONTEXT, _INVALID_HANDLE):
            # A thread that has made no CUDA call yet has no context, one that is on another device has that device's.
            with self._current():
                status = self._launch(self._handle, grid, 1, 1, block, 1, 1, shared, stream, pointers, None)
        if status:
            shape = f"{grid} blocks of {block} threads with {shared} bytes of dynamic shared memory"
            raise LowtideError(f"{self.name}: launching {shape} failed: {_describe(status)}")

    def _allow(self, shared: int) -> None:
        """Ask for more dynamic shared memory than before; never for less, which another thread may be using."""
        with self._lock, self._current():
            if shared > self._shared:
                _call(self.name, "cuFuncSetAttribute", c_void_p(self._handle), _MAX_DYNAMIC_SHARED, shared)
                self._shared = shared

    def _attribute(self, attribute: int) -> int:
        value = c_int()
        with self._current():
            _call(self.name, "cuFuncGetAttribute", byref(value), attribute, c_void_p(self._handle))
        return value.value

    def _argument_nbytes(self) -> int:
        """What a launch reads from ``arguments``; 0 where the driver is too old to say (before CUDA 12.4)."""
        offset, size = c_size_t(), c_size_t()
        if not hasattr(_driver(), "cuFuncGetParamInfo"):
            return 0
        with self._current():
            _call(self.name, "cuFuncGetParamInfo", c_void_p(self._handle), c_size_t(0), byref(offset), byref(size))
        return size.value

    @contextmanager
    def _current(self) -> Iterator[None]:
        """This device's context is current inside, and what was before is afterwards."""
        _call(self.name, "cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            _call(self.name, "cuCtxPopCurrent_v2", byref(c_void_p()))


@cache
def available() -> bool:
    """Whether kernels can be compiled and launched here: torch for CUDA (not for ROCm), a device, and NVRTC."""
    return torch.version.hip is None and torch.cuda.is_available() and _nvrtc() is not None


def current_stream(device: int) -> int:
    """The raw stream that torch would launch on."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def compile(source: str, expression: str, arch: str, name: str) -> tuple[bytes, str]:
    """Machine code for ``arch`` (``sm_90``) of the kernel that ``expression`` names, and its name in that code."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        raise LowtideError(
            f"{name}: NVRTC, which compiles CUDA C++, was not found for CUDA {torch.version.cuda or '(any)'}. "
            "CUDA builds of torch bring it; otherwise: pip install nvidia-cuda-nvrtc cuda-bindings"
        )
    options = (f"--gpu-architecture={arch}", *_OPTIONS)
    _, *version = nvrtc.nvrtcVersion()
    key = hashlib.sha256(repr((source, expression, arch, options, version)).encode()).hexdigest()
    kept = _read(name, key)
    if kept is not None:
        return kept
    cubin, lowered = _build(nvrtc, source, expression, options, name)
    _write(name, key, cubin, lowered)
    return cubin, lowered


@Once
def _load(program: Program, expression: str, device: int) -> Function:
    cubin, lowered = _compile(program, expression, _arch(device))
    return Function(f"{program.name}: {expression}", cubin, lowered, device)


@Once
def _compile(program: Program, expression: str, arch: str) -> tuple[bytes, str]:
    return compile(program.source, expression, arch, program.name)


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


_COMPILERS = Background("lowtide-nvrtc", min(_MOST_COMPILERS, max((os.cpu_count() or 1) // 2, 1)))


def _build(nvrtc: Any, source: str, expression: str, options: tuple[str, ...], name: str) -> tuple[bytes, str]:
    def call(function: str, *arguments: Any) -> Any:
        code, *results = getattr(nvrtc, function)(*arguments)
        if int(code):
            log = read("ProgramLog") if function == "nvrtcCompileProgram" else b""
            reason = nvrtc.nvrtcGetErrorString(code)[1].decode()
            raise LowtideError(
                f"{name}: {function} failed for {expression!r} with {' '.join(options)}: {reason}\n"
                f"{log.rstrip(bytes(1)).decode(errors='replace')}".rstrip()
            )
        return results[0] if results else None

    def read(what: str) -> bytes:
        # Filled in place. A bytearray, because short bytes objects are shared by the whole interpreter.
        buffer = bytearray(call(f"nvrtcGet{what}Size", program))
        call(f"nvrtcGet{what}", program, buffer)
        return bytes(buffer)

    program = call("nvrtcCreateProgram", source.encode(), f"{name}.cu".encode(), 0, [], [])
    try:
        call("nvrtcAddNameExpression", program, expression.encode())
        call("nvrtcCompileProgram", program, len(options), [option.encode() for option in options])
        lowered = call("nvrtcGetLoweredName", program, expression.encode())
        return read("CUBIN"), lowered.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _path(name: str, key: str) -> Path:
    folder = os.environ.get("LOWTIDE_CACHE_DIR")
    if folder:
        return Path(folder) / f"{name}-{key}.cubin"
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "lowtide" / f"{name}-{key}.cubin"


def _read(name: str, key: str) -> tuple[bytes, str] | None:
    """What an earlier process kept: a digest of the rest, the kernel's name, a zero, machine code."""
    try:
        contents = _path(name, key).read_bytes()
    except (OSError, RuntimeError):  # Path.home() raises the latter
        return None
    digest, rest = contents[:32], contents[32:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    lowered, _, cubin = rest.partition(b"\0")
    return cubin, lowered.decode()


def _write(name: str, key: str, cubin: bytes, lowered: str) -> None:
    """Keep it for later processes; where that is not possible, they compile again."""
    rest = lowered.encode() + b"\0" + cubin
    with suppress(OSError, RuntimeError):
        path = _path(name, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{name}-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(rest).digest() + rest)
            os.replace(draft, path)
        except OSError:
            os.unlink(draft)


@cache
def _nvrtc() -> Any | None:
    """The first NVRTC found whose major version is not above torch's: the driver may not load what that one makes."""
    newest = int((torch.version.cuda or "1000").partition(".")[0])
    for place in _places():
        try:
            found = importlib.import_module(place) if place == "cuda.bindings.nvrtc" else _Library(place)
            if found.nvrtcVersion()[1] <= newest:
                return found
        except (ImportError, OSError, RuntimeError):  # the binding raises the last one where it finds no library
            continue
    return None


def _places() -> Iterator[str]:
    yield "cuda.bindings.nvrtc"
    packages = importlib.util.find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or ():
        yield from sorted(map(str, Path(folder).glob("*/lib/libnvrtc.so.*")), reverse=True)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12")
    yield ctypes.util.find_library("nvrtc") or "libnvrtc.so"


class _Library:
    """libnvrtc through ctypes: the functions used here, with the names, arguments and results of ``cuda.bindings``."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.nvrtcGetErrorString.restype = c_char_p

    def nvrtcVersion(self) -> tuple[int, int, int]:
        major, minor = c_int(), c_int()
        return self._library.nvrtcVersion(byref(major), byref(minor)), major.value, minor.value

    def nvrtcGetErrorString(self, code: int) -> tuple[int, bytes]:
        return 0, self._library.nvrtcGetErrorString(code)

    def nvrtcCreateProgram(self, source: bytes, name: bytes, *_: Any) -> tuple[int, c_void_p]:
        program = c_void_p()
        return self._library.nvrtcCreateProgram(byref(program), source, name, 0, None, None), program

    def nvrtcDestroyProgram(self, program: c_void_p) -> tuple[int]:
        return (self._library.nvrtcDestroyProgram(byref(program)),)

    def nvrtcAddNameExpression(self, program: c_void_p, expression: bytes) -> tuple[int]:
        return (self._library.nvrtcAddNameExpression(program, expression),)

    def nvrtcCompileProgram(self, program: c_void_p, count: int, options: list[bytes]) -> tuple[int]:
        return (self._library.nvrtcCompileProgram(program, count, (c_char_p * count)(*options)),)

    def nvrtcGetLoweredName(self, program: c_void_p, expression: bytes) -> tuple[int, bytes | None]:
        lowered = c_char_p()
        return self._library.nvrtcGetLoweredName(program, expression, byref(lowered)), lowered.value

    def nvrtcGetCUBINSize(self, program: c_void_p) -> tuple[int, int]:
        return self._size(self._library.nvrtcGetCUBINSize, program)

    def nvrtcGetCUBIN(self, program: c_void_p, buffer: bytearray) -> tuple[int]:
        return self._fill(self._library.nvrtcGetCUBIN, program, buffer)

    def nvrtcGetProgramLogSize(self, program: c_void_p) -> tuple[int, int]:
        return self._size(self._library.nvrtcGetProgramLogSize, program)

    def nvrtcGetProgramLog(self, program: c_void_p, buffer: bytearray) -> tuple[int]:
        return self._fill(self._library.nvrtcGetProgramLog, program, buffer)

    def _size(self, function: Any, program: c_void_p) -> tuple[int, int]:
        size = c_size_t()
        return function(program, byref(size)), size.value

    def _fill(self, function: Any, program: c_void_p, buffer: bytearray) -> tuple[int]:
        return (function(program, (c_char * len(buffer)).from_buffer(buffer)),)


@cache
def _driver() -> Any:
    """The CUDA driver. Only a launch has its types declared: handles are c_void_p in every other call."""
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    library.cuLaunchKernel.argtypes = [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p]
    return library


def _call(owner: str, function: str, *arguments: Any) -> None:
    status = getattr(_driver(), function)(*arguments)
    if status:
        raise LowtideError(f"{owner}: {function} failed: {_describe(status)}")


def _describe(status: int) -> str:
    name, text = c_char_p(), c_char_p()
    _driver().cuGetErrorName(status, byref(name))
    _driver().cuGetErrorString(status, byref(text))
    known = [value.decode() for value in (name.value, text.value) if value]
    return ": ".join(known) or f"error {status}"
