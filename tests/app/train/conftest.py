"""A net that trains on the digits within a second, as a file that ``--model`` can name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "gpu"))  # what its tests share

NET = """
from torch import nn


def net(num_classes, width=8, dropout=0.2):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(dropout),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, num_classes),
    )
"""


@pytest.fixture
def net(tmp_path: Path) -> str:
    """How ``--model`` writes it. It saves enough at a batch of 32 for Lowtide to bother."""
    path = tmp_path / "nets.py"
    path.write_text(NET)
    return f"{path}:net"


@pytest.fixture
def train(lowtide: Callable[..., int], net: str) -> Callable[..., int]:
    """``lowtide train`` on 192 digits, 6 steps an epoch; arguments that are given again win."""
    few = (
        "--data",
        "digits",
        "--data-option",
        "train=192",
        "--data-option",
        "test=64",
        "--batch",
        "32",
        "--epochs",
        "2",
    )
    return lambda *arguments: lowtide("train", "--model", net, *few, "--device", "cpu", *arguments)


@pytest.fixture
def read_weights() -> Callable[[Path], list[Tensor]]:
    """All tensors of the model and the optimizer in the last checkpoint of a run."""

    def read(folder: Path) -> list[Tensor]:
        path = sorted((folder / "checkpoints").glob("*.pt"))[-1]
        state = torch.load(path, weights_only=True)
        momenta = [value for item in state["optimizer"]["state"].values() for value in item.values()]
        return [*state["model"].values(), *(value for value in momenta if isinstance(value, Tensor))]

    return read


@pytest.fixture
def read_lines() -> Callable[[Path], list[dict[str, Any]]]:
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
