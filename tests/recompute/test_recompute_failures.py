"""What goes wrong around modules that are run again: interrupts, second runs that differ, changes in between."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
from recompute_nets import attach, images, make
from torch import Tensor, nn

from lowtide.errors import ModifiedError, RecomputeError


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_forward_that_is_broken_off_does_not_harm_the_next(error: BaseException) -> None:
    class Fragile(nn.Module):
        fails = True

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x).tanh()
            if self.fails:
                raise error
            return x.sigmoid()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Fragile(), nn.Linear(16, 4))
    session = attach(model, recompute="1")
    x = torch.randn(8, 16)
    with pytest.raises(type(error)):
        model(x)
    Fragile.fails = False
    other = torch.randn(8, 16, requires_grad=True)
    other.tanh().sum().backward()
    torch.testing.assert_close(other.grad, 1 - other.detach().tanh() ** 2)
    model(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    session.detach()
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(g, p.grad) for g, p in zip(got, model.parameters(), strict=True))  # type: ignore[arg-type]


def test_an_interrupt_that_the_model_itself_catches() -> None:
    """The module that was broken off is no longer at work: what the rest of the model saves is not its."""

    class Stops(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.tanh()
            raise KeyboardInterrupt

    class Catches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.linear = Stops(), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(KeyboardInterrupt):
                self.part(x)
            result: Tensor = self.linear(x).sigmoid()
            return result

    model = Catches()
    attach(model, recompute="part")
    x = torch.randn(8, 16)
    model(x).sum().backward()
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = torch.autograd.grad(model.linear(x).sigmoid().sum(), list(model.parameters()))
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seen", r"1: run again in backward, the module saved other tensors than the \d that it saved in forward: "
         r"tensor \d is now float32 of shape \(4, 16\), was float32 of shape \(8, 16\)"),
        ("fewer", r"it saved 2 tensors.*boundary='exact'"),
    ],
)  # fmt: skip
def test_a_second_run_that_differs_is_an_error(change: str, message: str) -> None:
    class Module(nn.Module):
        changed = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            if self.changed and change == "fewer":
                return x
            return (x[:4] if self.changed else x).tanh()

    model = nn.Sequential(nn.Linear(16, 16), Module())
    attach(model, recompute="1")
    loss = model(torch.randn(8, 16)).sum()
    Module.changed = True
    with pytest.raises(RecomputeError, match=message):
        loss.backward()


def test_parameters_that_changed_in_between_are_noticed() -> None:
    model = make()
    attach(model)
    loss = model(images()).sum()
    with torch.no_grad():
        model.blocks[1].conv.weight.add_(1)
    with pytest.raises(ModifiedError, match=r"blocks.1: a parameter has changed since forward"):
        loss.backward()


def test_an_input_that_was_changed_in_between_is_noticed_where_it_is_kept() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
    attach(model, recompute="1")
    x = model[0](torch.randn(64, 64))
    loss = model[1](x).sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(ModifiedError, match="modified by an inplace operation"):
        loss.backward()


def test_a_saved_tensor_that_the_module_changes_in_place_is_noticed() -> None:
    class Spoils(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh()
            with torch.no_grad():
                y.add_(1)
            return y.exp()

    model = nn.Sequential(nn.Linear(64, 64), Spoils())
    attach(model, recompute="1")
    loss = model(torch.randn(64, 64)).sum()
    with pytest.raises(ModifiedError, match=r"1: a tensor of shape .* that the module saved was modified in place"):
        loss.backward()


class Catching(nn.Module):
    """Keeps what ends its second run, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.caught: list[Exception] = []
        self.inside: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.inside.append(weakref.ref(y))
        try:
            result: Tensor = self.part(y)
        except Exception as error:
            self.caught.append(error)
            result = y.sigmoid().tanh()
        return result


def test_what_ends_a_second_run_keeps_nothing_alive() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Catching())
    block = model[1]
    x = torch.randn(8, 16)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    block.inside.clear()
    attach(model, recompute="1")
    gc.disable()
    try:
        model(x).sum().backward()
        assert len(block.caught) == 1, "the run was ended inside of its part, and once more after that"
        assert len(block.inside) == 2 and not any(ref() is not None for ref in block.inside)
    finally:
        gc.enable()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]
