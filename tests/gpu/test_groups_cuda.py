"""The twin of ``groups`` on a device: the bytes of the codec there and on the CPU, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from group_cases import BITS, DTYPES, Case, check, make_cases
from no_waiting import no_waiting
from same_payload import assert_same_payload, assert_same_values

from lowtide import codecs, kernels

pytestmark = pytest.mark.gpu
GIB_FOR_LARGE = 30


@pytest.mark.parametrize("dtype", DTYPES)
def test_twin_equals_codec_here_and_on_the_cpu(dtype: str) -> None:
    """Every size of a group is a kernel to compile: for one dtype only."""
    assert torch.empty(1 << 20, device="cuda").isnan().all(), (
        "memory is not poisoned: unwritten elements would not show"
    )
    cases = [case for case in make_cases(DTYPES[dtype]) if dtype == "fp32" or case.name != "other groups"]
    assert len(cases) >= 15
    for case in cases:
        check(case, torch.device("cuda"), against_cpu=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_random_tensors(dtype: str) -> None:
    """Different values in every run: the seed is in the name of the case, which a failure shows."""
    seed = torch.seed() % (1 << 31)
    random = torch.Generator().manual_seed(seed)
    for bits, size, scale in zip(BITS, (1 << 20, 999_999, 12_345, 3_000_001), (1.0, 30.0, 1e-3, 0.1), strict=True):
        x = (torch.randn(size, generator=random) * scale).to(DTYPES[dtype])
        check(Case(f"random, seed {seed}", x, bits, seed=seed), torch.device("cuda"), against_cpu=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels_last"])
def test_nothing_waits_for_the_device(dtype: str, layout: torch.memory_format) -> None:
    x = torch.randn(4, 24, 31, 29, device="cuda").to(DTYPES[dtype]).contiguous(memory_format=layout)
    x[0, 0, 0, 0] = torch.nan
    twin = kernels.twin(codecs.create("groups"), x.device, x.dtype)
    twin.decode(twin.encode(x))  # compiles
    with no_waiting():
        decoded = twin.decode(twin.encode(x, seed=3))
    assert decoded.stride() == x.stride()


def test_more_elements_than_an_int32_counts() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < GIB_FOR_LARGE << 30:
        pytest.skip(f"needs {GIB_FOR_LARGE} GiB of free memory, there are {free >> 30}")
    torch.use_deterministic_algorithms(False)  # filling memory takes longer than the test
    count = (1 << 31) + 1025
    x = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    for part in x.split(1 << 28):
        part.normal_()
    codec = codecs.create("groups")
    twin = kernels.twin(codec, x.device, x.dtype)
    payload = twin.encode(x, seed=3)
    assert_same_payload(payload, codec.encode(x, seed=3), f"{count} values")
    assert_same_values(twin.decode(payload), codec.decode(payload), f"{count} values")
