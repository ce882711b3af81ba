"""A small ResNet and a small GPT with a task that they can learn, so that they can be measured in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.app import zoo

Batch = Callable[[int], tuple[Tensor, Tensor]]


def resnet() -> tuple[nn.Module, Batch, Any]:
    """ResNet-18 of width 8 on noisy patterns of 16 pixels."""
    torch.manual_seed(0)
    entry = zoo.describe("resnet18")
    model = entry.build(num_classes=10, stem="cifar", width=8)
    patterns = F.interpolate(torch.randn(10, 3, 4, 4), size=(16, 16), mode="bicubic")

    def batch(number: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(number)
        target = torch.randint(0, 10, (16,), generator=source)
        return patterns[target] + 1.5 * torch.randn(16, 3, 16, 16, generator=source), target

    return model, batch, entry.loss


def cnn(width: int = 16) -> tuple[nn.Module, Batch, Any]:
    """Four convolutions with batch norm and ReLU on the same patterns: quick to train."""
    _, batch, loss = resnet()
    blocks: list[nn.Module] = []
    for inputs in (3, width, width, width):
        blocks += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*blocks, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, 10)), batch, loss


def gpt() -> tuple[nn.Module, Batch, Any]:
    """A GPT of two blocks; the next token is as a rule one that the last one determines."""
    torch.manual_seed(0)
    entry = zoo.describe("gpt")
    model = entry.build(vocab_size=64, context=32, depth=2, width=64, heads=2, tied_embeddings=False)
    follows = torch.randperm(64)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, 64, (8, 33), generator=source)
        for place in range(32):
            regular = torch.rand(8, generator=source) < 0.7
            tokens[:, place + 1] = torch.where(regular, follows[tokens[:, place]], tokens[:, place + 1])
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return model, batch, entry.loss


def gradients(model: nn.Module, loss: Any, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    return {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, batch: Batch, steps: range) -> None:
    for number in steps:
        optimizer.zero_grad()
        images, target = batch(number)
        loss(model(images), target).backward()
        optimizer.step()
