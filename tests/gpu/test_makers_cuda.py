"""What GELU and layer norms have made is made again on a device: exactly, or as closely as its source was stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from normalise_cases import check, make_cases
from torch import Tensor

import lowtide
from lowtide.app import zoo

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]


def test_the_kernel_of_norms() -> None:
    for case in make_cases():
        check(case, torch.device("cuda"))


def gradients(name: str, batch: int, **options: Any) -> tuple[list[Tensor], dict[str, str], int]:
    """Of the fourth step on one batch, the codecs of its sites, and the bytes held."""
    torch.manual_seed(0)
    entry = zoo.describe(name)
    building = {option: value for option, value in entry.tiny.items() if option in entry.options}
    model = entry.build(**building).cuda()
    x, y = (item.cuda() for item in entry.example(batch, generator=torch.Generator().manual_seed(1), **entry.tiny))
    tide = lowtide.attach(model, min_size=0, **options) if options else None
    for _ in range(4):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = entry.loss(model(x), y)
        loss.backward()
        if tide is not None:
            tide.step()
    found = {} if tide is None else {site: item.codec for site, item in tide.ledger.sites.items()}
    held = 0 if tide is None else tide.ledger.held_peak
    return [parameter.grad.clone() for parameter in model.parameters()], found, held


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    error = sum(float((a - b).double().square().sum()) for a, b in zip(got, expected, strict=True))
    return float((error / sum(float(b.double().square().sum()) for b in expected)) ** 0.5)


@pytest.mark.parametrize("name", ["vit_b_16", "gpt"])
def test_exact(name: str) -> None:
    plain, _, _ = gradients(name, 4)
    repeated = distance(gradients(name, 4)[0], plain)
    again, codecs, _ = gradients(name, 4, method="exact", remake=True)
    assert "again by gelu" in codecs.values()
    assert distance(again, plain) <= 2 * repeated


@pytest.mark.parametrize("name", ["vit_b_16", "gpt"])
def test_stored(name: str) -> None:
    bounds = dict.fromkeys(("linear", "norm", "attention", "product", "pointwise"), "0.2 std")
    plain, _, _ = gradients(name, 16)
    usual, _, before = gradients(name, 16, method="fixed", **bounds)
    again, codecs, after = gradients(name, 16, method="fixed", remake=True, **bounds)
    assert {"again by gelu", "again by layer_norm"} <= set(codecs.values())
    assert 0 < distance(again, plain) < 1.7 * distance(usual, plain)
    assert after < 0.75 * before
