"""Casts of parameters are made again in backward, and must be what forward used, however they came about."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from networks import Apply, conv_bn_relu, parameter, problem
from sequences import WIDTH, encoder, lora, recurrent
from torch import Tensor, nn
from train import Problem, assert_bit_equal, assert_exact, attached, plainly, train

import lowtide
from lowtide.capture.handles import Recast
from lowtide.errors import ModifiedError

Cast = Callable[[nn.Parameter], Tensor]
PICTURE = (4, 3, 12, 12)


def edited(weight: nn.Parameter) -> Tensor:
    cast = weight.double()
    with torch.no_grad():
        cast.clamp_(-0.1, 0.1)
    return cast


# From a square weight to a square matrix in double precision.
CASTS: dict[str, Cast] = {
    "cast": lambda w: w.double(),
    "cast of a transpose": lambda w: w.t().double(),
    "transpose of a cast": lambda w: w.double().t(),
    "rows of a cast": lambda w: torch.cat([w.double()[8:], w.double()[:8]]),
    "cast of rows": lambda w: torch.cat([w[8:].double(), w[:8].double()]),
    "cast of a row, expanded": lambda w: w[3].double().expand(WIDTH, WIDTH),
    "cast of an expanded row": lambda w: w[3].expand(WIDTH, WIDTH).double(),
    "cast into another order": lambda w: w.t().to(torch.float64, memory_format=torch.contiguous_format),
    "cast through bfloat16": lambda w: w.bfloat16().double(),
    "cast through float16 and a view": lambda w: w.half().t().double().t(),
    "cast and product": lambda w: w.double() * 2,
    "cast edited in place": lambda w: w.double().mul_(2),
    "cast edited under no_grad": edited,
}


@pytest.mark.parametrize("name", CASTS)
def test_casts_written_by_hand(name: str) -> None:
    def build() -> nn.Module:
        run = Apply(lambda m, x: F.linear(F.relu(m.first(x)).double(), CASTS[name](m.weight)))
        run.first, run.weight = nn.Linear(WIDTH, WIDTH), parameter(WIDTH, WIDTH)
        return run

    assert_exact(problem(build, 8, WIDTH))


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format, torch.preserve_format], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_casts_that_change_the_order_of_a_kernel(layout: str, order: torch.memory_format) -> None:
    def build() -> nn.Module:
        def run(m: Apply, x: Tensor) -> Tensor:
            return F.conv2d(F.relu(m.first(x)).bfloat16(), m.weight.to(torch.bfloat16, memory_format=order))

        return Apply(run, first=nn.Conv2d(3, 8, 3), weight=parameter(4, 8, 3, 3))

    assert_exact(problem(build, *PICTURE, channels_last=layout == "channels_last"))


@pytest.fixture
def recasts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sites at which backward had a cast made again."""
    seen: list[str] = []
    restore = Recast.restore

    def count(self: Recast) -> Tensor:
        seen.append(self.call_path)
        return restore(self)

    monkeypatch.setattr(Recast, "restore", count)
    return seen


MODELS: dict[str, Problem] = {
    "convolutions": problem(lambda: conv_bn_relu(inplace=True), *PICTURE, bf16=True),
    "encoder": problem(encoder, 4, 10, WIDTH, bf16=True),
    "LSTM": problem(lambda: recurrent(nn.LSTM), 4, 10, WIDTH, bf16=True),
    "LoRA": problem(lora, 4, 10, WIDTH, bf16=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_autocast_has_its_casts_made_again(name: str, recasts: list[str]) -> None:
    assert_exact(MODELS[name])
    assert recasts


@pytest.mark.parametrize("name", MODELS)
def test_casts_are_kept_on_request(name: str, recasts: list[str]) -> None:
    assert_exact(MODELS[name], attached(recast=False))
    assert not recasts


class Autocast(nn.Module):
    """Autocast inside the model: another dtype, without its cache, or switched off and on."""

    def __init__(self, body: nn.Module, *, dtype: torch.dtype = torch.bfloat16, cache: bool = True) -> None:
        super().__init__()
        self.body, self.dtype, self.cache = body, dtype, cache

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, cache_enabled=self.cache):
            x = self.body(x)
            with torch.autocast("cpu", enabled=False):
                y = self.body(x.float())
            return self.body(y) + y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no cache"])
def test_autocast_inside_a_model(dtype: torch.dtype, cache: bool, recasts: list[str]) -> None:
    def build() -> nn.Module:
        body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return Autocast(body, dtype=dtype, cache=cache)

    assert_exact(problem(build, 8, WIDTH))
    assert recasts


def test_one_autocast_around_all_steps() -> None:
    """Its cache then outlives the optimizer's step, and forward goes on with the casts of the first step."""
    whole = problem(lambda: conv_bn_relu(inplace=True), *PICTURE, bf16=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = train(whole, plainly)
    with torch.autocast("cpu", torch.bfloat16):
        trace, _ = train(whole, attached())
    assert_bit_equal(trace, expected)


def change(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def change_data(weight: nn.Parameter) -> None:
    weight.data.mul_(0.5)


def gradients_after(edit: Callable[[nn.Parameter], None], *, method: str | None, recast: bool) -> dict[str, Tensor]:
    """Gradients of a forward whose weights change before its backward; plain if no method is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    if method is not None:
        lowtide.attach(model, method, min_size=64, check=True, recast=recast)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(torch.randn(8, WIDTH)).float().square().mean()
    for weight in model.parameters():
        edit(weight)
    loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("edit", [change, change_data], ids=["in place", "through .data"])
def test_kept_casts_do_not_mind_a_change_of_the_weights(edit: Callable[[nn.Parameter], None]) -> None:
    """Stock autograd holds the cast, so a change before backward does not matter to it; with recast=False nor to us."""
    expected = gradients_after(edit, method=None, recast=True)
    assert_bit_equal(gradients_after(edit, method="exact", recast=False), expected)


def test_weights_that_change_before_backward_are_named() -> None:
    with pytest.raises(ModifiedError, match=r"bfloat16 cast was saved at 2 has changed since forward.*recast=False"):
        gradients_after(change, method="exact", recast=True)
