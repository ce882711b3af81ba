"""Ops whose backward reads the shape of a save, or its place in a window: check=True poisons what is not stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import Apply, problem
from torch import Tensor, nn
from train import assert_exact

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
Op = Callable[[Tensor], Tensor]


def classes(x: Tensor, *, void: int = -100) -> Tensor:
    """A class for every position, from the position alone; some are to be ignored."""
    target = torch.arange(x.numel() // x.shape[1]).remainder(x.shape[1])
    return target.where(target != 2, torch.tensor(void)).view(len(x), *x.shape[2:])


def order(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1] - 1, -1, -1).view(1, -1, *(1,) * (x.dim() - 2)).expand_as(x)


def nll(x: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Contiguous, because torch refuses the backward of other layouts."""
    return F.nll_loss(x.contiguous(), target, **options)


# For inputs of any number of dimensions: name -> (op, codec at work).
ANYWHERE: dict[str, tuple[Op, str]] = {
    "nll_loss": (lambda x: nll(x, classes(x)), "shape"),
    "nll_loss, weighted sum": (lambda x: nll(x, classes(x), weight=torch.arange(1.0, 9), reduction="sum"), "shape"),
    "nll_loss, each": (lambda x: nll(x, classes(x, void=7), ignore_index=7, reduction="none"), "shape"),
    "gather": (lambda x: x.gather(1, order(x)), "shape"),
    "masked_select": (lambda x: x.masked_select(order(x) > 3), "shape"),
    "masked_fill": (lambda x: x.masked_fill(order(x) > 3, 0.0), "bitmask"),
    "where": (lambda x: torch.where(order(x) > 3, x, x.exp()), "bitmask"),
    "frozen convolution": (lambda x: CONVOLUTIONS[x.dim() - 2](8, 4, 3).requires_grad_(False)(x), "shape"),
    "frozen batch norm": (lambda x: F.batch_norm(x, torch.zeros(8), torch.ones(8), torch.ones(8)), "shape"),
    "batch norm without a scale": (lambda x: F.relu(F.batch_norm(x, None, None, training=True)), "bitmask"),
    "dropout": (lambda x: F.dropout(x, 0.3), "bitmask"),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), "bitmask"),
    "fake quantization": (lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7), "bitmask"),
}

# By the number of spatial dimensions.
SPATIAL: dict[int, dict[str, tuple[Op, str]]] = {
    1: {
        "max_pool": (lambda x: F.max_pool1d(x, 3, 2, 1), "window_index"),
        "adaptive_max_pool": (lambda x: F.adaptive_max_pool1d(x, 5), "window_index"),
        "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool1d(x, 5), "shape"),
        "avg_pool": (lambda x: F.avg_pool1d(x, 3, 2, 1), "shape"),
        "reflect": (lambda x: F.pad(x, (2, 3), mode="reflect"), "shape"),
        "replicate": (lambda x: F.pad(x, (2, 3), mode="replicate"), "shape"),
    },
    2: {
        "max_pool": (lambda x: F.max_pool2d(x, 3, 2, 1), "window_index"),
        "max_pool, ceil": (lambda x: F.max_pool2d(x, 2, 3, ceil_mode=True), "window_index"),
        "max_pool, dilated": (lambda x: F.max_pool2d(x, (3, 2), (1, 2), (1, 0), dilation=(2, 1)), "window_index"),
        "max_pool, overlapping": (lambda x: F.max_pool2d(x, 5, 1, 2), "window_index"),
        "max_pool, whole plane": (lambda x: F.max_pool2d(x, x.shape[2:]), "window_index"),
        "max_pool, ties": (lambda x: F.max_pool2d(x.repeat_interleave(2, 2), 3, 2, 1), "window_index"),
        "max_pool, NaN": (lambda x: F.max_pool2d(x.masked_fill(order(x) == 5, float("nan")), 2)[:, 4:], "window_index"),
        "max_unpool": (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), "shape"),
        "adaptive_max_pool": (lambda x: F.adaptive_max_pool2d(x, (5, 3)), "window_index"),
        "fractional_max_pool": (lambda x: F.fractional_max_pool2d(x, 2, output_size=5), "window_index"),
        "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), "shape"),
        "avg_pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), "shape"),
        "reflect": (lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"), "shape"),
        "replicate": (lambda x: F.pad(x, (2, 3, 1, 0), mode="replicate"), "shape"),
        "frozen transposed convolution": (lambda x: nn.ConvTranspose2d(8, 4, 2, 2).requires_grad_(False)(x), "shape"),
        "frozen depthwise": (lambda x: nn.Conv2d(8, 8, 3, groups=8).requires_grad_(False)(x), "shape"),
    },
    3: {
        "max_pool": (lambda x: F.max_pool3d(x, (2, 3, 2), (1, 2, 2), (1, 1, 0)), "window_index"),
        "adaptive_max_pool": (lambda x: F.adaptive_max_pool3d(x, (2, 3, 4)), "window_index"),
        "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), "shape"),
        "avg_pool": (lambda x: F.avg_pool3d(x, 2), "shape"),
        "reflect": (lambda x: F.pad(x, (2, 3, 1, 0, 1, 1), mode="reflect"), "shape"),
        "replicate": (lambda x: F.pad(x, (2, 3, 1, 0, 1, 1), mode="replicate"), "shape"),
    },
}
CASES = [(dims, name) for dims in SPATIAL for name in (*ANYWHERE, *SPATIAL[dims])]

# What lies between the convolution, which trains, and the op: memory in other orders, with gaps, at an offset.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "channels of a channels-last": lambda x: torch.cat([x, x], 1).movedim(1, -1).contiguous().movedim(-1, 1)[:, 4:12],
    "at an offset": lambda x: torch.cat([x, x])[len(x) :],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("dims", "name"), CASES, ids=lambda value: f"{value}d" if isinstance(value, int) else value)
def test_gradients_from_shapes_and_windows(dims: int, name: str, view: str) -> None:
    op, codec = {**ANYWHERE, **SPATIAL[dims]}[name]

    def build() -> nn.Module:
        convolution = CONVOLUTIONS[dims](3, 8, 3, padding=1)
        return Apply(lambda m, x: op(VIEWS[view](m.convolution(x))), convolution=convolution)

    assert_exact(problem(build, 4, 3, *(8,) * dims), steps=1, coded={codec})


@pytest.mark.parametrize(
    "name", ["max_pool", "adaptive_max_pool", "adaptive_avg_pool", "avg_pool", "reflect", "replicate"]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_one_picture_without_a_batch(dims: int, name: str) -> None:
    op, codec = SPATIAL[dims][name]
    single = problem(lambda: Apply(lambda m, x: op(m.conv(x)), conv=CONVOLUTIONS[dims](3, 8, 1)), 3, *(8,) * dims)
    assert_exact(single, steps=1, coded={codec})
