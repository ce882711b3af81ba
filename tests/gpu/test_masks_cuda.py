"""The twins of ``bitmask`` and ``window_index`` on a device: their codecs' bytes there, and no wait for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mask_cases import FLOATS, POOLS, check, make_mask_cases, make_truth_cases, make_window_cases, window_of
from no_waiting import no_waiting
from same_payload import assert_same_values

from lowtide import codecs, kernels

pytestmark = pytest.mark.gpu
SECOND = 1_500_000_000  # of cycles, about


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_of_floats(dtype: str) -> None:
    """On the device the codec itself rounds thresholds as the device's ops do; its twin follows it."""
    for case in make_mask_cases(FLOATS[dtype]):
        check(case, torch.device("cuda"))


def test_masks_of_booleans() -> None:
    for case in make_truth_cases():
        check(case, torch.device("cuda"))


def test_indices() -> None:
    for case in make_window_cases():
        check(case, torch.device("cuda"))


def test_large_masks() -> None:
    x = torch.randn(64, 64, 56, 56, device="cuda").to(memory_format=torch.channels_last)
    codec = codecs.create("bitmask", test="not_le", params=(0.0,))
    for dtype in FLOATS.values():
        twin = kernels.twin(codec, x.device, dtype)
        values = x.to(dtype)
        assert_same_values(twin.decode(twin.encode(values)), (values > 0).to(dtype), str(dtype))


@pytest.mark.parametrize("channels_last", [False, True])
def test_indices_that_the_device_chose(channels_last: bool) -> None:
    kernel, stride, padding, dilation, _, _, _, bits = POOLS[3]
    x = torch.randn(16, 64, 112, 112, device="cuda")
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    indices = F.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)[1]
    codec = codecs.create("window_index", **{**window_of(POOLS[3]), "plane": (112, 112)})
    twin = kernels.twin(codec, x.device, indices.dtype)
    encoded = twin.encode(indices)
    assert encoded.nbytes == indices.numel() * bits // 8
    assert_same_values(twin.decode(encoded), indices, "indices")


def _codings() -> list[tuple[str, Any]]:
    indices = torch.arange(0, 128, 2, device="cuda").repeat(2, 16, 1)
    rows = {"kernel": (2,), "stride": (2,), "padding": (0,), "dilation": (1,), "plane": (128,)}
    picture = torch.randn(4, 24, 31, 29, device="cuda").to(memory_format=torch.channels_last)
    return [
        ("bitmask", (picture, {"test": "not_le", "params": (0.0,)})),
        ("bitmask", (picture.bfloat16(), {"test": "gt", "params": (0.1,), "values": (-1.0, 1.0)})),
        ("bitmask", (picture > 0, {})),
        ("window_index", (indices, rows)),
        ("window_index", (indices, {})),
        ("window_index", (indices[:, :0], rows)),
    ]


def test_nothing_waits_for_the_device() -> None:
    for name, (x, options) in _codings():
        twin: Any = kernels.twin(codecs.create(name, **options), x.device, x.dtype)
        ticket = torch.full((1,), -1, pin_memory=True)
        twin.decode(twin.encode(x, ticket=ticket))  # compiles
        with no_waiting():
            decoded = twin.decode(twin.encode(x, ticket=ticket))
        assert decoded.shape == x.shape
        assert int(ticket) == (0 if twin.ticketed else -1)


def test_a_ticket_is_written_after_the_work_and_not_before() -> None:
    """The host is done while the device still sleeps; what it then reads is the number of misfits."""
    indices = torch.arange(0, 4096, 2, device="cuda").view(1, 1, 2048)
    options = {"kernel": (2,), "stride": (2,), "padding": (0,), "dilation": (1,), "plane": (4096,)}
    twin: Any = kernels.twin(codecs.create("window_index", **options), indices.device, indices.dtype)
    strange = indices.clone()
    strange[0, 0, 5:8] += 2
    for x, misfits in ((indices, 0), (strange, 3)):
        ticket = torch.full((1,), -1, pin_memory=True)
        twin.encode(x, ticket=ticket)  # compiles
        torch.cuda.synchronize()
        ticket.fill_(-1)
        torch.cuda._sleep(SECOND)
        provisional = twin.encode(x, ticket=ticket)
        assert int(ticket) == -1, "the host waited for the device"
        torch.cuda.synchronize()
        assert int(ticket) == misfits
        final = twin.settle(provisional, x, misfits)
        assert_same_values(twin.decode(final), x, f"{misfits} misfits")
        assert (final is provisional) == (misfits == 0)
        assert ("codes" in final.tensors) == (misfits == 0)
