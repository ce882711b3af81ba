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
REQUESTED_SHARE = 0.02  # the logits are in the allocator's count and not in the ledger's
ALLOCATED_SHARE = 0.04  # a block is handed out whole if less than 1 MiB would be left of it: counts at this batch size


def bytes_in_use() -> tuple[int, int]:
    """What was asked of the allocator, and what it handed out for that."""
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"], torch.cuda.memory_allocated()


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_ledger_agrees_with_the_allocator_for_resnet50(bf16: bool) -> None:
    torch.use_deterministic_algorithms(False)  # filling memory takes longer than the test
    entry = zoo.describe("resnet50")
    model = entry.build().cuda()
    inputs, target = entry.example(BATCH, generator=torch.Generator("cuda").manual_seed(0))
    session = lowtide.attach(model, "fixed")
    raw = held = requested = allocated = 0
    for _ in range(2):  # the first round makes the workspaces of the libraries, which stay
        model.zero_grad()
        before = bytes_in_use()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        torch.cuda.synchronize()
        session.report()  # lets go of tensors that were kept until their encoders had reported
        raw, held = session.ledger.raw, session.ledger.held
        requested, allocated = (after - start for after, start in zip(bytes_in_use(), before, strict=True))
        entry.loss(output.float(), target).backward()
        del output
    session.detach()
    assert session.ledger.held == 0
    found = f"ledger {held}, asked for {requested}, allocated {allocated}"
    assert abs(requested - held) <= REQUESTED_SHARE * requested, found
    assert abs(allocated - held) <= ALLOCATED_SHARE * allocated, found
    assert raw > 2 * held, f"{raw} bytes raw, {held} held"
