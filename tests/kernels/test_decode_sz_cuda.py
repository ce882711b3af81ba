"""What the decoder of ``rans`` has of its own: channels that are read a round at a time, windows, chunks in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from same_payload import assert_same_values
from simt import requires_compiler
from test_kernel_sz_cuda import FIXED, INNER, RUNS, TENSOR, Instance, emulated

from lowtide.kernels import _sz_cuda, _sz_jobs
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound, Encoded

pytestmark = requires_compiler


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> Any:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    return emulate(_sz_cuda, emulated)


def channels_with_centres(dtype: torch.dtype, channels: int, *, seed: int = 0) -> tuple[torch.Tensor, Bound]:
    """Chunks of rows that begin at any channel: means from less than -4 to more than 4 steps, steps of all sizes."""
    random = torch.Generator().manual_seed(seed)
    size = 0.05 + torch.rand(channels, generator=random, dtype=torch.float64)
    mean = 2 * size * torch.randint(-6, 7, (channels,), generator=random)
    rows = -(-3 * 96 * 128 // channels) + 5
    x = torch.randn(rows, channels, generator=random, dtype=torch.float64) * size + mean
    return x.to(dtype), Bound(size, (1,))


@pytest.mark.parametrize("values", [1, 2, 3, 4])
@pytest.mark.parametrize("channels", [132, 256, 512])
def test_centres_that_are_added_to_digits(channels: int, values: int) -> None:
    dtype = torch.float16 if channels == 512 else torch.bfloat16
    instance = Instance(dtype, INNER, "rans", values=values, zeros=channels == 132)
    x, bound = channels_with_centres(dtype, channels)
    plan = instance.plan(x, bound)
    assert plan.grid.centre is not None and plan.grid.centre.min() == -4 and plan.grid.centre.max() == 4
    payload = instance.codec.encode(x, seed=5, plan=plan)
    where = _sz_jobs.entry_of(payload.spec, (1,))
    assert where is not None and where.kind == INNER
    assert_same_values(SzCuda(instance.codec).decode(payload), instance.codec.decode(payload), f"{channels} channels")


@pytest.mark.parametrize("rounding", ["dither", "nearest"])
@pytest.mark.parametrize("kind", [TENSOR, RUNS, INNER, FIXED])
def test_one_multiply_add_rounds_as_a_product_does(kind: int, rounding: str) -> None:
    """Two values a symbol, in float32, where centres lie up to 256 steps away."""
    instance = Instance(torch.float32, kind, "rans", rounding, values=2)
    channels = 128 if kind == FIXED else 132
    x, bound = channels_with_centres(torch.float32, channels)
    x += 100 * torch.randint(-2, 3, (channels,))
    if kind == RUNS:
        x = x.t().contiguous()
        bound = Bound(bound.value, (0,))
    plan = instance.plan(x, Bound.absolute(0.3) if kind == TENSOR else bound)
    payload = instance.codec.encode(x, seed=6, plan=plan)
    assert_same_values(SzCuda(instance.codec).decode(payload), instance.codec.decode(payload), rounding)


@pytest.mark.parametrize("values", [1, 3])
def test_a_stream_that_is_not_one_does_no_harm(values: int) -> None:
    """Words that nobody wrote: more is taken than there is, and what comes back is anything."""
    instance = Instance(torch.bfloat16, TENSOR, "rans", values=values)
    x = torch.randn(40_000, generator=torch.Generator().manual_seed(1)).bfloat16()
    payload = instance.codec.encode(x, seed=7, plan=instance.plan(x, Bound.absolute(0.3)))
    for word in (0, -1):
        words = torch.full_like(payload.tensors["words"], word)
        broken: Encoded = replace(payload, tensors={**payload.tensors, "words": words})
        assert SzCuda(instance.codec).decode(broken).shape == x.shape


@pytest.mark.parametrize(
    ("blocks", "launched"), [(1, 1), (132, 132), (133, 264), (196, 264), (392, 396), (784, 660), (3136, 660)]
)
def test_blocks_that_are_launched(blocks: int, launched: int) -> None:
    assert _sz_cuda._spread(blocks, 132, 5) == launched


@pytest.mark.parametrize("processors", [1, 3])
def test_every_chunk_is_decoded_whatever_the_grid(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: processors)
    monkeypatch.setattr(_sz_cuda, "_spread", lambda blocks, processors, resident: processors)
    instance = Instance(torch.bfloat16, TENSOR, "rans", values=3)
    x = torch.randn(60 * 48 * 128 + 11, generator=torch.Generator().manual_seed(2)).bfloat16()
    payload = instance.codec.encode(x, seed=8, plan=instance.plan(x, Bound.absolute(0.5)))
    assert_same_values(SzCuda(instance.codec).decode(payload), instance.codec.decode(payload), f"{processors} blocks")
