"""Twenty steps of a tiny model of the zoo on one batch under a method: what a user sees first."""

from __future__ import annotations

import warnings

import torch
from torch import nn

import lowtide
from lowtide.app import zoo

STEPS = 20


def train(model_name: str, method: str, *, bf16: bool, device: str = "cpu") -> list[float]:
    """The losses; conv nets are channels_last in bf16."""
    entry = zoo.describe(model_name)
    torch.manual_seed(0)
    model = entry.build(**entry.tiny).to(device)
    inputs, target = (part.to(device) for part in entry.example(4, **entry.tiny))
    if bf16 and inputs.dim() == 4:
        model.to(memory_format=torch.channels_last)
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    has_rows = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-3) if has_rows else torch.optim.SGD(parameters, 0.02, momentum=0.9)
    session = lowtide.attach(model, method, optimizer=optimizer, min_size=1024)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)  # a method may find nothing to do in a model
        for _ in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                output = model(inputs)
            loss = entry.loss(output.float(), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    session.detach()
    return torch.stack(losses).tolist()


def assert_goes_well(losses: list[float]) -> None:
    assert torch.tensor(losses).isfinite().all(), losses
    assert sum(losses[-3:]) / 3 < 0.98 * losses[0], losses
