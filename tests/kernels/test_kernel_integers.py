"""The twins of ``cusz``, ``jpeg_act`` and ``lossless`` under the emulator: the codec's bytes and values.

And compiled by NVRTC for three generations of GPUs: what is spilled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_cases import CODECS, DTYPES, OTHERS, Case, check, make_cases
from machine_code import requires_nvrtc, usage
from same_payload import assert_same_values
from simt import Emulated, requires_compiler

from lowtide import codecs
from lowtide.coding import integers, lorenzo
from lowtide.coding.planes import Planes
from lowtide.errors import PayloadError
from lowtide.kernels import _integers, _nvrtc, cusz, jpeg_act, lossless
from lowtide.records import Bound, Encoded, TensorSpec
from lowtide.registry import KERNELS as REGISTRY

MODULES: list[Any] = [_integers, cusz, jpeg_act, lossless]
CPU = torch.device("cpu")
# Each is a program to compile: not every combination. To ``lossless`` values of one size are alike.
COMBINATIONS = [
    ("cusz", "fp32"), ("cusz", "fp16"), ("cusz", "bf16"), ("jpeg_act", "fp32"), ("jpeg_act", "bf16"),
    ("lossless", "fp32"), ("lossless", "bf16"), ("lossless", "fp64"), ("lossless", "fp8"),
]  # fmt: skip
# Kernels by module, each with the most registers that it may take: with 128 of them two blocks of eight warps run on a
# multiprocessor, which holds enough reads in flight where each lane reads 32 integers at once.
KERNELS = [
    (_integers, 80, ["measure<Shorts>", "measure<Maps>", "unpack<Shorts>", "unpack<Bytes>", "accumulate<Shorts>"]),
    (_integers, 128, ["pack<Shorts>", "pack<Bytes>", "pack<Maps>"]),
    (cusz, 40, ["quantise<float>", "quantise<Bfloat>", "restore<Half>"]),
    (jpeg_act, 40, ["peaks_of_runs<Bfloat>", "peaks_of_columns<float>", "encode_plain<Half>", "decode_plain<Bfloat>"]),
    (jpeg_act, 80, ["encode_maps<float>", "decode_maps<Bfloat>"]),
    (lossless, 48, ["count_words<u16>", "split<u32, true>", "merge<u16, true, false>", "count_bytes<u32>"]),
]


@pytest.fixture(autouse=True)
def _on_the_cpu(emulate: Callable[..., Any]) -> None:
    for module in MODULES:
        emulate(module, functools.partial(_emulated, module.PROGRAM))


def _emulated(program: _nvrtc.Program, kernel: str, device: int) -> Any:
    return Emulated(program).function(kernel)


@requires_compiler
@pytest.mark.parametrize(("codec", "dtype"), COMBINATIONS)
def test_twin_equals_codec(codec: str, dtype: str) -> None:
    payloads = [check(case, CPU) for case in make_cases(codec, {**DTYPES, **OTHERS}[dtype])]
    assert len(payloads) >= 20
    if codec == "cusz":  # every way has been taken
        assert {payload.meta["kind"] for payload in payloads} == {"raw", "codes"}
        predicted = [payload.meta.get("predicted") for payload in payloads]
        assert predicted.count(True) > 20 and predicted.count(False) > 10
    if codec == "lossless" and dtype != "fp8":
        assert {payload.meta["bitmap"] for payload in payloads} == {True, False}
        assert {plane["coder"] for payload in payloads for plane in payload.meta["planes"]} == {"raw", "blocks"}


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("scale", [0, 1, 40, 900, 20_000])
@pytest.mark.parametrize("count", [1, 31, 1024, 2500])
def test_every_integer_is_coded_as_in_torch(scale: int, count: int) -> None:
    """Up to the ends of int16: escapes in order, and chunks that are stored as they are."""
    codes = (torch.randn(count) * scale).clamp(-(1 << 15), (1 << 15) - 1).to(torch.int16)
    codes[0], codes[-1], codes[count // 2] = -(1 << 15), (1 << 15) - 1, 2047
    measured = _integers.measure(_integers.Row(codes))
    meta, parts = measured.pack(_integers.lengths([measured])[0], "some_")
    expected, parts_expected = integers.write(codes, "blocks", "some_")
    assert meta == expected and parts.keys() == parts_expected.keys()
    assert all(torch.equal(parts[name], part) for name, part in parts_expected.items())
    encoded = Encoded("test", 1, TensorSpec.of(codes), meta, parts)
    assert torch.equal(_integers.read(encoded, meta, torch.zeros_like(codes), "some_"), codes)


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("maps", [Planes(3, 1, 70_000), Planes(5, 3, 100), Planes(2, 40, 32), Planes(9, 7, 5)], ids=str)
def test_residuals_are_summed_as_in_torch(maps: Planes) -> None:
    """Rows that one warp would take long for are left to torch."""
    codes = torch.randint(-2046, 2047, (maps.count, maps.height, maps.width)).to(torch.int16)
    residuals = lorenzo.difference(codes).flatten()
    assert torch.equal(_integers.accumulate(residuals, maps), codes.flatten())


@requires_compiler
def test_samples_are_turned_round_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes, dither and channels of a later slab are its own."""
    monkeypatch.setattr(jpeg_act, "_SLAB", 500)
    for shape in ((5, 3, 9, 10), (5, 31, 4, 5)):
        x = torch.randn(shape).contiguous(memory_format=torch.channels_last)
        check(Case("slabs", "jpeg_act", x), CPU)


def _twin(codec: str, **options: Any) -> Any:
    return REGISTRY.load(codec)(codecs.create(codec, **options))


@requires_compiler
@pytest.mark.parametrize("codec", CODECS)
def test_what_kernels_do_not_reach_is_left_to_the_codec(codec: str) -> None:
    """Payloads of ``rans``; numbers of 64 bits, except bit for bit; a bound along three axes."""
    bound = Bound.absolute(0.05) if codec == "cusz" else None
    x = torch.randn(2, 4, 70, 80)
    by_rans = codecs.create(codec, coder="rans").encode(x, bound)
    assert_same_values(_twin(codec).decode(by_rans), codecs.decode(by_rans), "rans")
    check(Case("float64", codec, x[:1, :1].double(), {}, bound), CPU)
    if codec == "cusz":
        axes = torch.rand(2, 4, 80) + 0.1
        check(Case("three axes", codec, x, {}, Bound(axes.double(), (0, 1, 3))), CPU)


@pytest.mark.parametrize("codec", CODECS)
def test_a_twin_needs_nvrtc_and_the_coder_that_it_has(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvrtc, "available", lambda: True)
    assert _twin(codec).accepts(torch.bfloat16)
    assert not _twin(codec, coder="rans").accepts(torch.bfloat16)
    assert _twin(codec).accepts(torch.float64) == (codec == "lossless")
    monkeypatch.setattr(_nvrtc, "available", lambda: False)
    assert not _twin(codec).accepts(torch.bfloat16)


@requires_compiler
@pytest.mark.parametrize("codec", CODECS)
def test_a_part_of_another_size_is_refused(codec: str) -> None:
    encoded = _twin(codec).encode(torch.randn(2, 4, 20, 20), Bound.absolute(0.05) if codec == "cusz" else None)
    for name in encoded.tensors:
        shorter = {**encoded.tensors, name: encoded.tensors[name][:-1]}
        if encoded.tensors[name].numel():
            with pytest.raises(PayloadError, match="truncated or corrupted"):
                _twin(codec).decode(replace(encoded, tensors=shorter))


@pytest.mark.races
@requires_compiler
@pytest.mark.parametrize("codec", CODECS)
def test_bytes_of_a_payload_may_lie_anywhere(codec: str) -> None:
    """A store may put parts together: only wider numbers are where they can be read at once."""
    twin, x = _twin(codec), torch.randn(2, 5, 20, 21).relu()
    encoded = twin.encode(x, Bound.absolute(0.05) if codec == "cusz" else None)
    moved = {
        name: torch.cat([part.new_zeros(1), part])[1:] if part.dtype == torch.uint8 else part
        for name, part in encoded.tensors.items()
    }
    assert any(part.data_ptr() % 2 for part in moved.values())
    assert_same_values(twin.decode(replace(encoded, tensors=moved)), twin.decode(encoded), codec)


@requires_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_registers_suffice(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels for one generation, the first of each kind for the others."""
    monkeypatch.setenv("LOWTIDE_CACHE_DIR", str(tmp_path / "kept"))
    for module, most, kernels in KERNELS:
        for kernel in kernels if arch == "sm_90" else kernels[:1]:
            cubin, _ = _nvrtc.compile(module.PROGRAM.source, kernel, arch, module.PROGRAM.name)
            used = usage(cubin, tmp_path)
            assert used["STACK"] == used["LOCAL"] == 0 and used["REG"] <= most, f"{kernel}: {used}"
