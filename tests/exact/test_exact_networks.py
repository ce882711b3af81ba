"""Training is bit-equal for many ways of writing a model: functional, in place, shared, frozen, recurrent, complex."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from graphs import GRAPHS
from networks import PICTURES, conv_bn_relu, convolution, mean_square, problem
from sequences import LENGTH, SEQUENCES, WIDTH
from torch import nn
from torch.optim import Optimizer
from train import Problem, assert_bit_equal, assert_exact, attached, codecs_of, plainly, train

import lowtide
from lowtide import Session

precisions = pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])


@precisions
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("name", PICTURES)
def test_networks_over_pictures(name: str, layout: str, bf16: bool) -> None:
    build, coded = PICTURES[name]
    assert_exact(problem(build, 4, 3, 12, 12, bf16=bf16, channels_last=layout == "channels_last"), coded=coded)


@precisions
@pytest.mark.parametrize("name", SEQUENCES)
def test_networks_over_sequences(name: str, bf16: bool) -> None:
    build, coded = SEQUENCES[name]
    assert_exact(problem(build, 4, LENGTH, WIDTH, bf16=bf16), coded=coded, optimizer="adamw")


@precisions
@pytest.mark.parametrize("dims", [1, 3])
def test_convolutions_over_lines_and_volumes(dims: int, bf16: bool) -> None:
    lines_or_volumes = problem(partial(convolution, dims), 4, 3, *(8,) * dims, bf16=bf16)
    assert_exact(lines_or_volumes, coded={"bitmask", "window_index", "shape"})


@precisions
@pytest.mark.parametrize("name", GRAPHS)
def test_networks_with_graphs_of_their_own(name: str, bf16: bool) -> None:
    assert_exact(problem(GRAPHS[name], 4, LENGTH, WIDTH, bf16=bf16), coded={"bitmask"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PICTURES)
def test_networks_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    build, coded = PICTURES[name]
    converted = Problem(
        lambda: build().to(dtype),
        lambda generator: (torch.randn(4, 3, 12, 12, generator=generator).to(dtype),),
        mean_square,
    )
    assert_exact(converted, steps=2, coded=coded)


@contextmanager
def parts_attached(model: nn.Module, optimizer: Optimizer) -> Iterator[Session]:
    """A session for each child but the last, which stays plain; their graphs are one."""
    sessions = [lowtide.attach(child, "exact", min_size=64, check=True) for child in list(model.children())[:-1]]
    yield sessions[0]
    assert all(codecs_of(session) for session in sessions)
    for session in sessions:
        session.detach()


@precisions
def test_parts_with_sessions_of_their_own(bf16: bool) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(conv_bn_relu(inplace=True, channels=channels) for channels in (3, 8, 8)))

    assert_exact(problem(build, 4, 3, 12, 12, bf16=bf16), parts_attached)


@pytest.mark.parametrize("min_size", [0, 1 << 20])
@pytest.mark.parametrize("name", [*PICTURES, *SEQUENCES])
def test_any_smallest_size(name: str, min_size: int) -> None:
    """Down to scalars, and up to where nothing is large enough."""
    if name in PICTURES:
        task = problem(PICTURES[name][0], 2, 3, 12, 12)
    else:
        task = problem(SEQUENCES[name][0], 2, LENGTH, WIDTH)
    session = assert_exact(task, attached(min_size=min_size), steps=2)
    assert not min_size or all(e.codec == "kept" for e in session.ledger.sites.values())


@pytest.mark.parametrize("name", ["functional calls only", "pools and pads", "views with gaps", "frozen layers"])
def test_an_empty_batch(name: str) -> None:
    empty = problem(PICTURES[name][0], 0, 3, 12, 12)
    expected, _ = train(empty, plainly, steps=1)
    trace, _ = train(empty, attached(min_size=0), steps=1)
    assert_bit_equal(trace, expected)
