"""Log-probabilities that are stored as probabilities: what backward makes of them, and what they take."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from recorded_losses import LOG_SOFTMAX, run_recorded
from torch import Tensor, nn

import lowtide
from lowtide.coding import probabilities

pytestmark = pytest.mark.usefixtures("_nothing_is_left_on")

CLASSES, ROWS = 4000, 48
BOUND = 2.0**-10


def logits(spread: float = 3.0) -> Tensor:
    return torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0)) * spread


def labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))


class Head(nn.Module):
    """Logits that can be differentiated."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits().to(dtype))

    def forward(self, scale: Tensor) -> Tensor:
        return self.logits * scale


def gradient(model: Head, tide: lowtide.Session | None = None) -> Tensor:
    model.zero_grad()
    scale = torch.ones((), dtype=model.logits.dtype)
    if tide is None:
        F.cross_entropy(model(scale), labels()).backward()
    else:
        run_recorded(tide, lambda: F.cross_entropy(model(scale), labels()), backward_inside=False)
        tide.step()
    assert model.logits.grad is not None
    return model.logits.grad.clone()


def attached(model: nn.Module, bound: str = f"{BOUND} probability", **options: object) -> lowtide.Session:
    return lowtide.attach(model, "fixed", log_probability=bound, check="full", coder="rans", **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_are_within_the_bound_and_right_in_the_mean(dtype: torch.dtype) -> None:
    model = Head(dtype)
    exact = gradient(model).double() * ROWS
    tide = attached(model)
    found = torch.stack([gradient(model, tide).double() * ROWS for _ in range(60)])
    tide.detach()
    rounding = 2 * torch.finfo(dtype).eps
    assert float((found - exact).abs().max()) <= BOUND * (1 + 1e-3) + rounding
    # Of a row, over all classes: the variances sum to a step at most, and none is lost on average.
    variance = (found - exact).square().sum(-1).mean()
    assert float(variance) < BOUND + CLASSES * rounding**2
    drift = (found.mean(0) - exact).sum(-1) / (BOUND / 60) ** 0.5
    assert float(drift.abs().max()) < 4.5 + CLASSES * rounding / (BOUND / 60) ** 0.5


def test_they_take_a_fraction_of_the_bits_of_logarithms() -> None:
    """At the noise of a bound of 0.03 on the logarithms, or less."""
    bits, noise = {}, {}
    for bound in (f"{BOUND} probability", "0.03"):
        model = Head()
        exact = gradient(model)
        tide = attached(model, bound)
        for _ in range(6):
            found = gradient(model, tide)
        (entry,) = [entry for entry in tide.report().sites if entry.name == LOG_SOFTMAX]
        bits[bound] = 8 * entry.held_nbytes / (ROWS * CLASSES)
        noise[bound] = float((found - exact).square().sum() / exact.square().sum())
        tide.detach()
    few, many = bits.values()
    assert few < 0.8 and many > 6, bits
    assert max(noise.values()) < 1e-3, noise


def test_nothing_is_lost_of_words_that_are_hardly_ever_likely() -> None:
    """A hundred thousand words with 1e-7 to 2e-6 each, in a context that is sure of another one: less than a 512th of
    the step, and in each of 40 steps all of them are to be pushed down by 0.05 in sum, give or take
    (0.05 * step / rows / 40) ** 0.5 = 0.0006. Once there was nothing at all."""
    rows, words, step = 32, 100_000, 2.0**-10
    model = Head()
    generator = torch.Generator().manual_seed(5)
    rare = (1e-7 + 1.9e-6 * torch.rand(words, generator=generator) ** 4).expand(rows, words)
    likely = 1 - rare.sum(-1, keepdim=True)
    model.logits = nn.Parameter(torch.cat([likely, rare], -1).log())
    tide = lowtide.attach(model, "fixed", log_probability=f"{step} probability", coder="blocks")
    pushed = 0.0
    for _ in range(40):
        model.zero_grad()
        run_recorded(
            tide,
            lambda: F.cross_entropy(model(torch.ones(())), torch.zeros(rows, dtype=torch.long)),
            backward_inside=False,
        )
        tide.step()
        assert model.logits.grad is not None
        pushed += float(model.logits.grad[:, 1:].double().sum()) / 40
    tide.detach()
    expected = float(rare[0].double().sum())
    assert float(rare.max()) < 2.2e-6 and 0.02 < expected < 0.08
    assert abs(pushed - expected) < 4.5 * (expected * step / rows / 40) ** 0.5


def test_gradients_of_gradients_are_finite() -> None:
    model = Head()
    tide = attached(model)
    with tide.recording():
        loss = F.cross_entropy(model(torch.ones(())), labels())
    (first,) = torch.autograd.grad(loss, model.logits, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), model.logits)
    tide.detach()
    assert first.isfinite().all() and second.isfinite().all()


def test_another_op_that_saves_them_has_a_bound_of_its_own() -> None:
    """The entropy of the classes, p log p, reads the logarithms themselves."""
    model = Head()

    def loss_of() -> Tensor:
        logs = F.log_softmax(model(torch.ones(())), -1)
        return (logs.exp() * logs).sum(-1).mean() + F.nll_loss(logs, labels())

    loss_of().backward()
    assert model.logits.grad is not None
    exact = model.logits.grad.clone()
    tide = lowtide.attach(model, "budget")
    for _ in range(6):
        model.zero_grad()
        run_recorded(tide, loss_of, backward_inside=False)
        tide.step()
    bounds = {entry.name: entry.bound for entry in tide.report().sites if entry.codec == "sz"}
    tide.detach()
    assert bounds[LOG_SOFTMAX].endswith(" probability")
    assert [bound for name, bound in bounds.items() if "mul" in name and not bound.endswith(" probability")], bounds
    assert float((model.logits.grad - exact).square().sum() / exact.square().sum()) < 0.03


def test_only_log_probabilities_have_such_a_bound() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    tide = lowtide.attach(model, "fixed", linear="0.001 probability", min_size=0)
    with pytest.raises(lowtide.LowtideError, match="only log-probabilities have a bound on probabilities"):
        model(torch.randn(64, 64))
    tide.detach()
    head = Head()
    rule = {"op": "log_softmax", "codec": "cusz", "bound": "0.001 probability"}
    tide = lowtide.attach(head, "fixed", rules=[rule])
    with pytest.raises(lowtide.LowtideError, match="is kept by codec 'sz', not by 'cusz'"):
        gradient(head, tide)
    tide.detach()


def test_a_run_that_is_resumed_goes_on_alike() -> None:
    model, other = Head(), Head()
    tide = attached(model)
    for _ in range(3):
        gradient(model, tide)
    state = tide.state_dict()
    expected = gradient(model, tide)
    tide.detach()
    tide = attached(other)
    tide.load_state_dict(state)
    assert torch.equal(gradient(other, tide), expected)
    tide.detach()


def test_probabilities_are_rounded_to_units_at_random_and_keep_their_means() -> None:
    unit, count = 2.0**-18, 1 << 17
    for p in (0.0, 3e-9, 1e-6, unit, 1.7e-3, 0.3):
        y = torch.full((count,), p, dtype=torch.float64).log()
        found = torch.cat([probabilities.rounded_of_logs(y, unit, seed) for seed in range(4)]).double()
        assert float((found - p).abs().max()) < unit + 1e-7 * p
        assert torch.equal(found / unit, (found / unit).round())
        share = p / unit - math.floor(p / unit)
        allowed = unit * (4.5 * (share * (1 - share) / found.numel()) ** 0.5 + 2.0**-24) + 1e-7 * p
        assert abs(float(found.mean()) - p) <= allowed, p


def test_rounding_follows_memory_the_seed_and_a_replays_number() -> None:
    y = torch.log_softmax(torch.randn(6, 50, 4, generator=torch.Generator().manual_seed(0)), 1)
    unit = 2.0**-18
    rounded = probabilities.rounded_of_logs(y, unit, 3)
    turned = y.transpose(1, 2).contiguous().transpose(1, 2)
    other = probabilities.rounded_of_logs(turned, unit, 3)
    assert other.stride() == turned.stride() and not torch.equal(other, rounded)
    assert torch.equal(other.transpose(1, 2), probabilities.rounded_of_logs(y.transpose(1, 2).contiguous(), unit, 3))
    numbers = [torch.tensor([number]) for number in (0, 0x9E3779B1)]
    still, moved = (probabilities.rounded_of_logs(y, unit, 3, number) for number in numbers)
    assert torch.equal(still, rounded) and not torch.equal(moved, rounded)
    assert not torch.equal(probabilities.rounded_of_logs(y, unit, 4), rounded)


def test_pieces_of_large_tensors_are_rounded_as_if_they_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.log_softmax(torch.randn(3, 500, generator=torch.Generator().manual_seed(0)), 1)
    whole = probabilities.rounded_of_logs(y, 2.0**-18, 3)
    monkeypatch.setattr(probabilities, "_PIECE", 77)
    assert torch.equal(probabilities.rounded_of_logs(y, 2.0**-18, 3), whole)


def test_there_and_back() -> None:
    y = torch.tensor([0.0, -1.0, -50.0, -1000.0, -torch.inf])
    p = probabilities.of_logs(y.double())
    assert p.dtype == torch.float32 and float(p[0]) == 1 and float(p[-1]) == float(p[-2]) == 0
    back = probabilities.to_logs(p, torch.float64)
    assert back.dtype == torch.float64 and torch.allclose(back[:3], y[:3].double()) and float(back[-1]) == -torch.inf
