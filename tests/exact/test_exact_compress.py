"""A ``with compress(...)`` block is exact too: around forward, loss and backward, or with backward after it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import PICTURES, problem
from sequences import LENGTH, SEQUENCES, WIDTH
from test_exact_zoo import make_problem
from torch import Tensor, nn
from train import Problem, assert_bit_equal, codecs_of, plainly, train

import lowtide
from lowtide.app import zoo

Batch = tuple[Tensor, ...]
places = pytest.mark.parametrize("backward", ["inside", "outside"])
precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


class Compressed:
    """A step in a block of its own; notes the codecs at work, and that backward leaves nothing held, not even to gc."""

    def __init__(self, *, backward: str, model: bool = True) -> None:
        self.inside, self.model = backward == "inside", model
        self.codecs: set[str] = set()
        self.reasons: set[str] = set()

    def __call__(self, problem: Problem, model: nn.Module, batch: Batch) -> list[Tensor]:
        with lowtide.compress(model if self.model else None, "exact", min_size=64, check=True) as session:
            loss = problem.forward(model, batch)
            if self.inside:
                loss.backward()
        if not self.inside:
            loss.backward()
        value = loss.detach().clone()
        del loss
        self.codecs |= codecs_of(session)
        self.reasons |= {entry.reason for entry in session.ledger.sites.values()}
        assert (session.ledger.raw, session.ledger.held) == (0, 0)
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        return [value]


def assert_exact_in_blocks(problem: Problem, step: Compressed, *, coded: set[str], steps: int = 2) -> None:
    expected, _ = train(problem, plainly, steps=steps)
    trace, _ = train(problem, plainly, steps=steps, step=step)
    assert_bit_equal(trace, expected)
    assert coded <= step.codecs, f"the test is empty unless {coded} are at work; at work were {step.codecs}"


@pytest.mark.parametrize(("backward", "bf16"), [("inside", False), ("outside", True)], ids=["inside", "outside, bf16"])
@pytest.mark.parametrize("name", zoo.names())
def test_zoo_models_in_blocks(name: str, backward: str, bf16: bool) -> None:
    assert_exact_in_blocks(make_problem(name, bf16=bf16), Compressed(backward=backward), coded=set(), steps=1)


@places
@pytest.mark.parametrize("name", PICTURES)
def test_networks_over_pictures_in_blocks(name: str, backward: str) -> None:
    build, coded = PICTURES[name]
    assert_exact_in_blocks(problem(build, 4, 3, 12, 12), Compressed(backward=backward), coded=coded)


@places
@pytest.mark.parametrize("name", SEQUENCES)
def test_networks_over_sequences_in_blocks(name: str, backward: str) -> None:
    build, coded = SEQUENCES[name]
    assert_exact_in_blocks(problem(build, 4, LENGTH, WIDTH, bf16=True), Compressed(backward=backward), coded=coded)


@places
@pytest.mark.parametrize("name", ["functional calls only", "in-place ReLU after batch norm", "frozen layers"])
def test_blocks_without_a_model(name: str, backward: str) -> None:
    build, coded = PICTURES[name]
    anonymous = Compressed(backward=backward, model=False)
    assert_exact_in_blocks(problem(build, 4, 3, 12, 12), anonymous, coded=coded)


def pixel_loss(model: nn.Module, images: Tensor, target: Tensor) -> Tensor:
    """Ops outside the model, whose saves a block sees too."""
    return F.cross_entropy(F.max_pool2d(F.relu(model(images)), 2), target)


@precisions
@places
def test_losses_in_blocks(backward: str, bf16: bool) -> None:
    segmentation = Problem(
        lambda: nn.Conv2d(3, 5, 3, padding=1),
        lambda generator: (
            torch.randn(4, 3, 12, 12, generator=generator),
            torch.randint(5, (4, 6, 6), generator=generator),
        ),
        pixel_loss,
        bf16,
    )
    coded = {"bitmask", "shape", "window_index"}
    assert_exact_in_blocks(segmentation, Compressed(backward=backward), coded=coded)


def test_double_backward_in_a_block() -> None:
    """Backward inside the block with a graph of its own: what it saves is left alone."""

    def score(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = model(x).square().mean()
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        return output + grad.square().sum()

    build, coded = PICTURES["functional calls only"]
    penalized = Problem(build, lambda generator: (torch.randn(4, 3, 12, 12, generator=generator),), score)
    for backward in ("inside", "outside"):
        step = Compressed(backward=backward)
        assert_exact_in_blocks(penalized, step, coded=coded)
        assert "saved during backward" in step.reasons


def test_several_forwards_in_one_block() -> None:
    def score(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([model(part).square().mean() for part in x.split(1)]).sum()

    build, coded = PICTURES["functional calls only"]
    repeated = Problem(build, lambda generator: (torch.randn(4, 3, 12, 12, generator=generator),), score)
    assert_exact_in_blocks(repeated, Compressed(backward="outside"), coded=coded)
