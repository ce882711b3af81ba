"""The ledger against the allocator: what it says is held is what the device holds."""

from __future__ import annotations

import pytest
import torch

import lowtide
from lowtide.app import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"),
]
BATCH = 64
SHARE = 0.02  # blocks of the allocator are multiples of 512 bytes; the logits are in its count and not in the ledger's


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_ledger_agrees_with_the_allocator_for_resnet50(bf16: bool) -> None:
    torch.use_deterministic_algorithms(False)  # filling memory takes longer than the test
    entry = zoo.describe("resnet50")
    model = entry.build().cuda()
    inputs, target = entry.example(BATCH, generator=torch.Generator("cuda").manual_seed(0))
    session = lowtide.attach(model, "fixed")
    held, allocated = 0, 0
    for _ in range(2):  # the first round makes the workspaces of the libraries, which stay
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        held, allocated = session.ledger.held, torch.cuda.memory_allocated() - before
        raw = session.ledger.raw
        entry.loss(output.float(), target).backward()
        del output
    session.detach()
    assert session.ledger.held == 0
    assert abs(allocated - held) <= SHARE * allocated, f"ledger {held}, allocator {allocated}"
    assert raw > 2 * held, f"{raw} bytes raw, {held} held"
