"""A plain PyTorch loop with Lowtide: the three lines that were added are marked. docs/tutorial.md explains them.

    python examples/own_loop.py

Handwritten digits that come with Lowtide, a small convolutional network, 6 epochs; a CPU is enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide  # added
from lowtide.app.data import digits


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def scale(images: Tensor) -> Tensor:
    return images.float().div_(120).sub_(1)


def main(epochs: int = 6, batch: int = 64) -> lowtide.Session:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = digits.load()
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    tide = lowtide.attach(model, optimizer=optimizer)  # added
    for epoch in range(epochs):
        model.train()
        for keys in torch.randperm(data.train.per_epoch).split(batch):
            images, labels = (part.to(device) for part in data.train.select(keys))
            loss = F.cross_entropy(model(scale(images)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            images, labels = (part.to(device) for part in data.test.select(data.test.keys()))
            accuracy = (model(scale(images)).argmax(1) == labels).float().mean().item()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, test accuracy {100 * accuracy:.1f} %")
    print(tide.report())  # added
    return tide


if __name__ == "__main__":
    main()
