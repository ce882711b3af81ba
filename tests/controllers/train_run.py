"""Trains a small net and writes down loss and bounds of every step; goes on from a checkpoint if there is one.

python train_run.py FOLDER STEPS METHOD OPTIONS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from learners import cnn

import lowtide

EVERY = 5  # steps between checkpoints


class Run:
    """A net in training, with all that has to be saved to go on."""

    def __init__(self, method: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.model, self.batch, self.loss = cnn(width=4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02, momentum=options.pop("momentum", 0.9))
        self.session = lowtide.attach(self.model, method, optimizer=self.optimizer, **options)

    def step(self, number: int) -> list[str]:
        """One step: its loss and the bounds that were in force, bit for bit."""
        self.optimizer.zero_grad()
        for part in (2 * number, 2 * number + 1):  # two forwards a step
            images, target = self.batch(part)
            loss = self.loss(self.model(images), target)
            loss.backward()
        bounds = sorted(f"{entry.name} {entry.codec} {entry.bound}" for entry in self.session.report().sites)
        self.session.watch(loss)
        self.optimizer.step()
        return [float(loss.detach()).hex(), *bounds]

    def save(self, path: Path, number: int) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "session")}
        torch.save({"number": number, **state}, path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> int:
        state = torch.load(path, weights_only=True)
        for name in ("model", "optimizer", "session"):
            getattr(self, name).load_state_dict(state[name])
        return int(state["number"])


def main() -> None:
    folder, steps, method, options = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
    run, path = Run(method, options), folder / "checkpoint.pt"
    first = run.load(path) if path.exists() else 0
    with (folder / "steps.jsonl").open("a") as file:
        for number in range(first, steps):
            print(json.dumps([number, *run.step(number)]), file=file, flush=True)
            if (number + 1) % EVERY == 0:
                run.save(path, number + 1)


if __name__ == "__main__":
    main()
