"""Saved tensors that change before backward: stock autograd refuses, and Lowtide must not give a wrong gradient.

Where only a mask, a shape or an index was stored, the change does no harm, and the gradient of the unchanged tensor is
right. Anywhere else it has to be an error, as in stock autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Apply
from torch import Tensor, nn
from train import assert_bit_equal

import lowtide

SHAPE = (4, 3, 8, 8)


def edit(tensor: Tensor) -> Tensor:
    """A change in place that turns signs, order and zeros around, and that autograd does not follow."""
    with torch.no_grad():
        if tensor.is_floating_point():
            return tensor.neg_().sub_(0.5)
        return tensor.logical_not_() if tensor.dtype == torch.bool else tensor.zero_()


# Each saves ``x``, its result or another tensor, and hands back the result and what was saved.
SAVES: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "leaky_relu": lambda x: (F.leaky_relu(x), x),
    "hardtanh": lambda x: (F.hardtanh(x), x),
    "abs": lambda x: (x.abs(), x),
    "relu": lambda x: (y := F.relu(x), y),
    "tanh": lambda x: (y := x.tanh(), y),
    "gelu": lambda x: (F.gelu(x), x),
    "max_pool": lambda x: (F.max_pool2d(x, 2), x),
    "max_pool, indices": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "avg_pool": lambda x: (F.avg_pool2d(x, 2), x),
    "square": lambda x: (x * x, x),
    "where": lambda x: (torch.where(mask := x.detach() > 0, x, 2 * x), mask),
    "product with a mask": lambda x: (x * (mask := (x.detach() > 0).to(x.dtype)), mask),
    "frozen convolution": lambda x: (F.conv2d(x, torch.ones(2, 3, 3, 3)), x),
    "convolution": lambda x: (F.conv2d(x, torch.ones(2, 3, 3, 3, requires_grad=True)), x),
}
# When the change comes: at once, with the op still unknown to Lowtide; after another op; or after forward.
MOMENTS = ("at once", "later in forward", "after forward")


def differentiate(save: Callable[[Tensor], tuple[Tensor, Tensor]], moment: str, *, attach: bool) -> dict[str, Tensor]:
    """The weight's gradient with an edit at some moment; with none at all if ``moment`` is empty."""
    torch.manual_seed(1)
    saved: list[Tensor] = []

    def run(m: Apply, x: Tensor) -> Tensor:
        output, kept = save(m.conv(x))
        saved.append(kept)
        if moment == "at once":
            output = output.clone() if kept is output else output
            edit(kept)
        result = F.softplus(output * 3)
        if moment == "later in forward":
            edit(kept)
        return result

    model = Apply(run, conv=nn.Conv2d(3, 3, 3, padding=1))
    if attach:
        lowtide.attach(model, "exact", min_size=64, check=True)
    loss = model(torch.randn(SHAPE)).square().mean()
    if moment == "after forward":
        edit(saved[0])
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", SAVES)
def test_changes_before_backward_are_harmless_or_refused(name: str, moment: str) -> None:
    expected = differentiate(SAVES[name], "", attach=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        differentiate(SAVES[name], moment, attach=False)
    try:
        got = differentiate(SAVES[name], moment, attach=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    assert_bit_equal(got, expected)


@pytest.mark.parametrize("name", ["tanh", "gelu", "square", "convolution"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_changes_of_values_are_refused_by_name(name: str, moment: str) -> None:
    with pytest.raises(lowtide.LowtideError, match=r"saved at \(model\):\w+\.\w+ is at version \d+; expected version"):
        differentiate(SAVES[name], moment, attach=True)


def test_a_step_before_backward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lowtide.attach(model, "exact", optimizer=optimizer, min_size=64, check=True)
    first, second = (model(torch.randn(4, 8)).square().mean() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(lowtide.LowtideError, match="modified by an inplace operation"):
        second.backward()
