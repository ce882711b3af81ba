"""Ops that only a device has, with CPU kernels in plain torch: three kinds of attention, batch norm and RMS norm.

Their nodes in the graph, the fields of these and their order are torch's own, so that all that looks at them can be
tested anywhere. Attention's backward reads what a device's kernels read: queries, keys, values, the output and the
logarithms of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor, Tensor]


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query @ key.mT * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if bias is not None:
        scores = scores + bias
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf) if causal else scores


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, bias, causal, scale)
    sums = scores.logsumexp(-1)
    out = torch.exp(scores - sums[..., None]) @ value
    order = sorted(range(4), key=lambda axis: -query.stride(axis))  # it lies in memory as queries do
    return out.permute(order).contiguous().permute([order.index(axis) for axis in range(4)]), sums


def _go_back(
    gy: Tensor, saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], bias: Tensor | None, causal: bool,
    scale: float | None,
) -> Gradients:  # fmt: skip
    query, key, value, out, sums = saved
    chances = torch.exp(_scores(query, key, bias, causal, scale) - sums[..., None])
    slope = chances * (gy @ value.mT - (gy * out).sum(-1, keepdim=True))
    slope = slope * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    return slope @ key, slope.mT @ query, chances.mT @ gy


def _state() -> Tensor:
    """Of the generator of dropout, of which there is none here."""
    return torch.zeros((), dtype=torch.int64)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, causal: bool = False, debug: bool = False, *,
    scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    return _cudnn(query, key, value, None, True, dropout, causal, debug, scale=scale)


def _flash_backward(
    gy: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, cum_q: Tensor, cum_k: Tensor,
    max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None = None,
) -> Gradients:  # fmt: skip
    return _go_back(gy, (query, key, value, out, sums), None, causal, scale)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
    causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return *_attend(query, key, value, bias, causal, scale), _state(), _state()


def _efficient_backward(
    gy: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, out: Tensor, sums: Tensor, seed: Tensor,
    offset: Tensor, dropout: float, wanted: list[bool], causal: bool = False, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    return *_go_back(gy, (query, key, value, out, sums), bias, causal, scale), torch.empty(0)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sums: bool, dropout: float = 0.0,
    causal: bool = False, debug: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    out, found = _attend(query, key, value, bias, causal, scale)
    nothing = torch.empty(0)
    return out, found, nothing, nothing, query.shape[2], key.shape[2], _state(), _state(), torch.empty(0)


def _cudnn_backward(
    gy: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, seed: Tensor, offset: Tensor,
    bias: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int, dropout: float, causal: bool, *,
    scale: float | None = None,
) -> Gradients:  # fmt: skip
    return _go_back(gy, (query, key, value, out, sums), bias, causal, scale)


def _batch_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, training: bool,
    momentum: float, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    found = torch.ops.aten.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)
    return *found, torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(
    x: Tensor, gy: Tensor, weight: Tensor, mean: Tensor | None, variance: Tensor | None, saved_mean: Tensor | None,
    saved_scale: Tensor | None, eps: float, reserve: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    return torch.ops.aten.native_batch_norm_backward(
        gy, x, weight, mean, variance, saved_mean, saved_scale, True, eps, [True, True, True]
    )


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
    made = x * inverse
    return made if weight is None else made * weight, inverse


def _rms_norm_backward(
    gy: Tensor, x: Tensor, shape: list[int], inverse: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor | None]:
    normed, h = x * inverse, gy if weight is None else gy * weight
    gx = inverse * (h - normed * (h * normed).mean(-1, keepdim=True))
    return gx, None if weight is None else (gy * normed).flatten(0, -2).sum(0)


_KERNELS = {
    "_scaled_dot_product_flash_attention": (_flash, _flash_backward),
    "_scaled_dot_product_efficient_attention": (_efficient, _efficient_backward),
    "_scaled_dot_product_cudnn_attention": (_cudnn, _cudnn_backward),
    "cudnn_batch_norm": (_batch_norm, _batch_norm_backward),
    "_fused_rms_norm": (_rms_norm, _rms_norm_backward),
}
KINDS = ("flash", "efficient", "cudnn")


def attend(
    kind: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """As ``F.scaled_dot_product_attention`` on a device, by its ``kind`` of kernel."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    bias = () if kind == "flash" else (attn_mask, True)
    return op(query, key, value, *bias, 0.0, is_causal, scale=scale)[0]


def batch_norm(
    x: Tensor, mean: Tensor | None, variance: Tensor | None, weight: Tensor, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """As ``F.batch_norm`` on a device."""
    return torch.ops.aten.cudnn_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)[0]


@pytest.fixture(scope="module")
def device_ops() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    for name, (forward, backward) in _KERNELS.items():
        library.impl(name, forward, "CPU")
        library.impl(f"{name}_backward", backward, "CPU")
    yield
    library._destroy()
