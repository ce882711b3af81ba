"""Lowtide in a Lightning trainer: one callback.

    pip install lightning
    python examples/lightning_callback.py

Handwritten digits that come with Lowtide, a small convolutional network, 4 epochs; a CPU is enough.
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lowtide.app.data import digits
from lowtide.integrations.lightning import LowtideCallback
from lowtide.session import Session


class Classifier(L.LightningModule):
    """An ordinary module: nothing in it knows of Lowtide."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main(epochs: int = 4, batch: int = 64) -> Session:
    L.seed_everything(0, verbose=False)
    split = digits.load().train
    images, labels = split.select(split.keys())
    loader = DataLoader(TensorDataset(images.float() / 120 - 1, labels), batch, shuffle=True)
    callback = LowtideCallback(log=False)
    trainer = L.Trainer(
        max_epochs=epochs, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), loader)
    assert callback.tide is not None
    print(f"loss {trainer.callback_metrics['loss'].item():.3f}")
    print(callback.tide.report())
    return callback.tide


if __name__ == "__main__":
    main()
