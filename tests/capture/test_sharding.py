"""Models whose weights have memory only while their layers run (FSDP), under the default method and under `fixed`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowtide
from lowtide.capture.sharding import Sharding, has_memory

pytestmark = pytest.mark.usefixtures("one_process")


class Block(nn.Module):
    """What the last norm makes is read by a layer outside, in whose backward this block's weights are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer, self.last = (
            nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32), nn.LayerNorm(32)
        )  # fmt: skip
        with torch.no_grad():
            for norm in (self.norm, self.last):
                norm.weight.uniform_(0.5, 2)
                norm.bias.uniform_(-1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.outer(self.norm(self.inner(x)).relu()))


def transformer() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(32, 8)), torch.randn(192, 32)


def conv() -> tuple[nn.Module, Tensor]:
    blocks = [
        nn.Sequential(nn.Conv2d(width, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        for width in (3, 16, 16)
    ]
    return nn.Sequential(*blocks, nn.Conv2d(16, 4, 1)), torch.randn(4, 3, 16, 16)


def shard(model: nn.Module) -> nn.Module:
    """Block by block; the last layer goes with the model as a whole."""
    for module in (*list(model.children())[:-1], model):
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    return model


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    found = {name: part.grad for name, part in model.named_parameters() if part.grad is not None}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for name, grad in found.items()}


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.parametrize("make", [transformer, conv])
@pytest.mark.parametrize(
    ("method", "options"),
    [("budget", {}), ("fixed", {"remake": True, "linear": "0.05 std", "norm": "0.05 std"}), ("acgc", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gradients_are_those_of_the_whole_model(
    make: Any, method: str, options: dict[str, Any], attached_first: bool
) -> None:
    torch.manual_seed(0)
    model, x = make()
    exact = gradients(copy.deepcopy(model), x)
    if not attached_first:
        shard(model)
    tide = lowtide.attach(model, method, min_size=0, check="full", **options)
    if attached_first:
        shard(model)
    for _ in range(6):
        found = gradients(model, x)
        tide.step()
    energy = sum(float(grad.square().sum()) for grad in exact.values())
    error = sum(float((found[name] - grad).square().sum()) for name, grad in exact.items())
    assert 0 < error < 0.1 * energy
    sites = tide.ledger.sites.values()
    assert sum(site.raw_nbytes for site in sites) > 1.5 * sum(site.held_nbytes for site in sites)
    assert tide.ledger.held == 0


@pytest.mark.parametrize("sharded", [False, True])
def test_what_a_norm_made_is_made_again_if_its_weights_are_there(sharded: bool) -> None:
    """Copies of them serve within their block; when the last layer reads what the last block made, they are gone."""
    model, x = transformer()
    model[0].norm, model[0].outer = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    model[0].forward = lambda x: model[0].last(x + model[0].outer(model[0].norm(model[0].inner(x))))
    tide = lowtide.attach(shard(model) if sharded else model, "fixed", remake=True, min_size=0)
    gradients(model, x)
    codecs = {name: entry.codec for name, entry in tide.ledger.sites.items()}
    assert codecs["0.outer.0:addmm.mat1"] == "again by layer_norm"
    assert codecs["3:addmm.mat1"] == ("sz" if sharded else "again by layer_norm")


def test_sharding_is_noticed_when_it_comes() -> None:
    model, _ = conv()
    sharding = Sharding(model)
    sharding.look()
    assert not sharding.is_on
    fully_shard(model[1], mesh=init_device_mesh("cpu", (1,)))
    again = Sharding(model)
    again.look()
    assert again.is_on, "a part of the model is enough"
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    sharding.look()
    assert sharding.is_on
    Sharding(None).look()


def test_memory_that_has_been_given_back() -> None:
    weight = torch.ones(4, 4)
    part = weight[1:]
    assert has_memory(weight) and has_memory(part)
    weight.untyped_storage().resize_(0)
    assert not has_memory(weight) and not has_memory(part)
