"""Tensor parallelism on two ranks: copies of parameters stay the same, bit for bit, and what is held is counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rank_nets import Transformer, batch, loss, make
from ranks import Ranks, gather
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lowtide
from lowtide.capture.agreement import Agreement
from lowtide.errors import AttachError
from lowtide.statistics import Arrival, Claim, SiteStatistics, Statistics

WAYS = ("local outputs", "DTensor outputs", "sequence")


def divide(model: Transformer, way: str) -> Transformer:
    mesh = init_device_mesh("cpu", (2,))
    apart, whole, onward = Shard(1), Replicate(), {}
    if way == "sequence":
        onward = {"output_layouts": apart}
    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan["mlp.up"] = ColwiseParallel(use_local_output=way != "DTensor outputs")
        plan |= {name: RowwiseParallel(**onward) for name in ("attention.o", "mlp.down")}
        if way == "sequence":
            gathers = PrepareModuleInput(input_layouts=(apart,), desired_input_layouts=(whole,))
            plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathers, "mlp": gathers}
        parallelize_module(block, mesh, plan)
    if way == "sequence":
        embed = RowwiseParallel(input_layouts=whole, output_layouts=apart)
        out = ColwiseParallel(input_layouts=apart, output_layouts=whole)
        parallelize_module(model, mesh, {"embed": embed, "norm": SequenceParallel(), "out": out})
    return model


def copies(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that each rank has all of."""
    found = {}
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            found[name] = parameter.detach()
        elif all(placement.is_replicate() for placement in parameter.placements):
            found[name] = parameter.detach().to_local()
    return found


def whole(model: nn.Module) -> Tensor:
    parts = (part.full_tensor() if isinstance(part, DTensor) else part for part in model.parameters())
    return torch.cat([part.detach().flatten() for part in parts])


def train(
    way: str, method: str | None, *, steps: int, uneven: bool = False, **options: Any
) -> tuple[Tensor, lowtide.Session | None]:
    model = make("transformer")
    if uneven:  # GELU lets nothing pass of what is the second rank's
        with torch.no_grad():
            for block in model.blocks:
                block.mlp.up.bias[64:] = -10
    divide(model, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tide = lowtide.attach(model, method, optimizer=optimizer, min_size=0, **options) if method else None
    for number in range(steps):
        optimizer.zero_grad()
        x, y = batch("transformer", number, 0)
        loss(model(x), y).backward()
        optimizer.step()
    for name, parameter in copies(model).items():
        ours, theirs = gather(parameter)
        assert torch.equal(ours, theirs), f"the copies of {name} have drifted apart"
    if tide is not None:
        tide.detach()
    return whole(model), tide


def compare(way: str) -> list[float]:
    plain, _ = train(way, None, steps=6)
    found, _ = train(way, "exact", steps=6)
    assert torch.equal(plain, found)
    ratios = []
    for method in ("fixed", "budget"):
        found, tide = train(way, method, steps=6)
        assert 0 < float((found - plain).norm() / plain.norm()) < 0.02
        assert tide._capture.agreement.is_needed
        ratios.append(tide.report().totals["ratio"])
    return ratios


@pytest.mark.parametrize("way", WAYS)
def test_training_is_what_it_was(ranks: Ranks, way: str) -> None:
    assert min(ranks.call(compare, way)[0]) > 1.3


def train_unevenly(method: str, options: dict[str, Any]) -> tuple[dict[str, str], int]:
    steps = 30 if method == "budget" else 10
    _, tide = train("local outputs", method, steps=steps, uneven=True, **options)
    rules = getattr(tide.controller, "_rules", {})
    return {name: str(rule) for name, rule in rules.items()}, tide.ledger.held


@pytest.mark.parametrize(
    ("method", "options"), [("budget", {"propagated": 0.003}), ("acgc", {"period": 3}), ("fixed", {})]
)
def test_copies_do_not_drift_apart(ranks: Ranks, method: str, options: dict[str, Any]) -> None:
    """With bounds from what each rank measures alone, 14 of the copies differed under ``budget``."""
    (ours, held), (theirs, _) = ranks.call(train_unevenly, method, options)
    assert ours == theirs and held == 0


def count() -> None:
    """What is saved, by torch's own hooks, and by Lowtide."""
    model = divide(make("transformer"), "sequence")
    x, y = batch("transformer", 0, 0)
    own = {part.untyped_storage().data_ptr() for part in map(local, model.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() != x.untyped_storage().data_ptr():
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = model(x)
    del outputs
    tide = lowtide.attach(model, "exact", min_size=0)
    found = loss(model(x), y)
    assert tide.ledger.held == tide.ledger.raw == sum(saved.values())
    found.backward()
    tide.detach()


def local(tensor: Tensor) -> Tensor:
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.wait() if isinstance(part, AsyncCollectiveTensor) else part


def test_parts_of_divided_tensors_are_counted(ranks: Ranks) -> None:
    """They used to be in neither figure, and the ratio was that of the rest."""
    ranks.call(count)


def ask_for_memory() -> None:
    with pytest.raises(AttachError, match=r"memory= has bounds follow from the sizes.*Use noise="):
        train("local outputs", "budget", steps=1, memory="0.5")


def test_a_budget_of_bytes_is_refused(ranks: Ranks) -> None:
    ranks.call(ask_for_memory)


def measured(gain: float, energy: float, name: str = "a", **more: Any) -> Statistics:
    claim = Claim("weight", gain * energy, energy)
    site = SiteStatistics(name, "addmm", "linear", "absolute", "float32", name, 8, claims=(claim,), std=gain, **more)
    return Statistics(3, {name: site}, arrivals=(Arrival({name: 1.0}, energy),))


def agree() -> Statistics:
    agreement = Agreement()
    tensor = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
    agreement.look(torch.ones(2))
    assert not agreement.is_needed
    agreement.look(tensor)
    agreement.look(tensor + 1)
    assert agreement.is_needed
    first = torch.distributed.get_rank() == 0
    found = agreement.merge(measured(0.1, 3.0) if first else measured(0.5, 1.0, channels={"scale": [1.0]}))
    assert found == Statistics.from_state(found.to_state())
    none = agreement.merge(None)
    assert none is None
    one = agreement.merge(measured(0.1, 1.0, "b") if first else None)
    assert list(one.sites) == ["b"]
    return found


def test_noise_is_that_of_the_whole_gradient(ranks: Ranks) -> None:
    ours, theirs = ranks.call(agree)
    assert ours == theirs
    claim = ours.sites["a"].claims[0]
    assert claim.gain == pytest.approx((0.1 * 3 + 0.5 * 1) / 4)
    assert ours.sites["a"].std == pytest.approx(0.3)
    assert [arrival.energy for arrival in ours.arrivals] == [4.0]
