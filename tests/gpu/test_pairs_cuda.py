"""Pairs that kernels fold and unfold while they code, on a device: the values of the way by way of a folded tensor, and
steps of a net whose pairs are never folded in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from no_waiting import no_waiting
from pair_cases import CASES, DTYPES, check, make_pair, plan_for
from torch import Tensor, nn

import lowtide
from lowtide.kernels import _sz_cuda, _sz_functions
from lowtide.kernels._sz_cuda import SzCuda

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("place", "dtype", "values"), CASES)
def test_both_ways(place: str, dtype: str, values: int) -> None:
    pair = make_pair(place, DTYPES[dtype], CUDA, odd=True)
    check(pair, plan_for(pair.folded().nan_to_num(2.0).clamp(-9, 9), values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_that_are_raw(dtype: str) -> None:
    pair = make_pair("inner", DTYPES[dtype], CUDA)
    plan = plan_for(pair.folded(), 3)
    pair.source.mul_(300)
    assert (check(pair, plan).tensors["heads"][1::3] < 0).any()


def make_net(last: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in ((16, 64), (64, 64), (64, 192)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model, x = nn.Sequential(*layers, nn.Conv2d(192, 8, 1)).cuda(), torch.randn(16, 16, 32, 32, device="cuda")
    if last:
        model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    return model, x


def gradients(model: nn.Module, x: Tensor, bf16: bool) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
        y = model(x * 1.0)
    (y.float() - 1).square().sum().backward()
    return [part.grad.clone() for part in model.parameters() if part.grad is not None]


def train(last: bool, bf16: bool) -> list[Tensor]:
    """Gradients of step 12; then a step in which nothing may wait."""
    model, x = make_net(last)
    session = lowtide.attach(model, "fixed", remake=True, linear="1.0 std", norm="1.0 std", min_size=0)
    for _ in range(12):
        found = gradients(model, x, bf16)
        session.step()
    with no_waiting():
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            y = model(x * 1.0)
        y.float().square().sum().backward()
    session.detach()
    return found


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "last"])
def test_steps_are_those_of_pairs_that_are_folded_first(
    last: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored depends on the bound and the seed alone, so gradients are equal, bit for bit."""
    launched: Counter[str] = Counter()
    function = _sz_cuda._function

    def watched(kernel: str, *given: Any, **options: Any) -> Any:
        launched[options.get("give", kernel)] += 1
        return function(kernel, *given, **options)

    monkeypatch.setattr(_sz_cuda, "_function", watched)
    found = train(last, bf16)
    assert launched[_sz_functions.MADE] and launched[_sz_functions.SOURCE_AND_GATED]
    for method in ("folding", "unfold"):
        monkeypatch.delattr(SzCuda, method)
    launched.clear()
    expected = train(last, bf16)
    assert launched and not launched[_sz_functions.MADE]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
