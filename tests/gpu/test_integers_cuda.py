"""The twins of ``cusz``, ``jpeg_act`` and ``lossless`` on a device: the bytes of the codec there and on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from integer_cases import CODECS, DTYPES, OTHERS, Case, check, make_cases
from no_waiting import no_waiting
from torch import Tensor

from lowtide import codecs, kernels
from lowtide.kernels import _nvrtc
from lowtide.records import Bound

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    if not _nvrtc.available():
        pytest.skip("NVRTC, or a device that it compiles for, is missing")


def bound_for(codec: str) -> Bound | None:
    return Bound.absolute(0.2) if codec == "cusz" else None


def twin_of(codec: str, x: Tensor, **options: Any) -> Any:
    plain = codecs.create(codec, **options)
    twin = kernels.twin(plain, x.device, x.dtype)
    assert twin is not plain
    return twin


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_equals_codec_here_and_on_the_cpu(codec: str, dtype: str) -> None:
    assert torch.empty(1 << 20, device=CUDA).isnan().all(), "memory is not poisoned: unwritten elements would not show"
    cases = list(make_cases(codec, DTYPES[dtype]))
    assert len(cases) >= 20
    for case in cases:
        check(case, CUDA, against_cpu=True)


@pytest.mark.parametrize("dtype", OTHERS)
def test_lossless_of_other_sizes(dtype: str) -> None:
    for case in make_cases("lossless", OTHERS[dtype]):
        check(case, CUDA, against_cpu=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_fresh_random_maps(codec: str, dtype: str, layout: str) -> None:
    """As a convolutional net has them; other values in every run: the seed is in the name of the case."""
    seed = torch.seed() % (1 << 31)
    random = torch.Generator().manual_seed(seed)
    for shape in ((8, 64, 56, 56), (16, 256, 14, 14), (16, 512, 7, 7), (4, 16, 112, 112), (64, 1000)):
        x = torch.randn(shape, generator=random).relu().to(DTYPES[dtype])
        x = x.contiguous(memory_format=LAYOUTS[layout]) if x.dim() == 4 else x
        check(Case(f"random, seed {seed}", codec, x, {}, bound_for(codec), seed), CUDA, against_cpu=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_no_decoder_waits_for_the_device(codec: str, layout: str) -> None:
    x = torch.randn(8, 24, 31, 29, device=CUDA).relu().contiguous(memory_format=LAYOUTS[layout])
    x[0, 0, 0, 0] = torch.nan
    twin = twin_of(codec, x)
    payload = twin.encode(x, bound_for(codec))
    expected = twin.decode(payload)  # compiles
    with no_waiting():
        decoded = twin.decode(payload)
    assert decoded.stride() == x.stride()
    assert torch.equal(decoded.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_room_that_coding_takes(codec: str, layout: str) -> None:
    """Beside the tensor and its payload: integers of two bytes, in the order of planes and in that of memory, and a
    byte for each value where some have no code."""
    x = (
        torch.randn(32, 64, 112, 112, device=CUDA, dtype=torch.bfloat16)
        .relu_()
        .contiguous(memory_format=LAYOUTS[layout])
    )
    twin = twin_of(codec, x)
    twin.decode(twin.encode(x, bound_for(codec)))  # tables and kernels
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    payload = twin.encode(x, bound_for(codec))
    assert torch.cuda.max_memory_allocated() - before <= payload.nbytes + 2.75 * x.nbytes
    assert torch.cuda.memory_allocated() - before <= payload.nbytes + (1 << 16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoded = twin.decode(payload)
    assert torch.cuda.max_memory_allocated() - before <= decoded.nbytes + 2.25 * x.nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_a_stream_of_ones_own(codec: str) -> None:
    """Kernels run on the stream that is current where they are launched."""
    x = torch.randn(4, 16, 28, 28, device=CUDA)
    twin = twin_of(codec, x)
    expected = twin.decode(twin.encode(x, bound_for(codec)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = x * 1
        decoded = twin.decode(twin.encode(late, bound_for(codec)))
    stream.synchronize()
    assert torch.equal(decoded, expected)
