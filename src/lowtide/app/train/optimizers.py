"""Optimizers by name, with weight decay for weights only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lowtide.app.train.config import Optimizer
from lowtide.optim import LARS


def make_optimizer(config: Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """Over the parameters that are trained; matrices and kernels decay, biases and norms do not."""
    assert config.lr is not None and config.weight_decay is not None, "a resolved configuration has both"
    groups = list(_make_groups(model, config.weight_decay))
    if config.name == "sgd":
        return torch.optim.SGD(groups, config.lr, momentum=config.momentum, nesterov=config.momentum > 0)
    if config.name == "lars":
        return LARS(groups, config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, config.lr)


def _make_groups(model: nn.Module, decay: float) -> Iterable[dict[str, object]]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for weight_decay, group in (
        (decay, [parameter for parameter in trained if parameter.dim() > 1]),
        (0.0, [parameter for parameter in trained if parameter.dim() <= 1]),
    ):
        if group:
            yield {"params": group, "weight_decay": weight_decay}
