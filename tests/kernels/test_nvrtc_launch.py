"""A launch passes on what it is given, on whatever thread, and says what is wrong with it."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from machine_code import requires_nvrtc
from scale_kernel import FUSED, PLAIN, SOURCE

from lowtide.errors import LowtideError
from lowtide.kernels import _nvrtc
from lowtide.kernels._nvrtc import Function, Program

pytestmark = pytest.mark.usefixtures("kept")

PROGRAM = Program("scale", SOURCE)


# Launches, with a driver that only takes notes


class Notes:
    """The functions of libcuda that are used; ``context`` is the current one, 7 is the device's."""

    def __init__(self, *, context: int | None = 7) -> None:
        self.context, self.pushed, self.launches, self.allowed = context, [], [], []
        self.failure = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in ("cuInit", "cuDeviceGet"):
            return lambda *_: 0
        raise AttributeError(name)

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 7
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.pushed.append(self.context)
        self.context = context.value
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.context = self.pushed.pop()
        return 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        module._obj.value = 8
        return 0 if cubin == b"cubin" and self.context == 7 else 200

    def cuModuleGetFunction(self, function: Any, module: Any, lowered: bytes) -> int:
        function._obj.value = 9
        return 0 if (module.value, lowered) == (8, b"_Z5scale") else 500

    def cuFuncGetAttribute(self, value: Any, attribute: int, function: Any) -> int:
        value._obj.value = {1: 1024, 3: 16, 4: 40}[attribute]
        return 0 if self.context == 7 else 201

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:
        assert (function.value, attribute) == (9, 8)
        self.allowed.append(value)
        return 0 if self.context == 7 else 201

    def cuFuncGetParamInfo(self, function: Any, index: Any, offset: Any, size: Any) -> int:
        size._obj.value = 24
        return 0 if self.context == 7 else 201

    def cuLaunchKernel(self, function: int, *rest: Any) -> int:
        if self.context != 7:
            return 201 if self.context is None else 400
        *sizes, stream, pointers, extra = rest
        assert (function, extra) == (9, None)
        address = ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p))[0]
        self.launches.append((*sizes, stream, ctypes.string_at(address, 24)))
        return self.failure

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = {1: b"CUDA_ERROR_INVALID_VALUE", 500: b"CUDA_ERROR_NOT_FOUND"}.get(status)
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        text._obj.value = {1: b"invalid argument"}.get(status)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Notes:
    notes = Notes()
    monkeypatch.setattr(_nvrtc, "_driver", lambda: notes)
    return notes


def loaded() -> Function:
    return Function("scale: it", b"cubin", "_Z5scale", 0)


ARGUMENTS = bytes(range(24))


@pytest.mark.parametrize("wrap", [bytes, ctypes.create_string_buffer, (ctypes.c_char * 24).from_buffer_copy])
def test_a_launch_passes_everything_on(wrap: Callable[[bytes], Any], driver: Notes) -> None:
    loaded().launch(3, 64, 100, wrap(ARGUMENTS), 0x7F0012345678)
    assert driver.launches == [(3, 1, 1, 64, 1, 1, 100, 0x7F0012345678, ARGUMENTS)]


def test_attributes_of_a_function(driver: Notes) -> None:
    kernel = loaded()
    assert (kernel.registers, kernel.local_nbytes) == (40, 16)


def test_more_shared_memory_is_asked_for_once(driver: Notes) -> None:
    """48 KiB together with the 1024 bytes that the kernel declares are free."""
    kernel = loaded()
    for shared in (0, 47 * 1024, 47 * 1024 + 1, 100_000, 60_000, 100_000, 100_001):
        kernel.launch(1, 32, shared, ARGUMENTS, 0)
    assert driver.allowed == [47 * 1024 + 1, 100_000, 100_001]
    assert len(driver.launches) == 7


@pytest.mark.parametrize("context", [None, 6], ids=["no context", "another device's"])
def test_a_thread_elsewhere_launches_and_stays_there(context: int | None, driver: Notes) -> None:
    driver.context = context
    kernel = loaded()
    assert driver.context == context
    kernel.launch(1, 32, 50_000, ARGUMENTS, 0)
    assert driver.context == context and len(driver.launches) == len(driver.allowed) == 1


def test_errors_of_the_driver_are_told(driver: Notes) -> None:
    kernel = loaded()
    with pytest.raises(LowtideError, match="scale: it: its argument has 24 bytes, received 23"):
        kernel.launch(1, 32, 0, ARGUMENTS[:-1], 0)
    driver.failure = 1
    message = "launching 1 blocks of 4096 threads with 5 bytes .*: CUDA_ERROR_INVALID_VALUE: invalid argument"
    with pytest.raises(LowtideError, match=message):
        kernel.launch(1, 4096, 5, ARGUMENTS, 0)
    driver.failure = 12345
    with pytest.raises(LowtideError, match="error 12345"):
        kernel.launch(1, 32, 0, ARGUMENTS, 0)
    with pytest.raises(LowtideError, match="other: cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND"):
        Function("other", b"cubin", "_Z5scala", 0)


def test_an_old_driver_does_not_say_how_long_the_argument_is(driver: Notes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Notes, "cuFuncGetParamInfo")
    loaded().launch(1, 32, 0, ctypes.create_string_buffer(ARGUMENTS, 24), 0)
    assert len(driver.launches) == 1


@requires_nvrtc
def test_a_function_is_loaded_once(driver: Notes, monkeypatch: pytest.MonkeyPatch, builds: list[Any]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda module, cubin: int(not cubin.startswith(b"\x7fELF")))
    monkeypatch.setattr(driver, "cuModuleGetFunction", lambda *_: 0)
    program = Program("scale", SOURCE + "// of its own\n")
    first = program.function(PLAIN, 0)
    assert Program("scale", program.source).function(PLAIN, 0) is first
    assert program.function(PLAIN, 1) is not first
    assert program.function(FUSED, 0) is not first
    assert [arguments[1] for arguments in builds] == [PLAIN, FUSED]


@requires_nvrtc
def test_a_kernel_is_compiled_once_by_however_many_threads(
    driver: Notes, monkeypatch: pytest.MonkeyPatch, builds: list[Any]
) -> None:
    """And what was compiled ahead is only loaded, also where nothing can be kept on disk."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", "/dev/null/kept")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(driver, "cuModuleLoadData", lambda module, cubin: int(not cubin.startswith(b"\x7fELF")))
    monkeypatch.setattr(driver, "cuModuleGetFunction", lambda *_: 0)
    program, found = Program("scale", SOURCE + "// by many\n"), []
    ahead = [program.compile_ahead(expression, 0) for expression in (PLAIN, FUSED, PLAIN)]
    threads = [threading.Thread(target=lambda: found.append(program.function(PLAIN, 0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for compiled in ahead:
        compiled.result(60)
    assert program.function(FUSED, 0) is program.function(FUSED, 0)
    assert len(set(found)) == 1 and len(found) == 4
    assert sorted(arguments[1] for arguments in builds) == [PLAIN, FUSED]


# Launches on a device


def run(x: torch.Tensor, y: torch.Tensor, *, shared: int = 1024, expression: str = PLAIN) -> None:
    kernel = PROGRAM.function(expression, x.device.index)
    arguments = struct.pack("PPII", x.data_ptr(), y.data_ptr(), x.numel(), shared // 4 - 1)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    kernel.launch(-(-x.numel() // 256), 256, shared, arguments, stream)


def given(device: str = "cuda:0") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(1000, device=device)
    return x, torch.full_like(x, float("nan")), x * 3 + 1


@pytest.mark.gpu
def test_kernels_run() -> None:
    x, y, expected = given()
    run(x, y)
    assert torch.equal(y, expected)
    run(x, y, expression=FUSED)
    assert torch.equal(y, (x.double() * 3 + 1).float())
    kernel = PROGRAM.function(PLAIN, 0)
    assert 0 < kernel.registers <= 255 and kernel.local_nbytes == 0


@pytest.mark.gpu
def test_kernels_use_all_of_shared_memory() -> None:
    x, y, expected = given()
    shared = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    run(x, y, shared=shared)
    assert torch.equal(y, expected)
    with pytest.raises(LowtideError, match="cuFuncSetAttribute failed: CUDA_ERROR_INVALID_VALUE"):
        run(x, y, shared=shared + 1024)


@pytest.mark.gpu
def test_kernels_run_on_the_stream_they_are_given_and_in_graphs() -> None:
    x, y, expected = given()
    run(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(x, y)
        run(y, y)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected * 3 + 1)


@pytest.mark.gpu
def test_another_thread_loads_while_this_one_captures() -> None:
    """In the mode in which steps are captured."""
    x, y, expected = given()
    run(x, y)
    program, graph = Program("scale", SOURCE + "// meanwhile\n"), torch.cuda.CUDAGraph()
    program.compile_ahead(PLAIN, 0).result(60)
    loaded: list[Function] = []
    thread = threading.Thread(target=lambda: loaded.append(program.function(PLAIN, 0)))
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        thread.start()
        thread.join()
        run(x, y)
    y.fill_(float("nan"))
    graph.replay()
    assert torch.equal(y, expected)
    y.fill_(float("nan"))
    arguments = struct.pack("PPII", x.data_ptr(), y.data_ptr(), x.numel(), 255)
    loaded[0].launch(4, 256, 1024, arguments, torch.cuda.current_stream().cuda_stream)
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_kernels_run_from_a_thread_that_has_made_no_cuda_call() -> None:
    x, y, expected = given()
    kernel = PROGRAM.function(PLAIN, 0)
    arguments = struct.pack("PPII", x.data_ptr(), y.data_ptr(), x.numel(), 255)
    stream = torch.cuda.current_stream().cuda_stream
    thread = threading.Thread(target=kernel.launch, args=(4, 256, 1024, arguments, stream))
    thread.start()
    thread.join()
    assert torch.equal(y, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
def test_kernels_run_on_a_device_that_is_not_the_current_one() -> None:
    x, y, expected = given("cuda:1")
    run(x, y)
    assert torch.cuda.current_device() == 0
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_a_launch_that_cannot_be_is_refused() -> None:
    with pytest.raises(LowtideError, match=r"scale: scale<3, false>: launching .*CUDA_ERROR_INVALID_VALUE"):
        PROGRAM.function(PLAIN, 0).launch(1, 4096, 0, bytes(24), 0)
