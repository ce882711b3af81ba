"""What GELU, norms of rows and products have made is made again on a device: exactly, or as closely as sources are.

What a batch norm has read and what ReLU made of its output are one payload there, too."""

from __future__ import annotations

from typing import Any

import fold_cases
import pytest
import torch
from no_waiting import no_waiting
from normalise_cases import check, make_cases
from torch import Tensor, nn

import lowtide
from lowtide.app import zoo
from lowtide.coding import fold
from lowtide.kernels import _fold, _nvrtc
from lowtide.records import Bound

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]


def test_the_kernel_of_norms() -> None:
    for case in make_cases():
        check(case, torch.device("cuda"))


def gradients(
    name: str, batch: int, *, bf16: bool = True, channels_last: bool = False, **options: Any
) -> tuple[list[Tensor], dict[str, str], int]:
    """Of the fourth step on one batch, the codecs of its sites, and the bytes held."""
    torch.manual_seed(0)
    entry = zoo.describe(name)
    building = {option: value for option, value in entry.tiny.items() if option in entry.options}
    model = entry.build(**building).cuda()
    if channels_last:
        model.to(memory_format=torch.channels_last)
    x, y = (item.cuda() for item in entry.example(batch, generator=torch.Generator().manual_seed(1), **entry.tiny))
    tide = lowtide.attach(model, min_size=0, **options) if options else None
    for _ in range(4):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
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


@pytest.mark.parametrize(("name", "op"), [("vit_b_16", "gelu"), ("gpt", "gelu"), ("llama", "mul")])
def test_exact(name: str, op: str) -> None:
    plain, _, _ = gradients(name, 4)
    repeated = distance(gradients(name, 4)[0], plain)
    again, codecs, _ = gradients(name, 4, method="exact", remake=True)
    assert f"again by {op}" in codecs.values()
    assert distance(again, plain) <= 2 * repeated


@pytest.mark.parametrize(
    ("name", "ops"), [("vit_b_16", {"gelu", "layer_norm"}), ("gpt", {"gelu", "layer_norm"}), ("llama", {"silu", "mul"})]
)
def test_stored(name: str, ops: set[str]) -> None:
    bounds = dict.fromkeys(("linear", "norm", "attention", "product", "pointwise"), "0.2 std")
    plain, _, _ = gradients(name, 16)
    usual, _, before = gradients(name, 16, method="fixed", **bounds)
    again, codecs, after = gradients(name, 16, method="fixed", remake=True, **bounds)
    assert {f"again by {op}" for op in ops} <= set(codecs.values())
    assert 0 < distance(again, plain) < 1.7 * distance(usual, plain)
    assert after < 0.75 * before


def test_an_rms_norm_in_one_op() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.RMSNorm(128), nn.Linear(128, 64)).cuda()
    x = torch.randn(512, 64, device="cuda")
    model(x).square().sum().backward()
    plain = [part.grad.clone() for part in model.parameters()]
    tide = lowtide.attach(model, "fixed", min_size=0, remake=True, norm="0.05 std")
    for _ in range(4):
        model.zero_grad()
        model(x).square().sum().backward()
    assert "again by rms_norm" in {entry.codec for entry in tide.ledger.sites.values()}
    tide.detach()
    assert 0 < distance([part.grad for part in model.parameters()], plain) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_kernels_that_fold(dtype: torch.dtype) -> None:
    if not _nvrtc.available():
        pytest.skip("NVRTC, or a device that it compiles for, is missing")
    for case in fold_cases.make_cases(dtype, torch.device("cuda")):
        fold_cases.check(case)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_folding_large_tensors(order: torch.memory_format) -> None:
    """As ResNet-50 has them; without waiting, and by kernels."""
    x = torch.randn(64, 256, 56, 56, device="cuda").to(torch.bfloat16).contiguous(memory_format=order)
    norm, y = fold_cases.make_norm(x, *torch.randn(2, 256, device="cuda"))
    source = Bound(0.5 / norm.inverse_std.double(), (1,))
    made = Bound(torch.tensor(0.2, dtype=torch.float64, device="cuda"))
    expected = fold.table(norm, source, made, x.dtype)
    for function in (_fold.source, _fold.made):  # loaded from now on
        function(_fold.fold(x, y, _fold.table(norm, source, made, x.dtype)), expected, x.dtype)
    with no_waiting():
        table = _fold.table(norm, source, made, x.dtype)
        t = _fold.fold(x, y, table)
        again = _fold.source(t, table, x.dtype), _fold.made(t, table, x.dtype)
    assert torch.equal(table, expected)
    assert torch.equal(t, fold.fold(x, y, table)) and t.stride() == x.stride() == again[0].stride()
    assert torch.equal(again[0], fold.source(t, table, x.dtype)) and torch.equal(again[1], fold.made(t, table, x.dtype))


@pytest.mark.parametrize(("bf16", "channels_last"), [(False, False), (True, False), (True, True)])
def test_pairs(bf16: bool, channels_last: bool) -> None:
    """As close to plain training as apart, for fewer bytes; the mask is in the norm's payload."""
    options: dict[str, Any] = {"bf16": bf16, "channels_last": channels_last}
    bounds = {"linear": "0.3 std", "norm": "0.6 std", "method": "fixed"}
    plain, _, _ = gradients("resnet18", 64, **options)
    usual, _, before = gradients("resnet18", 64, **options, **bounds)
    joint, codecs, after = gradients("resnet18", 64, **options, remake=True, check=True, **bounds)
    assert codecs["layer1.0.relu:relu.result"] == "in sz" == codecs["relu:relu.result"]
    assert 0 < distance(joint, plain) < 1.2 * distance(usual, plain)
    assert after < 0.9 * before


def test_steps_with_pairs_do_not_wait() -> None:
    """After warm-up, under the default method."""
    torch.manual_seed(0)
    blocks = [nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    stem = [nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(*stem, *blocks, nn.Conv2d(64, 8, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tide = lowtide.attach(model, optimizer=optimizer)
    x = torch.randn(32, 3, 32, 32, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(40):
        step()
    tide._pipeline.finish()
    with no_waiting():
        for _ in range(3):
            step()
    assert tide.ledger.sites["2:relu.result"].codec == "in sz"
    tide.detach()
    torch.cuda.synchronize()
    assert tide.ledger.held == 0
