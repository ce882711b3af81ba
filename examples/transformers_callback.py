"""Lowtide in the Trainer of transformers: one callback.

    pip install transformers accelerate
    python examples/transformers_callback.py

A GPT-2 of two layers, with new weights, learns to count in steps; nothing is downloaded. A CPU is enough.
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from lowtide.integrations.transformers import LowtideCallback
from lowtide.session import Session


class Counting(Dataset):  # type: ignore[type-arg]
    """Rows of numbers that rise in steps of 1 to 7."""

    def __init__(self, rows: int, length: int, vocabulary: int) -> None:
        start, step = torch.arange(rows).unsqueeze(1) * 13, torch.arange(rows).unsqueeze(1) % 7 + 1
        self._rows = (start + step * torch.arange(length)) % vocabulary

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def main(steps: int = 60, batch: int = 8) -> Session:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=101, n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    callback = LowtideCallback()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, learning_rate=3e-3, save_strategy="no",
            report_to=[], disable_tqdm=True, logging_steps=20,
        )  # fmt: skip
        trainer = Trainer(
            GPT2LMHeadModel(config), arguments, train_dataset=Counting(256, 64, 101), callbacks=[callback]
        )
        result = trainer.train()
    assert callback.tide is not None
    print(f"loss {result.training_loss:.3f}")
    print(callback.tide.report())
    return callback.tide


if __name__ == "__main__":
    main()
