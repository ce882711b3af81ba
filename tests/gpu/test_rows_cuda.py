"""The kernel that measures rows, on a device: what torch gives there, no waiting, and a site that uses it."""

from __future__ import annotations

import pytest
import torch
from no_waiting import no_waiting
from row_cases import ROW, SAMPLE_CHANNEL, STD, Rows, check_rows, make_rows
from same_payload import assert_same_values

from lowtide.codecs.sz import Sz
from lowtide.kernels import _nvrtc
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Site
from lowtide.sites import Sites

pytestmark = pytest.mark.gpu
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _needs_nvrtc() -> None:
    if not _nvrtc.available():
        pytest.skip("NVRTC, or a device that it compiles for, is missing")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_measured_as_torch_does(dtype: str) -> None:
    for rounding in ("dither", "nearest"):
        for rows in make_rows(DTYPES[dtype]):
            check_rows(rows, SzCuda(Sz(rounding=rounding)).measure, rounding, CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_and_long_rows(dtype: str) -> None:
    """As a language model, a picture model's group norm, and a norm over whole pictures have them."""
    for shape, need in (
        ((8, 1024, 768), ROW),
        ((16, 64, 56, 56), SAMPLE_CHANNEL),
        ((70_000, 64), ROW),
        ((3, 3_000_001), ROW),
    ):
        x = (torch.randn(shape, device=CUDA) * 3 + 1).to(DTYPES[dtype])
        check_rows(Rows(str(shape), x, need), SzCuda(Sz()).measure, "dither", CUDA)


def test_a_site_measures_and_codes_without_waiting() -> None:
    """Held back by a sleeping kernel; what is coded keeps the bound, and is what the codec makes of the same grid."""
    twin, sites, site = SzCuda.of(Sz()), Sites(refresh=1 << 20), Site("norm", "layer_norm", "input")
    tensors = [torch.randn(64, 197, 768, device=CUDA).to(torch.bfloat16) * (1 + n) for n in range(3)]
    for x in tensors[:2]:  # surveyed, fitted and compiled by now
        memo = sites.recall(x, STD, site, ROW)
        sites.prepare(memo, x, twin, site, ROW)
        twin.decode(twin.encode(x, plan=memo.plan))
    x, ticket = tensors[2], torch.full((1,), -1, dtype=torch.int64).pin_memory()
    torch.cuda.synchronize()
    with no_waiting():
        torch.cuda._sleep(200_000_000)
        memo = sites.recall(x, STD, site, ROW)
        sites.prepare(memo, x, twin, site, ROW)
        encoded = twin.encode(x, seed=3, plan=memo.plan, ticket=ticket)
        decoded = twin.decode(encoded)
        assert int(ticket) == -1, "something waited"
    torch.cuda.synchronize()
    assert_same_values(decoded, twin.codec.decode(twin.codec.encode(x, seed=3, plan=memo.plan)), "values")
    error = (decoded.double() - x.double()).abs()
    assert bool((error <= memo.bound.value.unsqueeze(-1)).all())
