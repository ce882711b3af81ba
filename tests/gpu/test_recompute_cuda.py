"""Modules that are run again, on a device: its random generator and autocast are as they were, memory is freed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.app import zoo

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")]


def train(name: str, *, bf16: bool, method: str = "", steps: int = 3, **options: object) -> list[Tensor]:
    entry = zoo.describe(name)
    torch.manual_seed(0)
    model = entry.build(**entry.tiny).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if method:
        lowtide.attach(model, method, optimizer=optimizer, min_size=64, recompute=True, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(steps):
        inputs, target = entry.example(8, generator=generator, **entry.tiny)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=bf16):
            output = model(inputs)
        entry.loss(output.float(), target).backward()
        optimizer.step()
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["resnet18", "vit_b_16", "gpt2_small"])
def test_with_exact_boundaries_training_is_bit_equal(name: str, bf16: bool) -> None:
    expected, again = train(name, bf16=bf16), train(name, bf16=bf16)
    if not all(torch.equal(*pair) for pair in zip(expected, again, strict=True)):
        pytest.skip("plain training does not repeat itself here")
    for store in ("device", "host"):
        got = train(name, bf16=bf16, method="exact", store=store)
        assert all(torch.equal(*pair) for pair in zip(expected, got, strict=True)), store


def test_compressed_boundaries_train() -> None:
    got = train("vit_b_16", bf16=True, method="fixed", check=True)
    assert all(bool(value.isfinite().all()) for value in got)


def test_dropout_draws_the_same_numbers_in_the_second_run() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Tanh())
    ).cuda()
    x = torch.randn(32, 64, device="cuda")
    results = []
    for recompute in (None, "1"):
        session = lowtide.attach(model, "exact", min_size=64, recompute=recompute)
        model.zero_grad()
        torch.cuda.manual_seed(3)
        model(x).sum().backward()
        after = torch.cuda.get_rng_state()
        results.append([*(p.grad.clone() for p in model.parameters() if p.grad is not None), after])
        session.detach()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_what_is_held_is_what_the_allocator_says() -> None:
    torch.use_deterministic_algorithms(False)
    entry = zoo.describe("resnet18")
    model = entry.build().cuda()
    inputs, target = entry.example(16, generator=torch.Generator("cuda").manual_seed(0))
    session = lowtide.attach(model, "exact", recompute=True)
    held = allocated = 0
    for _ in range(2):
        model.zero_grad()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        output = model(inputs)
        torch.cuda.synchronize()
        held, allocated = session.ledger.held, torch.cuda.memory_stats()["requested_bytes.all.current"] - before
        entry.loss(output, target).backward()
        del output
    assert session.ledger.held == 0
    assert abs(allocated - held) <= 0.02 * allocated, f"ledger {held}, asked for {allocated}"
