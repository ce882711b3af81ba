"""Ops that only a device has: their saves are named, and found to be needed as the table of needs says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lowtide
from lowtide.policies.rules import Policy
from lowtide.records import Kind

pytestmark = pytest.mark.gpu

EXACT, MASK, METADATA, WINDOW = ("exact",), ("mask",), ("metadata",), ("window",)
LINEAR, ATTENTION = ("values", "linear", "tensor", ()), ("values", "attention", "tensor", ())
CHANNEL, ROW = ("values", "norm", "channel", (1,)), ("values", "norm", "row", (0, 1))
HEADS = dict.fromkeys(("query", "key", "value", "output"), ATTENTION)


class Applied(nn.Module):
    """A function of an activation: the input times a parameter, so that it is no input of the model."""

    def __init__(self, function: Callable[..., Tensor], *children: nn.Module) -> None:
        super().__init__()
        self._function = function
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = nn.ModuleList(children)

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x * self.scale.to(x.dtype), *self.inner)


def find_needs(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> dict[tuple[str, str], tuple[Any, ...]]:
    """What each save was found to be needed for, by op and field; the backward runs under a checked bound."""
    seen: dict[tuple[str, str], tuple[Any, ...]] = {}
    decide = Policy.decide

    def note(self, site, need, spec):
        values = (need.family, need.per.value, need.axes(len(spec.shape))) if need.kind is Kind.VALUES else ()
        seen[site.op, site.field] = (need.kind.value, *values)
        return decide(self, site, need, spec)

    monkeypatch.setattr(Policy, "decide", note)
    session = lowtide.attach(model, "fixed", check=True, min_size=0)
    model(x).float().square().mean().backward()
    session.detach()
    assert session.ledger.held == 0
    return seen


def _attend(backend: SDPBackend) -> Callable[[Tensor], Tensor]:
    def attend(h: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(h, h + 1, h * 2, is_causal=True)

    return attend


def _skip_unless_it_runs(model: nn.Module, x: Tensor) -> None:
    try:
        model(x)
    except RuntimeError as error:
        pytest.skip(f"this device or build does not have it: {error}")


def _last(h: Tensor, module: nn.Module) -> Tensor:
    return module(h)[0]


IMAGE, HEAD_SHAPE, SEQUENCE = (4, 16, 8, 8), (2, 4, 128, 64), (6, 4, 32)
# Name: function, its modules, shape and dtype of the input, the op, what must be found of it.
CASES: dict[str, tuple[Callable[..., Tensor], list[Callable[[], nn.Module]], Any, torch.dtype, str, dict[str, Any]]] = {
    "batch norm": (lambda h, norm: norm(h), [lambda: nn.BatchNorm2d(16)], IMAGE, torch.float32,
                   "cudnn_batch_norm", {"input": CHANNEL}),
    "dropout": (lambda h: F.dropout(h, 0.5, training=True), [], IMAGE, torch.float32,
                "native_dropout", {"result1": MASK}),
    "rms norm": (lambda h: F.rms_norm(h, (32,)), [], SEQUENCE, torch.float32,
                 "fused_rms_norm", {"input": ROW}),
    "flash attention": (_attend(SDPBackend.FLASH_ATTENTION), [], HEAD_SHAPE, torch.bfloat16,
                        "scaled_dot_product_flash_attention", {**HEADS, "logsumexp": EXACT}),
    "efficient attention": (_attend(SDPBackend.EFFICIENT_ATTENTION), [], HEAD_SHAPE, torch.float32,
                            "scaled_dot_product_efficient_attention", {**HEADS, "log_sumexp": EXACT}),
    "cudnn attention": (_attend(SDPBackend.CUDNN_ATTENTION), [], HEAD_SHAPE, torch.bfloat16,
                        "scaled_dot_product_cudnn_attention", {**HEADS, "logsumexp": EXACT}),
    "lstm": (_last, [lambda: nn.LSTM(32, 16, num_layers=2)], SEQUENCE, torch.float32,
             "cudnn_rnn", {"input": EXACT, "result0": EXACT}),
    "convolution": (lambda h, conv: conv(h), [lambda: nn.Conv2d(16, 8, 3)], IMAGE, torch.float32,
                    "convolution", {"input": LINEAR}),
    "max pool": (lambda h: F.max_pool2d(h, 2), [], IMAGE, torch.float32,
                 "max_pool2d_with_indices", {"self": METADATA, "result1": WINDOW}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.filterwarnings("ignore:this forward saved tensors:lowtide.LowtideWarning")
@pytest.mark.parametrize("name", CASES)
def test_ops_of_the_device_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, modules, shape, dtype, op, expected = CASES[name]
    model = Applied(function, *(make() for make in modules)).cuda()
    x = torch.randn(shape, device="cuda").to(dtype)
    if name == "cudnn attention":
        _skip_unless_it_runs(model, x)
    seen = find_needs(monkeypatch, model, x)
    of_op = {field: need for (owner, field), need in seen.items() if owner == op}
    assert of_op, f"{op} saved nothing; saved were {sorted(seen)}"
    assert {field: of_op.get(field) for field in expected} == expected, of_op
    others = {field: need for field, need in of_op.items() if field not in expected}
    assert all(need in (EXACT, MASK) for need in others.values()), f"lossy, and not expected to be: {others}"


@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
def test_bf16_norms_and_dropout_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast a norm in bf16 may run on another kernel; whichever it is, it is in the table."""
    model = Applied(
        lambda h, conv, norm: F.dropout(norm(conv(h)).relu(), 0.5), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16)
    ).cuda()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(IMAGE, device="cuda").contiguous(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        seen = find_needs(monkeypatch, model, x)
    norms = {op: need for (op, field), need in seen.items() if "batch_norm" in op and field == "input"}
    assert norms and all(need == CHANNEL for need in norms.values()), seen
    assert seen["native_dropout", "result1"] == MASK
    assert seen["relu", "result"] == MASK
