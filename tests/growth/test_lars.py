"""LARS against steps computed by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowtide.errors import OptimizerError
from lowtide.optim import LARS


def parameter(*values: float, grad: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.tensor([values], dtype=torch.float64))
    made.grad = torch.tensor([grad], dtype=torch.float64)
    return made


def test_two_steps_by_hand() -> None:
    """|w| = 5, |g| = 10; then the weights of the first step with another gradient."""
    w = parameter(3.0, 4.0, grad=[6.0, 8.0])
    optimizer = LARS([w], lr=2.0, momentum=0.5, weight_decay=0.1, trust=0.01)
    optimizer.step()
    rate = 0.01 * 5 / (10 + 0.1 * 5)
    first = [2.0 * rate * (6.0 + 0.1 * 3.0), 2.0 * rate * (8.0 + 0.1 * 4.0)]
    assert w.tolist() == [pytest.approx([3.0 - first[0], 4.0 - first[1]], rel=1e-14)]
    weights = w.detach().flatten().tolist()
    norm = (weights[0] ** 2 + weights[1] ** 2) ** 0.5
    w.grad = torch.tensor([[0.0, -1.0]], dtype=torch.float64)
    optimizer.step()
    rate = 0.01 * norm / (1.0 + 0.1 * norm)
    second = [
        0.5 * first[0] + 2.0 * rate * (0.0 + 0.1 * weights[0]),
        0.5 * first[1] + 2.0 * rate * (-1.0 + 0.1 * weights[1]),
    ]
    assert w.tolist() == [pytest.approx([weights[0] - second[0], weights[1] - second[1]], rel=1e-14)]


def test_a_step_moves_a_layer_by_a_share_of_its_norm_whatever_the_gradient() -> None:
    for scale in (1e-6, 1.0, 1e6):
        w = parameter(3.0, 4.0, grad=[0.6 * scale, -0.8 * scale])
        LARS([w], lr=1.0, trust=0.001).step()
        moved = (w.detach() - torch.tensor([[3.0, 4.0]], dtype=torch.float64)).norm()
        assert float(moved) == pytest.approx(0.001 * 5, rel=1e-9)


def test_the_learning_rate_of_a_step_stays_with_it() -> None:
    """It stands inside the momentum: steps under way go on at their own rate when it is lowered to nothing."""
    w = parameter(3.0, 4.0, grad=[1.0, 0.0])
    optimizer = LARS([w], lr=1.0, momentum=0.5)
    optimizer.step()
    first = 3.0 - float(w[0, 0].detach())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert 3.0 - first - float(w[0, 0].detach()) == pytest.approx(0.5 * first)


def test_biases_and_scales_take_a_plain_step_unless_told_otherwise() -> None:
    def step(exclude: bool) -> float:
        bias = nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64))
        bias.grad = torch.tensor([6.0, 8.0], dtype=torch.float64)
        LARS([bias], lr=0.5, weight_decay=0.1, trust=0.01, exclude_1d=exclude).step()
        return 3.0 - float(bias[0].detach())

    assert step(True) == pytest.approx(0.5 * 6.0)
    assert step(False) == pytest.approx(0.5 * 0.01 * 5 / 10.5 * 6.3)


@pytest.mark.parametrize(("weights", "gradient"), [((0.0, 0.0), [6.0, 8.0]), ((3.0, 4.0), [0.0, 0.0])])
def test_a_norm_of_zero_means_rate_one(weights: tuple[float, ...], gradient: list[float]) -> None:
    w = parameter(*weights, grad=gradient)
    LARS([w], lr=0.5, weight_decay=0.1).step()
    expected = [value - 0.5 * (slope + 0.1 * value) for value, slope in zip(weights, gradient, strict=True)]
    assert w.tolist() == [pytest.approx(expected)]


def test_parameters_without_gradient_stay_and_the_state_goes_into_checkpoints() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model[0].bias.requires_grad_(False)
    before = model[0].bias.clone()
    optimizer = LARS(model.parameters(), lr=1.0, weight_decay=1e-4, trust=0.02)
    x = torch.randn(32, 8)

    def step(model: nn.Module, optimizer: LARS) -> float:
        def closure() -> float:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            return float(loss.detach())

        return optimizer.step(closure)

    losses = [step(model, optimizer) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model[0].bias, before)
    twin = copy.deepcopy(model)
    other = LARS(twin.parameters(), lr=9.0)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [step(model, optimizer) for _ in range(3)] == [step(twin, other) for _ in range(3)]


def test_mistakes_are_refused() -> None:
    w = parameter(1.0, grad=[1.0])
    with pytest.raises(OptimizerError, match="LARS: trust has to be 0 or more, got -1"):
        LARS([w], lr=1.0, trust=-1)
    with pytest.raises(OptimizerError, match="LARS: lr has to be 0 or more, got nan"):
        LARS([{"params": [w], "lr": float("nan")}], lr=1.0)
    table = nn.Embedding(4, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="LARS does not take sparse gradients"):
        LARS(table.parameters(), lr=1.0).step()
