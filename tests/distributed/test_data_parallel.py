"""DistributedDataParallel on two ranks: exact is bit-equal, parameters are alike, noise is within what is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_nets import batch, loss, make
from ranks import Ranks, gather
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import lowtide

WAYS = ("before", "wrapped", "inner")  # attached before the model is wrapped, to the wrapper, to the model inside


def start(
    model: nn.Module, method: str | None, way: str = "wrapped", wrapper: dict[str, Any] | None = None, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, lowtide.Session | None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options = {"optimizer": optimizer, "min_size": 0, **options}
    tide = lowtide.attach(model, method, **options) if method and way == "before" else None
    wrapped = DistributedDataParallel(model, **(wrapper or {}))
    if method and tide is None:
        tide = lowtide.attach(wrapped if way == "wrapped" else model, method, **options)
    return wrapped, optimizer, tide


def accumulate(
    model: nn.Module, kind: str, number: int, *, passes: int = 1, autocast: bool = False, same: bool = False
) -> None:
    for part in range(passes):
        x, y = batch(kind, 10 * number + part, 0 if same else dist.get_rank())
        is_last = part == passes - 1
        with contextlib.nullcontext() if is_last else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = loss(model(x), y)
            found.backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    kind: str,
    method: str | None,
    *,
    steps: int = 3,
    passes: int = 1,
    autocast: bool = False,
    spare: bool = False,
    hook: Callable[..., Any] | None = None,
    **how: Any,
) -> tuple[Tensor, float]:
    """The parameters afterwards, which are the same on both ranks, and how much less was held."""
    model = make(kind)
    if spare:
        list(model.children())[-1].spare = nn.Linear(4, 4)  # that nobody calls
    model, optimizer, tide = start(model, method, **how)
    if hook is not None:
        model.register_comm_hook(None, hook)
    for number in range(steps):
        optimizer.zero_grad()
        accumulate(model, kind, number, passes=passes, autocast=autocast)
        optimizer.step()
    ours, theirs = gather(flat(model))
    assert torch.equal(ours, theirs), "ranks have different parameters"
    ratio = 1.0
    if tide is not None:
        assert tide.ledger.held == 0
        ratio = tide.report().totals["ratio"]
        tide.detach()
    return ours, ratio


def train_exactly(kind: str, ways: tuple[str, ...], how: dict[str, Any]) -> None:
    plain, _ = train(kind, None, **how)
    for way in ways:
        found, _ = train(kind, "exact", way=way, **how)
        assert torch.equal(found, plain), f"exact is not bit-equal to plain DDP, attached {way}"


HOW = {
    "default": {},
    "find_unused_parameters": {"spare": True, "wrapper": {"find_unused_parameters": True}},
    "static_graph": {"wrapper": {"static_graph": True}},
    "gradient_as_bucket_view": {"wrapper": {"gradient_as_bucket_view": True}},
    "no_sync": {"passes": 3, "wrapper": {"gradient_as_bucket_view": True}},
    "fp16 hook": {"hook": fp16_compress_hook},
    "autocast": {"autocast": True},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["conv", "transformer"])
def test_exact_is_bit_equal_to_plain_training(ranks: Ranks, kind: str, how: str) -> None:
    ranks.call(train_exactly, kind, WAYS, HOW[how])


def train_with_bounds(kind: str, method: str, options: dict[str, Any]) -> float:
    plain, _ = train(kind, None, steps=6)
    for how in ({}, {"passes": 2, "wrapper": {"gradient_as_bucket_view": True}}):
        found, ratio = train(kind, method, steps=6, **how, **options)
        if not how:
            assert 0 < float((found - plain).norm() / plain.norm()) < 0.02
    return ratio


@pytest.mark.parametrize(
    ("kind", "method", "options", "least"),
    [
        ("conv", "budget", {}, 5),
        ("conv", "fixed", {"remake": True}, 5),
        ("conv", "acgc", {"period": 3}, 1),
        ("conv", "comet", {"period": 3}, 1),
        ("transformer", "budget", {}, 5),
        ("transformer", "budget", {"remake": "linear"}, 12),
        ("transformer", "fixed", {}, 5),
        ("transformer", "recompute", {}, 12),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_keep_the_same_parameters(
    ranks: Ranks, kind: str, method: str, options: dict[str, Any], least: float
) -> None:
    assert min(ranks.call(train_with_bounds, kind, method, options)) > least


DRAWS = 8


def measure(kind: str, same: bool) -> dict[str, float]:
    """The noise of the averaged gradient under the default, and what errors of the two ranks have in common."""
    model, optimizer, tide = start(make(kind), "budget")
    for number in range(5):
        optimizer.zero_grad()
        accumulate(model, kind, number, same=same)
        optimizer.step()

    def gradient(synced: bool) -> Tensor:
        model.zero_grad()
        with contextlib.nullcontext() if synced else model.no_sync():
            accumulate(model, kind, 99, same=same)
        return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    own, averaged = ([gradient(synced) for _ in range(DRAWS)] for synced in (False, True))
    tide.detach()
    exact = gradient(True)
    noise = sum(float((each - exact).square().sum()) for each in averaged) / DRAWS / float(exact.square().sum())
    exact = gradient(False)
    pairs = [gather(each - exact) for each in own]
    common = sum(float(ours @ theirs) for ours, theirs in pairs)
    energies = [sum(float(pair[rank].square().sum()) for pair in pairs) for rank in range(2)]
    return {"noise": noise, "correlation": common / (energies[0] * energies[1]) ** 0.5}


@pytest.mark.parametrize("kind", ["conv", "transformer"])
def test_noise_of_the_averaged_gradient_is_at_most_what_is_asked_for(ranks: Ranks, kind: str) -> None:
    """The dither is the same on all ranks; errors are independent all the same, as soon as the data are. They were
    correlated by 0.02 at most over 8 draws of some 10^4 entries."""
    for found in ranks.call(measure, kind, same=False):
        assert 0.001 < found["noise"] < 0.03
        assert abs(found["correlation"]) < 0.1
    for found in ranks.call(measure, kind, same=True):  # then nothing is averaged out, gradients neither
        assert 0.001 < found["noise"] < 0.03
        assert found["correlation"] > 0.999


def add_up(way: str) -> int:
    """Three passes: how often gradients seem to have been thrown away."""
    model, optimizer, tide = start(make("transformer"), "budget")
    for number in range(3):
        outputs = model(batch("transformer", number, dist.get_rank())[0])
        if way == "thrown away" and number == 2:
            optimizer.zero_grad(set_to_none=False)
        with model.no_sync() if way == "no_sync" and number < 2 else contextlib.nullcontext():
            outputs.square().mean().backward()
    restarts = tide._collector.restarts
    tide.detach()
    return restarts


@pytest.mark.parametrize(("way", "restarts"), [("averaged", 0), ("no_sync", 0), ("thrown away", 1)])
def test_gradients_that_are_averaged_in_between_count(ranks: Ranks, way: str, restarts: int) -> None:
    """They used to be taken for thrown away, so that ``budget`` knew of the last pass's noise only."""
    assert ranks.call(add_up, way) == [restarts, restarts]


def resume(kind: str, whose: str) -> None:
    model, optimizer, tide = start(make(kind), "budget")
    rank = dist.get_rank()

    def go_on(first: int, last: int) -> None:
        for number in range(first, last):
            optimizer.zero_grad()
            accumulate(model, kind, number)
            optimizer.step()

    go_on(0, 5)
    states: list[Any] = [None, None]
    dist.all_gather_object(states, tide.state_dict())
    assert states[0]["controller"]["rules"] != states[1]["controller"]["rules"], "each rank has bounds of its own"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    saved = {name: {key: _copy(value) for key, value in state.items()} for name, state in saved.items()}
    go_on(5, 10)
    expected = flat(model)
    tide.detach()
    model, optimizer, tide = start(make(kind), "budget")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    tide.load_state_dict(states[rank if whose == "own" else 0])
    go_on(5, 10)
    tide.detach()
    ours, theirs = gather(flat(model))
    assert torch.equal(ours, theirs)
    if whose == "own":
        assert torch.equal(ours, expected), "a resumed run does not continue bit-equal"
    else:
        assert float((ours - expected).norm() / expected.norm()) < 0.01


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("whose", ["own", "of rank 0"])
def test_a_run_is_resumed(ranks: Ranks, whose: str) -> None:
    ranks.call(resume, "transformer", whose)


def meet_a_gradient_that_is_no_number() -> list[str]:
    """Only the first rank's data are bad: it retreats, the other one goes on, and nobody waits for anybody."""
    model, optimizer, tide = start(make("conv"), "budget")
    for number in range(4):
        optimizer.zero_grad()
        x, y = batch("conv", number, dist.get_rank())
        if dist.get_rank() == 0:
            tide.watch(float("nan") if number == 2 else 1.0)
        loss(model(x), y).backward()
        optimizer.step()
    ours, theirs = gather(flat(model))
    assert torch.equal(ours, theirs)
    tide.detach()
    return tide.report().events


def test_a_rank_retreats_alone(ranks: Ranks) -> None:
    first, second = ranks.call(meet_a_gradient_that_is_no_number)
    assert any("loss" in event for event in first) and not second
