"""Log-probabilities that are stored as probabilities, on a device: the promise, the mean, no waiting, and graphs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from no_waiting import no_waiting
from probability_cases import check, make_cases
from torch import Tensor, nn

import lowtide

pytestmark = pytest.mark.gpu

CLASSES, ROWS, BOUND = 20_000, 512, 2.0**-10


class Head(nn.Module):
    """Logits that can be differentiated."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits = nn.Parameter((torch.randn(ROWS, CLASSES) * 3).to("cuda", dtype))

    def forward(self, scale: Tensor) -> Tensor:
        return self.logits * scale


def gradient(model: Head, tide: lowtide.Session | None) -> Tensor:
    """Times the number of rows, so that a probability's error is the gradient's."""
    model.zero_grad()
    scale, labels = torch.ones((), device="cuda", dtype=model.logits.dtype), torch.arange(ROWS, device="cuda")
    if tide is None:
        F.cross_entropy(model(scale), labels).backward()
    else:
        with tide.recording():
            loss = F.cross_entropy(model(scale), labels)
        loss.backward()
        tide.step()
    assert model.logits.grad is not None
    return model.logits.grad.double() * ROWS


def test_the_kernel_that_rounds_to_units_equals_plain_torch() -> None:
    for case in make_cases():
        check(case, torch.device("cuda"))


@pytest.mark.parametrize("coder", ["rans", "blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_within_the_bound_and_right_in_the_mean(dtype: torch.dtype, coder: str) -> None:
    model = Head(dtype)
    exact = gradient(model, None)
    tide = lowtide.attach(model, "fixed", log_probability=f"{BOUND} probability", coder=coder, check=True)
    found = torch.stack([gradient(model, tide) for _ in range(24)])
    held = next(entry.held_nbytes for entry in tide.report().sites if "log_softmax" in entry.name)
    tide.detach()
    rounding = 2 * torch.finfo(dtype).eps
    assert float((found - exact).abs().max()) <= BOUND * (1 + 1e-3) + rounding
    assert float((found - exact).square().sum(-1).mean()) < BOUND + CLASSES * rounding**2
    drift = float((found.mean(0) - exact).sum(-1).mean().abs())
    assert drift < 5 * (BOUND / 24 / ROWS) ** 0.5 + CLASSES * rounding
    assert 8 * held < (1.0 if coder == "rans" else 3.0) * ROWS * CLASSES


def test_nothing_waits() -> None:
    model = Head(torch.float32)
    tide = lowtide.attach(model, "budget")
    for _ in range(10):
        gradient(model, tide)
    with no_waiting():
        gradient(model, tide)
    tide.detach()


def test_replays_draw_anew() -> None:
    model = Head(torch.float32)
    exact = gradient(model, None) / ROWS
    labels = torch.arange(ROWS, device="cuda")
    tide = lowtide.attach(model, "fixed", log_probability=f"{BOUND} probability")

    def step(scale: Tensor) -> Tensor:
        with tide.recording():
            loss = F.cross_entropy(model(scale), labels)
        loss.backward()
        return loss

    replayed, found = tide.graph(step), []
    for _ in range(24):
        model.zero_grad()
        replayed(torch.ones((), device="cuda"))
        assert model.logits.grad is not None
        found.append(model.logits.grad.double())
        tide.step()
    tide.detach()
    error = [grad - exact for grad in found[-4:]]
    assert all(float(one.abs().max()) * ROWS <= BOUND * (1 + 1e-3) + 1e-5 for one in error)
    cosine = float((error[0] * error[1]).sum() / (error[0].norm() * error[1].norm()))
    assert abs(cosine) < 0.1, "two replays have the same errors"
