"""What the encoder of ``rans`` has of its own: digits counted into places and counted again, chunks in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from simt import requires_compiler
from test_kernel_sz_cuda import FIXED, INNER, RUNS, TENSOR, Instance, check, emulated, explicit

from lowtide.codecs.sz import Sz
from lowtide.kernels import _sz_cuda, _sz_jobs
from lowtide.kernels._sz_cuda import SzCuda
from lowtide.records import Bound

pytestmark = requires_compiler


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch, emulate: Callable[..., Any]) -> Any:
    monkeypatch.setattr(_sz_cuda, "_processors", lambda device: 1)
    return emulate(_sz_cuda, emulated)


def rare(x: torch.Tensor, *, seed: int) -> torch.Tensor:
    """Some values of every kind that has no digit, side by side with values that have one."""
    random = torch.Generator().manual_seed(seed)
    kinds = torch.tensor([-0.0, 1e-30, 3.0, -3.0, 9.0, -9.0, 900.0, -900.0, 3e38, torch.nan, torch.inf])
    at = torch.randperm(x.numel(), generator=random)[: x.numel() // 300]
    x.view(-1)[at] = kinds[torch.randint(0, len(kinds), at.shape, generator=random)].to(x.dtype)
    return x


@pytest.mark.parametrize(
    "instance",
    [
        Instance(torch.bfloat16, TENSOR, "rans", zeros=True, values=3),
        Instance(torch.float16, TENSOR, "rans", "nearest", zeros=True, values=4),
        Instance(torch.float32, TENSOR, "rans", zeros=True, values=2),
        Instance(torch.float32, RUNS, "rans", values=3),
        Instance(torch.bfloat16, INNER, "rans", values=3),
        Instance(torch.bfloat16, INNER, "rans", zeros=True, values=2),
        Instance(torch.bfloat16, FIXED, "rans", values=3),
        Instance(torch.bfloat16, FIXED, "rans", values=1),
    ],
    ids=str,
)
def test_escapes_are_those_of_the_codec(instance: Instance) -> None:
    """A digit that is counted wrong, or not taken back, would be another symbol: of this value or of a neighbour."""
    kind, channels = instance.kind, 128 if instance.kind == FIXED else 132
    x = torch.randn(300, channels, generator=torch.Generator().manual_seed(3))
    if instance.zeros:
        x = x.relu()
    x = x.to(instance.dtype)
    if kind == RUNS:
        x = x.t().contiguous()
    size = {1: 0.1, 2: 0.4, 3: 0.7, 4: 1.0}[instance.values]
    step = size * (1 + torch.rand(channels, generator=torch.Generator().manual_seed(9), dtype=torch.float64) / 4)
    plan = instance.plan(x, Bound.absolute(size) if kind == TENSOR else Bound(step, (0,) if kind == RUNS else (1,)))
    x = rare(x, seed=5)
    got = check(x, instance.codec, plan, masked=instance.zeros)
    expected = instance.codec.encode(x, seed=3, plan=plan)
    heads, plain = got.tensors["heads"].view(-1, 3), expected.tensors["heads"].view(-1, 3)
    coded = (heads[:, 1] >= 0) & (plain[:, 1] >= 0)
    coded[-1] = False  # what is past the end has any digit
    assert coded.any() and (plain[coded, 2] > 0).any()
    assert torch.equal(heads[coded, 1:], plain[coded, 1:]), "streams and escapes"


@pytest.mark.parametrize("blocks", [1, 3])
def test_every_chunk_is_encoded_whatever_the_grid(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks in turns, of which some are raw, some outgrow their stage, and the last one is short; then once more."""
    monkeypatch.setattr(_sz_cuda, "_spread", lambda wanted, processors, resident: blocks)
    codec = Sz(coder="rans")
    random = torch.Generator().manual_seed(4)
    x = torch.randn(60 * 12 * 128 + 11, generator=random).bfloat16()
    x[12 * 128 * 20 : 12 * 128 * 22] *= 1000
    x[12 * 128 * 40 : 12 * 128 * 45] *= 4
    plan = codec.plan(x, Bound.absolute(0.5))
    model = explicit(3, low=-3, bits_a_value=0.5)
    plan = replace(plan, model=model)
    for seed in range(2):
        payload = check(x, codec, plan, seed=seed)
        lengths = payload.tensors["heads"][1::3]
        assert lengths.numel() == 61 and (lengths < 0).any()
        assert (lengths > _sz_jobs.stage_of(model) - 128).any(), "the stage has room for all"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_have_their_digit_where_a_step_is_zero(dtype: torch.dtype) -> None:
    """Zero times the inverse of such a step is no number."""
    instance = Instance(dtype, TENSOR, "rans", zeros=True, values=3)
    random = torch.Generator().manual_seed(6)
    x = torch.randn(20_000, generator=random).relu().to(dtype)
    plan = instance.plan(x, Bound.absolute(0.7))
    x[torch.rand(20_000, generator=random) < 0.99] = 0
    exact = replace(plan, grid=instance.codec.grid(x, Bound(torch.zeros((), dtype=torch.float64), ())))
    payload = check(x, instance.codec, exact, masked=True)
    assert (payload.tensors["heads"][1::3] >= 0).all() and torch.equal(SzCuda(instance.codec).decode(payload), x)
