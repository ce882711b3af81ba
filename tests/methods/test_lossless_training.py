"""Method ``lossless``: a hundred steps that are bit-equal to plain training, with less held."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_nets import NETS
from torch import Tensor

import lowtide

STEPS = 100


def train(kind: str, method: str | None, *, bf16: bool) -> tuple[list[Tensor], lowtide.Session | None]:
    net = NETS[kind]
    model = net.model()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    session = None if method is None else lowtide.attach(model, method, optimizer=optimizer, min_size=512, check=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs, target = net.batch(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        F.cross_entropy(output.float(), target).backward()
        optimizer.step()
    weights = [value.clone() for value in model.state_dict().values()]
    return [*weights, *(state["exp_avg_sq"] for state in optimizer.state.values())], session


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["conv", "attention"])
def test_a_hundred_steps_are_bit_equal(kind: str, bf16: bool) -> None:
    plain, _ = train(kind, None, bf16=bf16)
    ours, session = train(kind, "lossless", bf16=bf16)
    assert all(map(torch.equal, plain, ours))
    assert session is not None
    values = [entry for entry in session.ledger.sites.values() if entry.codec == "lossless" and entry.raw_nbytes]
    assert values and sum(entry.held_nbytes for entry in values) < sum(entry.raw_nbytes for entry in values)
