"""find_batch_size where there are several ranks: on one of them, or on all in step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rank_nets import loss, make
from ranks import Ranks, gather
from torch.nn.parallel import DistributedDataParallel

import lowtide

SAMPLE = 1 << 20


class Pretended:
    """So many bytes a sample; this much is there."""

    def __init__(self, limit: int) -> None:
        self.size, self._limit = 0, limit

    def limit(self) -> int:
        return self._limit

    def peak(self, step: Callable[[], object]) -> int:
        step()
        return self.size * SAMPLE

    def clean(self) -> None:
        pass


@dataclass
class InStep:
    """The smallest limit and the highest peak of all ranks, so that all of them try the same sizes."""

    own: lowtide.growth.Meter

    def limit(self) -> int:
        return _of_all(self.own.limit(), dist.ReduceOp.MIN)

    def peak(self, step: Callable[[], object]) -> int:
        return _of_all(self.own.peak(step), dist.ReduceOp.MAX)

    def clean(self) -> None:
        self.own.clean()


def _of_all(number: int, op: dist.ReduceOp) -> int:
    found = torch.tensor(number)
    dist.all_reduce(found, op)
    return int(found)


def search(together: bool) -> int:
    model = make("conv")
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    tide = lowtide.attach(model, optimizer=optimizer, min_size=0)
    meter = Pretended(40 * SAMPLE if dist.get_rank() else 20 * SAMPLE)

    def run_step(size: int, *, net: torch.nn.Module) -> None:
        meter.size = size
        optimizer.zero_grad()
        loss(net(torch.randn(size, 3, 16, 16)), torch.randint(10, (size,))).backward()
        optimizer.step()

    run_step(4, net=wrapped)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    state = [model, optimizer, tide]
    found = torch.tensor(0)
    if together:
        step = lambda size: run_step(size, net=wrapped)  # noqa: E731
        found += lowtide.find_batch_size(step, state=state, start=4, maximum=64, meter=InStep(meter)).batch
    elif dist.get_rank() == 0:
        step = lambda size: run_step(size, net=model)  # noqa: E731
        found += lowtide.find_batch_size(step, state=state, start=4, maximum=64, meter=meter).batch
    dist.broadcast(found, 0)
    assert all(map(torch.equal, before, model.parameters()))
    run_step(int(found), net=wrapped)
    ours, theirs = gather(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(ours, theirs)
    tide.detach()
    return int(found)


def test_one_rank_searches_for_all(ranks: Ranks) -> None:
    assert ranks.call(search, together=False) == [16, 16]


def test_all_ranks_search_in_step(ranks: Ranks) -> None:
    assert ranks.call(search, together=True) == [16, 16]
