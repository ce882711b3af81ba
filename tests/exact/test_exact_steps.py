"""Training is bit-equal for many ways of running a step: accumulation, several graphs, double backward, checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from networks import Apply, conv_bn_relu, frozen, functional_cnn, mean_square, pools, problem
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from train import Problem, Step, assert_exact, one_backward

precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
Batch = tuple[Tensor, ...]
PICTURE = (4, 3, 12, 12)


def halves(batch: Batch) -> list[Batch]:
    return [tuple(half) for half in zip(*(item.chunk(2) for item in batch), strict=True)]


def accumulate(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    return [value for half in (*halves(batch), batch) for value in one_backward(problem, model, half)]


def sum_of_losses(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    losses = [problem.forward(model, half) for half in (*halves(batch), batch)]
    torch.stack(losses).sum().backward()
    return [loss.detach() for loss in losses]


def graphs_in_reverse(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    losses = [problem.forward(model, half) for half in halves(batch)]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def retain_graph(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    loss = problem.forward(model, batch)
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    (loss * 3).backward()
    return [loss.detach(), *first]


def scaled_loss(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """As a gradient scaler does: by a large power of two, and back."""
    loss = problem.forward(model, batch)
    (loss * 65536.0).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 / 65536.0)
    return [loss.detach()]


def forwards_in_between(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Evaluation while a graph waits for its backward."""
    loss = problem.forward(model, batch)
    with torch.no_grad():
        without = problem.forward(model, batch)
    with torch.inference_mode():
        inference = problem.forward(model, batch).clone()
    loss.backward()
    return [loss.detach(), without, torch.tensor(inference.item())]


def evaluation_with_gradients(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Evaluation mode, gradients of the input too."""
    model.eval()
    inputs = [item.clone().requires_grad_() for item in batch]
    loss = problem.forward(model, tuple(inputs))
    loss.backward()
    model.train()
    return [loss.detach(), *(item.grad for item in inputs if item.grad is not None)]


def failing_forward(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """A forward that raises in the middle is abandoned, and the next one is as good as any."""

    def fail(*args: object) -> None:
        raise ArithmeticError("half way")

    last = list(model.modules())[-1]
    handle = last.register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError, match="half way"):
        problem.forward(model, batch)
    handle.remove()
    return one_backward(problem, model, batch)


def backward_in_a_thread(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    loss = problem.forward(model, batch)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return [loss.detach()]


def part_of_the_gradient(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """autograd.grad with respect to the first weight and the last, twice, then the rest."""
    loss = problem.forward(model, batch)
    ends = [list(model.parameters())[index] for index in (0, -1)]
    grads = [torch.autograd.grad(loss, end, retain_graph=True)[0] for end in ends]
    loss.backward()
    return [loss.detach(), *grads]


def submodules_only(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """The root is never called: each child opens and closes on its own, and what lies between is not seen."""
    assert isinstance(model, nn.Sequential)
    with torch.autocast("cpu", torch.bfloat16, enabled=problem.bf16):
        x = batch[0]
        for layer in model:
            x = F.softplus(layer(x))
        loss = x.float().square().mean()
    loss.backward()
    return [loss.detach()]


def checkpoint_around(problem: Problem, model: nn.Module, batch: Batch, *, use_reentrant: bool) -> list[Tensor]:
    whole = Apply(lambda m, *inputs: checkpoint(model, *inputs, use_reentrant=use_reentrant))
    loss = problem.forward(whole, tuple(item.clone().requires_grad_() for item in batch))
    loss.backward()
    return [loss.detach()]


STEPS: dict[str, Step] = {
    step.__name__: step
    for step in (
        accumulate,
        sum_of_losses,
        graphs_in_reverse,
        retain_graph,
        scaled_loss,
        forwards_in_between,
        evaluation_with_gradients,
        failing_forward,
        backward_in_a_thread,
        part_of_the_gradient,
        submodules_only,
    )
}
STEPS["checkpoint_around, reentrant"] = partial(checkpoint_around, use_reentrant=True)
STEPS["checkpoint_around, not reentrant"] = partial(checkpoint_around, use_reentrant=False)


def with_dropout() -> nn.Module:
    return nn.Sequential(*conv_bn_relu(inplace=True), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(8, 4, 3), nn.ReLU6())


@precisions
@pytest.mark.parametrize("name", STEPS)
def test_ways_to_run_a_step(name: str, bf16: bool) -> None:
    checkpointed = name.startswith("checkpoint")
    coded = set() if checkpointed else {"bitmask", "window_index", "shape"}
    session = assert_exact(problem(with_dropout, *PICTURE, bf16=bf16), step=STEPS[name], coded=coded)
    assert bool(session.ledger.sites) != checkpointed, "what a checkpoint makes again in backward is left alone"


def gradient_penalty(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """Differentiate the gradient of the input: backward of backward reads the stand-ins too."""
    inputs = tuple(item.clone().requires_grad_() for item in batch)
    loss = problem.forward(model, inputs)
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    penalty = torch.stack([grad.float().square().sum() for grad in grads]).sum()
    (loss + 10 * penalty).backward()
    return [loss.detach(), penalty.detach(), *(item.grad for item in inputs if item.grad is not None)]


def hessian_vector(problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
    """The gradient of the squared norm of the weights' gradient."""
    loss = problem.forward(model, batch)
    grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()
    return [loss.detach(), *(grad.detach() for grad in grads)]


def smooth() -> nn.Module:
    layers = (nn.Conv2d(3, 8, 3), nn.Softplus(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), nn.Tanh(), nn.GroupNorm(2, 8))
    return nn.Sequential(*layers, nn.SiLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(72, 8), nn.GELU())


def many_gates() -> nn.Module:
    """The gates that are stored as masks, in one chain; torch has no second derivative of hardsigmoid."""

    def run(m: Apply, x: Tensor) -> Tensor:
        x = F.leaky_relu(m.first(x))
        x = m.second(F.hardtanh(x) + F.relu6(x) + x.abs().clamp(0.05, 0.9))
        return (F.softshrink(x, 0.01) + F.hardshrink(x, 0.02)) * F.threshold(x, 0.01, -1.0)

    return Apply(run, first=nn.Conv2d(3, 8, 3), second=nn.Conv2d(8, 8, 3))


TWICE: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "smooth": (smooth, {"bitmask", "shape"}),
    "ReLU": (with_dropout, {"bitmask", "window_index", "shape"}),
    "gates": (many_gates, {"bitmask"}),
    "functional calls only": (functional_cnn, {"bitmask", "window_index", "shape"}),
    "frozen layers": (frozen, {"bitmask", "shape"}),
}


@precisions
@pytest.mark.parametrize("step", [gradient_penalty, hessian_vector], ids=lambda step: step.__name__)
@pytest.mark.parametrize("name", TWICE)
def test_double_backward(name: str, step: Step, bf16: bool) -> None:
    build, coded = TWICE[name]
    assert_exact(problem(build, *PICTURE, bf16=bf16), step=step, steps=3, coded=coded)


def test_double_backward_through_pools() -> None:
    """Without max_unpool2d, which has no second derivative in torch."""

    def run(m: Apply, x: Tensor) -> list[Tensor]:
        return [output for index, output in enumerate(m.pools(x)) if index != 8]

    penalized = Problem(
        lambda: Apply(run, pools=pools()), lambda generator: (torch.randn(PICTURE, generator=generator),), mean_square
    )
    assert_exact(penalized, step=gradient_penalty, steps=3, coded={"window_index", "shape"})
