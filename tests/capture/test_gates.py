"""ReLU's backward through a payload: the branches of plain training, whoever asks and however."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.gates import Gate


class Net(nn.Module):
    """Two branches: a ReLU whose result a layer reads too, and one of which only the mask is wanted."""

    def __init__(self, relu: Callable[[Tensor], Tensor], norm: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.second(self.relu(self.norm(self.first(x)))))


RELUS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "module": nn.ReLU,
    "in place": lambda: nn.ReLU(inplace=True),
    "function": lambda: torch.relu,
}


def batch(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def gradients(model: nn.Module, gradient: Callable[[Tensor], Tensor] = torch.ones_like, **options: Any) -> list[Tensor]:
    """Of weights and input, for a gradient that is not the same everywhere."""
    x = batch().requires_grad_()
    y = model(x)
    given = gradient(y.detach() * 3 + 1)
    return list(torch.autograd.grad(y, [x, *model.parameters()], given, **options))


@pytest.fixture
def gates(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of the gates that backward was handed."""
    met: list[str] = []
    original = Gate.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def noted(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        met.append(str(func).removeprefix("aten."))
        return original(cls, func, types, args, kwargs)

    monkeypatch.setattr(Gate, "__torch_dispatch__", classmethod(noted))
    return met


def passes(met: list[str]) -> int:
    return met.count("threshold_backward.default")


@pytest.mark.parametrize("method", ["fixed", "lossless", "actnn", "budget"])
@pytest.mark.parametrize("relu", RELUS)
def test_the_gradient_of_the_input_is_exact(relu: str, method: str, gates: list[str]) -> None:
    """No norm: nothing but masks and weights is on the way to the input."""
    torch.manual_seed(0)
    model = Net(RELUS[relu]())
    expected = gradients(copy.deepcopy(model))
    lowtide.attach(model, method, min_size=0)
    assert torch.equal(gradients(model)[0], expected[0])
    assert passes(gates) == (1 if method == "lossless" else 2), "lossless says where values are not zero, as a tensor"


def test_with_a_norm_in_one_payload(gates: list[str]) -> None:
    torch.manual_seed(0)
    model = Net(nn.ReLU(), norm=True)
    expected = gradients(copy.deepcopy(model))
    tide = lowtide.attach(model, "budget", min_size=0)
    found = gradients(model)
    assert passes(gates) == 2
    assert any(entry.codec == "in sz" for entry in tide.ledger.sites.values())
    assert all(
        float((a - b).norm()) < 0.1 * float(b.norm()) for a, b in zip(found, expected, strict=True) if b.norm() > 1e-3
    )


@pytest.mark.parametrize("coder", ["blocks", "rans"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_and_coder(dtype: torch.dtype, coder: str) -> None:
    torch.manual_seed(0)
    layers = nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 8)
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(256, 24, dtype=dtype, requires_grad=True)
    (expected,) = torch.autograd.grad(copy.deepcopy(model)(x).sum(), x)
    lowtide.attach(model, "fixed", coder=coder, min_size=0)
    (found,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(found, expected)


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nan and inf": lambda g: g.where(torch.rand_like(g) < 0.9, torch.nan).where(torch.rand_like(g) < 0.9, torch.inf),
    "of another layout": lambda g: g.contiguous(memory_format=torch.channels_last),
    "expanded": lambda g: g[:1, :, :1, :1].expand_as(g),
    "of every other value": lambda g: torch.stack([g, g], -1)[..., 0],
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_as_they_come(kind: str) -> None:
    x = batch().requires_grad_()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    expected = copy.deepcopy(model)
    lowtide.attach(model, "fixed", min_size=0)
    found = []
    for net in (model, expected):
        torch.manual_seed(0)
        y = net(x)
        between: list[Tensor] = []
        y.grad_fn.next_functions[0][0].register_prehook(lambda grads, seen=between: seen.append(grads[0]))  # type: ignore[union-attr]
        y.backward(GRADIENTS[kind](torch.randn_like(y)))
        found.append(between[0])
    assert torch.equal(found[0].nan_to_num(7), found[1].nan_to_num(7)) and found[0].stride() == found[1].stride()


def test_second_derivatives(gates: list[str]) -> None:
    """Whoever will differentiate it is handed the mask."""
    model = Net(torch.relu)
    exact = copy.deepcopy(model)
    lowtide.attach(model, "fixed", min_size=0)
    found = []
    for net in (model, exact):
        x = batch().requires_grad_()
        (first,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        assert passes(gates) == (0 if net is model else 2), "the second time nobody will"
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert float((found[0] - found[1]).norm()) < 0.05 * float(found[1].norm())


def test_many_gradients_at_once() -> None:
    model = Net(torch.relu)
    exact = copy.deepcopy(model)
    lowtide.attach(model, "fixed", min_size=0)
    x = batch().requires_grad_()
    found = []
    for net in (model, exact):
        y = net(x)
        many = torch.randn(3, *y.shape, generator=torch.Generator().manual_seed(0))
        found.append(torch.autograd.grad(y, x, many, is_grads_batched=True)[0])
    assert torch.equal(*found)


def test_backward_twice_and_under_autocast(gates: list[str]) -> None:
    model = Net(torch.relu)
    lowtide.attach(model, "fixed", min_size=0)
    x = batch().requires_grad_()
    y = model(x)
    first = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    with torch.autocast("cpu", torch.bfloat16):
        again = torch.autograd.grad(y, x, torch.ones_like(y))[0]
    assert torch.equal(first, again) and passes(gates) == 4


def test_a_mode_that_counts_sees_what_it_sees_in_plain_training() -> None:
    model = Net(torch.relu)
    counted = []
    for net in (copy.deepcopy(model), model):
        if net is model:
            lowtide.attach(model, "fixed", min_size=0)
        with FlopCounterMode(display=False) as flops:
            net(batch()).sum().backward()
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1]


def test_a_look_at_what_was_saved_is_a_look_at_a_mask() -> None:
    model = Net(torch.relu)
    lowtide.attach(model, "fixed", min_size=0)
    y = model(batch())
    seen: Any = y.grad_fn
    assert type(seen._saved_result) is Tensor
    with torch.no_grad():
        assert torch.equal(seen._saved_result > 0, y > 0)


def test_nothing_is_kept_alive() -> None:
    model = Net(torch.relu)
    tide = lowtide.attach(model, "fixed", min_size=0)
    y = model(batch())
    y.sum().backward()
    assert tide.ledger.held == 0
