"""The batch of each step: its samples are a function of the seed and the step, wherever a run begins.

Data stay on the device where they fit; otherwise a thread gathers the next batch on the host while a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from lowtide.app.data import DataSet, Split
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.seeds import ORDER, generator

_SHARE = 4  # of the free memory of a GPU, one part in so many may be data


class Batches:
    """Batches of the training split by step, and those of the test split in order."""

    def __init__(self, data: DataSet, *, batch: int, device: torch.device, seed: int) -> None:
        self.steps = data.train.per_epoch // batch
        if not self.steps:
            raise UsageError(f"a batch of {batch} does not fit into an epoch of {data.train.per_epoch} samples")
        self._batch, self._device, self._seed = batch, device, seed
        is_resident = _fits(data, device)
        self._home = device if is_resident else torch.device("cpu")
        self._train, self._test = data.train.to(self._home), data.test.to(self._home)
        self._epoch, self._order = -1, torch.empty(0)
        self._waiting: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None
        self._pool = None if is_resident else ThreadPoolExecutor(1, thread_name_prefix="batches")

    def training(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, on the device."""
        if self._pool is None:
            return self._train.select(self._keys(step))
        if self._waiting is None or self._waiting[0] != step:
            self._waiting = (step, self._pool.submit(self._gather, self._train, self._keys(step)))
        ready = self._waiting[1].result()
        self._waiting = (step + 1, self._pool.submit(self._gather, self._train, self._keys(step + 1)))
        return self._send(ready)

    def testing(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample of the test split once; the last batch may be smaller."""
        for keys in self._test.keys().to(self._home).split(self._batch):
            yield self._send(self._test.select(keys))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _keys(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._train.shuffled(generator(self._seed, ORDER, epoch)).to(self._home)
        return self._order[place * self._batch : (place + 1) * self._batch]

    def _gather(self, split: Split, keys: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = split.select(keys)
        if self._device.type == "cuda":
            return inputs.pin_memory(), targets.pin_memory()
        return inputs, targets

    def _send(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        return inputs.to(self._device, non_blocking=True), targets.to(self._device, non_blocking=True)


def _fits(data: DataSet, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    free, _ = torch.cuda.mem_get_info(device)
    return data.train.nbytes + data.test.nbytes <= free // _SHARE
