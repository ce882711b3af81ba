"""Nothing between the hooks and the codecs asks a tensor for its value: on a GPU the host would wait for the device.

Codecs are left out: those of a CPU look at what they code, a GPU's are kernels. What a GPU says of whole steps is in
tests/gpu.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.app import zoo

LOWTIDE = Path(lowtide.__file__).parent
ASKING = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"}


def asks(op: str, args: Any) -> bool:
    picks_by_mask = op in ("index", "index_put_") and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return op in ASKING or picks_by_mask


def callers(frame: FrameType | None) -> list[str]:
    """The functions of ours that are being run, innermost first."""
    found = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LOWTIDE):
            found.append(f"{path.relative_to(LOWTIDE).as_posix()}:{frame.f_code.co_name}")
        frame = frame.f_back
    return found


class Questions(TorchDispatchMode):
    """Counts those of Lowtide, by who asked."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks(func.overloadpacket.__name__, args):
            who = callers(sys._getframe())
            if who and not any(name.startswith(("codecs/", "coding/", "app/")) for name in who):
                self.seen[f"{func}: {' < '.join(who[:4])}"] += 1
        return func(*args, **(kwargs or {}))


CASES = [("budget", False), ("budget", True), ("comet", False), ("acgc", False), ("gact", False), ("fixed", True)]


@pytest.mark.parametrize(
    ("method", "bf16"), CASES, ids=[f"{method}-{'bf16' if bf16 else 'fp32'}" for method, bf16 in CASES]
)
@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_steps_ask_nothing(name: str, method: str, bf16: bool) -> None:
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    options = {"period": 2, "checks": 100} if method == "budget" else {"period": 2} if method == "comet" else {}
    tide = lowtide.attach(model, method, optimizer=optimizer, min_size=0, refresh=3, **options)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        entry.loss(output.float(), target).backward()
        optimizer.step()

    for _ in range(3):
        step()
    with Questions() as questions:
        for _ in range(5):
            step()
    tide.detach()
    assert any(site.codec not in ("kept", "exact") for site in tide.ledger.sites.values())
    assert not questions.seen, questions.seen
