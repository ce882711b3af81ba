"""``cast`` on a device: the bytes of the CPU, no wait, and steps that are captured as graphs."""

from __future__ import annotations

import math

import pytest
import torch
from no_waiting import no_waiting

import lowtide
from lowtide.codecs.cast import Cast
from lowtide.kernels import _tickets

pytestmark = pytest.mark.gpu
TARGETS = ["bf16", "fp8_e4m3", "fp8_e5m2"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("to", TARGETS)
def test_bytes_are_those_of_the_cpu_and_nobody_waits(to: str, scale: float, dtype: torch.dtype) -> None:
    codec = Cast(to)
    if not codec.accepts(dtype):
        pytest.skip("not wider than the target")
    x = (torch.randn(8, 32, 24, 24) * scale).to(dtype).to(memory_format=torch.channels_last)
    there = x.cuda()
    codec.decode(codec.encode(there))  # tables and kernels that are loaded once
    ticket = _tickets.take()
    with no_waiting():
        encoded = codec.encode(there, ticket=ticket.word)
        decoded = codec.decode(encoded)
    expected = codec.encode(x)
    settled = codec.settle(encoded, there, ticket.wait())
    for name, part in expected.tensors.items():
        assert torch.equal(settled.tensors[name].cpu().view(torch.uint8), part.view(torch.uint8)), name
    assert decoded.stride() == x.stride()
    assert torch.equal(codec.decode(settled).cpu(), codec.decode(expected))


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("value", [math.nan, math.inf, torch.finfo(torch.float32).max])
def test_what_does_not_fit_is_told(to: str, value: float) -> None:
    x = torch.randn(1 << 20, device="cuda")
    x[12345] = value
    ticket = _tickets.take()
    Cast(to).encode(x, ticket=ticket.word)
    assert ticket.wait() == 1


@pytest.mark.parametrize("to", TARGETS)
def test_a_step_is_captured(to: str) -> None:
    """Gradients of replays are those of eager steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)).cuda()
    batches = [torch.randn(512, 256, device="cuda") for _ in range(6)]

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    tide = lowtide.attach(model, "cast", to=to, min_size=64)
    graph = tide.graph(step, warmup=3)
    for x in batches:
        model.zero_grad(set_to_none=True)
        graph(x)
    replayed = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert graph.replays > 0
    model.zero_grad(set_to_none=True)
    step(batches[-1])
    for parameter, expected in zip(model.parameters(), replayed, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    tide.detach()
