"""Lowtide in a loop that uses accelerate: one call after ``prepare``.

    pip install accelerate
    python examples/accelerate_loop.py

Handwritten digits that come with Lowtide, a small convolutional network, 4 epochs; a CPU is enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.app.data import digits
from lowtide.integrations.accelerate import attach
from lowtide.session import Session


def main(epochs: int = 4, batch: int = 64) -> Session:
    accelerator = Accelerator()
    torch.manual_seed(0)
    split = digits.load().train
    images, labels = split.select(split.keys())
    loader = DataLoader(TensorDataset(images.float() / 120 - 1, labels), batch, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tide = attach(accelerator, model, optimizer)
    for epoch in range(epochs):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    accelerator.print(tide.report())
    return tide


if __name__ == "__main__":
    main()
