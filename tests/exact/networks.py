"""Small networks, each with one way of writing a model that a compressor of saved tensors could get wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from train import Problem

from lowtide.capture.identity import tensors_in


class Apply(nn.Module):
    """Layers by name, and a forward given as a function of the module and its inputs."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        self._run = run
        for name, layer in layers.items():
            if isinstance(layer, Tensor) and not isinstance(layer, nn.Parameter):
                self.register_buffer(name, layer)
            else:
                setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self._run(self, *inputs)


def mean_square(model: nn.Module, *batch: Tensor) -> Tensor:
    """A loss for any output: the mean squares of all tensors in it."""
    outputs = tensors_in(model(*batch))
    return torch.stack([output.abs().float().square().mean() for output in outputs]).sum()


def problem(build: Callable[[], nn.Module], *shape: int, **settings: Any) -> Problem:
    """Train ``build()`` on normal inputs of a shape."""
    return Problem(build, lambda generator: (torch.randn(shape, generator=generator),), mean_square, **settings)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


# -- pictures: (4, 3, 12, 12) ------------------------------------------------------------------------------------------


def conv_bn_relu(*, inplace: bool, norm: bool = True, channels: int = 3) -> nn.Module:
    """In-place ReLU overwrites what batch norm or the convolution has just made."""
    layers: list[nn.Module] = []
    for inputs in (channels, 8, 8):
        layers += [nn.Conv2d(inputs, 8, 3, padding=1), *([nn.BatchNorm2d(8)] if norm else []), nn.ReLU(inplace)]
    return nn.Sequential(*layers)


def functional_cnn() -> nn.Module:
    """Nothing but functional calls: every save belongs to the one module, and only the op tells them apart."""

    def run(m: Apply, x: Tensor) -> Tensor:
        x = F.relu(F.batch_norm(F.conv2d(x, m.w1, m.b1, padding=1), m.mean, m.var, m.scale, m.shift, training=True))
        y = F.relu(F.conv2d(x, m.w2, padding=1))
        x = F.max_pool2d(F.relu(x + y), 3, 2, 1)
        x = F.leaky_relu(F.group_norm(F.conv2d(x, m.w2, padding=1), 2) + x)
        x = F.dropout(F.avg_pool2d(x, 2), 0.25, training=m.training).flatten(1)
        return F.log_softmax(F.linear(F.hardtanh(x), m.w3, m.b3), -1)

    return Apply(
        run,
        **{"w1": parameter(8, 3, 3, 3), "b1": parameter(8), "w2": parameter(8, 8, 3, 3)},
        **{"scale": nn.Parameter(torch.ones(8)), "shift": nn.Parameter(torch.zeros(8))},
        **{"mean": torch.zeros(8), "var": torch.ones(8), "w3": parameter(5, 72), "b3": parameter(5)},
    )


def pools() -> nn.Module:
    def run(m: Apply, x: Tensor) -> list[Tensor]:
        x = m.conv(x)
        return [
            F.max_pool2d(x, 3, 2, ceil_mode=True),
            F.max_pool2d(x, (3, 2), (1, 2), (1, 0), dilation=(2, 1)),
            F.max_pool2d(x[:, 2:5], 2),
            F.adaptive_max_pool2d(x, 5),
            F.adaptive_avg_pool2d(x, (5, 1)),
            F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            F.adaptive_avg_pool2d(x[:, ::2], 1),
            F.lp_pool2d(x, 2, 2),
            F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            F.pad(x, (1, 2, 1, 1), mode="reflect"),
            F.pad(x, (1, 2, 1, 1), mode="replicate"),
            F.interpolate(x, scale_factor=2, mode="bilinear"),
        ]

    return Apply(run, conv=nn.Conv2d(3, 8, 3, padding=1))


def gapped_views() -> nn.Module:
    """Views with gaps, permuted, or starting inside their storage, through ops whose backward reads a bit or two."""

    def run(m: Apply, x: Tensor) -> list[Tensor]:
        x = m.conv(x)
        return [
            F.leaky_relu(x[:, ::2]) - F.leaky_relu(x[:, :4]),
            F.relu6(x[..., 1:-1]),
            x[:, 3:].abs(),
            x[2:].clamp(-0.5, 0.5),
            F.hardtanh(x.permute(0, 2, 3, 1)),
            F.leaky_relu(x.transpose(1, 3)[:, 2:7]),
            torch.where(x.detach()[:, ::2] > 0, x[:, ::2], x[:, 1::2]),
            F.max_pool2d(x.transpose(2, 3), (2, 3)),
            F.max_pool2d(x[0:2, :, 1::2], 2),
            x.diagonal(dim1=2, dim2=3).clamp_min(0.1),
        ]

    return Apply(run, conv=nn.Conv2d(3, 8, 3, padding=1))


def transposed() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(3, 8, 2, 2), nn.InstanceNorm2d(8, affine=True), nn.ReLU6(), nn.ConvTranspose2d(8, 4, 3)
    )


def depthwise_residual() -> nn.Module:
    """A ModuleList loop with residual adds, a shared activation module, squeeze-and-excitation and hard gates."""

    def run(m: Apply, x: Tensor) -> Tensor:
        x = m.act(m.stem(x))
        for block, gate in zip(m.blocks, m.gates, strict=True):
            y = m.act(block(x))
            x = x + y * F.hardsigmoid(gate(y.mean((2, 3), keepdim=True)))
        return F.hardswish(x).abs().clamp(max=2.0)

    blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
    gates = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))
    return Apply(run, stem=nn.Conv2d(3, 8, 1), act=nn.ReLU(), blocks=blocks, gates=gates)


def inplace_chain() -> nn.Module:
    """Views, in-place adds on what is not saved any more, and in-place ReLU on a slice of the channels."""

    def run(m: Apply, x: Tensor) -> Tensor:
        x = m.conv(x)
        x += m.shortcut(x).detach()
        left, right = x.clone().split(4, dim=1)
        y = torch.cat([F.relu(left.contiguous(), inplace=True), F.leaky_relu(right.contiguous(), inplace=True)], 1)
        z = (y * 2).add_(1).sub_(1.5)
        z[:, :3].relu_()
        return m.last(z)

    return Apply(run, conv=nn.Conv2d(3, 8, 3), shortcut=nn.Conv2d(8, 8, 1), last=nn.Conv2d(8, 2, 3))


def checkpointed(*, use_reentrant: bool) -> nn.Module:
    def run(m: Apply, x: Tensor) -> Tensor:
        x = m.first(x)
        for block in m.blocks:
            x = x + checkpoint(block, x, use_reentrant=use_reentrant)
        return m.last(F.avg_pool2d(F.relu(x), 2))

    def make_block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3))

    blocks = nn.ModuleList(make_block() for _ in range(2))
    return Apply(run, first=nn.Conv2d(3, 8, 1), blocks=blocks, last=nn.Conv2d(8, 2, 1))


def frozen() -> nn.Module:
    """The first convolution trains; every later layer is frozen, its norm in evaluation, and only passes gradients."""
    rest = [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *rest, nn.Flatten(), nn.Linear(8 * 81, 10), nn.LayerNorm(10), nn.ReLU())
    for layer in model[1:]:
        layer.eval().requires_grad_(False)
    return model


def convolution(dims: int) -> nn.Module:
    convolution, norm, pool = {
        1: (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d),
        3: (nn.Conv3d, nn.BatchNorm3d, nn.MaxPool3d),
    }[dims]
    return nn.Sequential(convolution(3, 8, 3, padding=1), norm(8), nn.ReLU(), pool(2), convolution(8, 4, 2), nn.ReLU())


class Named(NamedTuple):
    logits: Tensor
    extra: dict[str, list[Tensor]]


@dataclass
class Outputs:
    named: Named
    note: str = "a model's output may be a nest of anything"


def nested_outputs() -> nn.Module:
    def run(m: Apply, x: Tensor) -> Outputs:
        x = F.relu(m.conv(x))
        return Outputs(Named(F.relu(m.head(x)), {"pooled": [F.max_pool2d(x, 2), F.leaky_relu(x)]}))

    return Apply(run, conv=nn.Conv2d(3, 8, 3), head=nn.Conv2d(8, 2, 1))


def normalized_weights() -> nn.Module:
    return nn.Sequential(
        weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), spectral_norm(nn.Conv2d(8, 8, 3)), nn.ReLU(), nn.Flatten(),
        weight_norm(nn.Linear(8 * 64, 16)), nn.ReLU(),
    )  # fmt: skip


PICTURES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "in-place ReLU after batch norm": (partial(conv_bn_relu, inplace=True), {"bitmask"}),
    "in-place ReLU after convolution": (partial(conv_bn_relu, inplace=True, norm=False), {"bitmask"}),
    "ReLU not in place": (partial(conv_bn_relu, inplace=False), {"bitmask"}),
    "functional calls only": (functional_cnn, {"bitmask", "shape", "window_index"}),
    "pools and pads": (pools, {"shape", "window_index"}),
    "views with gaps": (gapped_views, {"bitmask", "shape", "window_index"}),
    "transposed convolution": (transposed, {"bitmask"}),
    "depthwise, residual, gated": (depthwise_residual, {"bitmask"}),
    "in-place chain": (inplace_chain, {"bitmask"}),
    "checkpoint inside, reentrant": (partial(checkpointed, use_reentrant=True), {"bitmask", "shape"}),
    "checkpoint inside, not reentrant": (partial(checkpointed, use_reentrant=False), {"bitmask", "shape"}),
    "frozen layers": (frozen, {"bitmask", "shape"}),
    "nested outputs": (nested_outputs, {"window_index", "bitmask"}),
    "weight and spectral norm": (normalized_weights, {"bitmask"}),
}
