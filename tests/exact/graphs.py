"""Small networks over sequences (4, 10, 16) that build, hook or use the autograd graph in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from networks import Apply, parameter
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import pack_padded_sequence

WIDTH = 16


def two_layers(run: Callable[[Apply, Tensor], Any], **more: Callable[[], nn.Module | nn.Parameter]) -> nn.Module:
    """A forward over the linear layers ``a`` and ``b``, and what else is named."""
    layers = {"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)}
    return Apply(run, **layers, **{name: make() for name, make in more.items()})


class Swish(torch.autograd.Function):
    """Saves an input, a parameter, a boolean and two outputs, as a custom function may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(x * weight)
        result = x * gate
        ctx.save_for_backward(x, weight, gate, result, x > 0)
        return result, gate

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, gate, result, positive = ctx.saved_tensors
        slope = gate * (1 - gate)
        through = grads[0] * x * slope + grads[1] * slope
        return grads[0] * gate * positive + through * weight, (through * x).sum((0, 1)) + 0.1 * result.sum()


class Clipped(torch.autograd.Function):
    """Works in place, and says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.clamp_(min=0))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (ctx.saved_tensors[0] > 0)


class Rebuilt(torch.autograd.Function):
    """Builds a graph inside its forward, so that its own node is not the newest one when it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.outer = F.leaky_relu(ctx.inner.tanh())
        ctx.save_for_backward(x, ctx.outer.detach(), x > 0.5)
        return ctx.outer.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, result, large = ctx.saved_tensors
        (inner,) = torch.autograd.grad(ctx.outer, ctx.inner, grad)
        return inner * large + grad * (x - result)


def custom_functions(m: Apply, x: Tensor) -> Tensor:
    result, gate = Swish.apply(F.relu(m.a(x)), m.scale)
    return F.hardtanh(Rebuilt.apply(m.b(Clipped.apply(result + gate))))


def energy(m: Apply, x: Tensor) -> list[Tensor]:
    """Forces as the gradient of an energy, taken inside forward: saves are read before their scope has closed."""
    x = x.detach().requires_grad_()
    total = F.softplus(m.b(F.leaky_relu(m.a(x)).abs().clamp(max=1.5))).sum()
    (force,) = torch.autograd.grad(total, x, create_graph=True)
    return [F.hardtanh(force), total.reshape(1)]


def gradient_as_feature(m: Apply, x: Tensor) -> Tensor:
    """A graph that lives and dies inside forward."""
    x = x.detach().requires_grad_()
    (feature,) = torch.autograd.grad(F.relu(m.a(x)).sum(), x)
    return F.hardtanh(m.b(F.relu(m.a(feature))))


def other_hooks(m: Apply, x: Tensor) -> Tensor:
    """Saved-tensor hooks of the model's own in the middle."""
    x = F.relu(m.a(x))
    with save_on_cpu():
        x = F.hardtanh(m.b(F.relu6(x)))
    return F.relu(m.a(x))


def tensor_hooks(m: Apply, x: Tensor) -> Tensor:
    x = m.a(x)
    x.register_hook(lambda grad: grad * 2)
    x = F.relu(x)
    x.retain_grad()
    x.register_hook(lambda grad: grad + 0.1)
    return F.hardtanh(m.b(x))


def overlapping_views(m: Apply, x: Tensor) -> list[Tensor]:
    x = m.a(x)
    windows = [x.unfold(1, 3, 1).abs(), F.leaky_relu(x.unfold(2, 4, 2)), x.unfold(1, 3, 2).clamp(-0.2, 0.2)]
    return [*windows, F.hardtanh(x.as_strided((4, 8, 16), (160, 16, 1), 16)), x.as_strided((20, 5), (3, 1)).abs()]


def transforms(m: Apply, x: Tensor) -> Tensor:
    """vmap, and a functional call with other weights."""
    x = torch.func.vmap(lambda row: F.relu(m.a(row)))(x)
    doubled = {name: 2 * value for name, value in m.b.named_parameters()}
    return F.hardtanh(torch.func.functional_call(m.b, doubled, (x,)).relu())


def packed_sequence(m: Apply, x: Tensor) -> Tensor:
    packed = pack_padded_sequence(m.a(x), torch.tensor([10, 7, 5, 2]), batch_first=True)
    return F.relu(m.rnn(packed)[0].data)


def complex_layers(m: Apply, x: Tensor) -> Tensor:
    z = m.complex(torch.complex(m.a(x).float(), m.b(x).float()))
    return F.relu(z.real) * z.abs().clamp(0.1, 2) + torch.view_as_real(z).relu().sum(-1)


def edited_between(m: Apply, x: Tensor) -> Tensor:
    """One memory through two gates, changed in place between them: another version, another tensor."""
    x = m.a(x)
    first = F.hardtanh(x.clone(), -0.5, 0.5)
    y = x.detach() * 1
    gated = y * m.b(x)
    y.sub_(0.3).mul_(-1)
    return m.b(first + F.leaky_relu(x.sub_(0.3).mul_(-1))) + gated.detach()


def backward_hooks() -> nn.Module:
    body = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU6())
    for layer in body.modules():
        layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 1.5,))
        layer.register_full_backward_hook(lambda module, inputs, outputs: None)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), body)


GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "custom functions": lambda: two_layers(custom_functions, scale=lambda: parameter(WIDTH)),
    "gradient inside forward": lambda: two_layers(energy),
    "gradient as a feature": lambda: two_layers(gradient_as_feature),
    "other saved-tensor hooks": lambda: two_layers(other_hooks),
    "tensor hooks": lambda: two_layers(tensor_hooks),
    "backward hooks": backward_hooks,
    "overlapping views": lambda: two_layers(overlapping_views),
    "function transforms": lambda: two_layers(transforms),
    "packed sequence": lambda: two_layers(packed_sequence, rnn=lambda: nn.GRU(WIDTH, 8, batch_first=True)),
    "complex layers": lambda: two_layers(complex_layers, complex=lambda: nn.Linear(16, 16, dtype=torch.complex64)),
    "edited between two gates": lambda: two_layers(edited_between),
}
