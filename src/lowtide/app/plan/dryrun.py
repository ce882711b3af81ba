"""A workload under given conditions, to be stepped through at any batch size without its memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.app.plan.fakes import AsOnCuda, build_shapes, make_fake
from lowtide.app.plan.trace import Save, Step, Trace
from lowtide.app.shared.workload import Workload
from lowtide.app.timeline import Sample
from lowtide.errors import LowtideError

SMALL, LARGE = 2, 4  # real batches from which larger ones follow
OPTIMIZERS = {"sgd": 1, "adamw": 2, "none": 0}  # tensors of state for each parameter; sgd has momentum


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a step is run. As in ``lowtide bench``, conv nets are channels_last in bf16, and models with layer norms or
    embeddings have AdamW where no optimizer is named."""

    device: str = "cuda"
    precision: str = "tf32"
    channels_last: bool = False
    optimizer: str | None = None


class UnknownSizeError(LowtideError):
    """A model that keeps something which fake tensors do not know the size of."""


class DryRun:
    """Steps of a workload on fake tensors.

    A model that looks at values, or that has recurrent layers, does not run on those (``why_real`` then says why). Its
    steps are run for real with batches of 2 and 4, and all figures are continued in a straight line, as a tensor's
    bytes are one in the size of the batch.
    """

    def __init__(self, workload: Workload, conditions: Conditions) -> None:
        self._workload, self._conditions = workload, conditions
        self._plain: dict[int, Trace] = {}
        self._mode: FakeTensorMode | None = FakeTensorMode()
        self.why_real = ""
        shapes = build_shapes(workload.build)
        kinds = [type(module) for module in shapes.modules()]
        in_bf16 = conditions.precision == "bf16"
        self.channels_last = kinds.count(nn.Conv2d) > 1 and (conditions.channels_last or in_bf16)
        wants_adam = not {nn.LayerNorm, nn.Embedding}.isdisjoint(kinds)
        self.optimizer = conditions.optimizer or ("adamw" if wants_adam else "sgd")
        try:
            if any(isinstance(module, nn.RNNBase) for module in shapes.modules()):
                raise UnknownSizeError("a recurrent op keeps a workspace whose size only the real op knows")
            self.model = make_fake(shapes, self._mode, channels_last=self.channels_last).train()
            self.trace(SMALL)
        except Exception as error:  # as many kinds as there are models
            self.why_real = f"{type(error).__name__}: {error}".splitlines()[0]
            self._mode = None
            self.model = workload.build().train()
            if self.channels_last:
                self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def trace(self, batch: int, rates: Mapping[str, float] | None = None) -> Trace:
        """A step at this batch size: as autograd does it, or with payloads of so many bytes a value, by site."""
        if self._mode is not None or batch in (SMALL, LARGE):
            return self._run(batch, rates)
        return _continue(self._run(SMALL, rates), self._run(LARGE, rates), batch)

    def _run(self, batch: int, rates: Mapping[str, float] | None) -> Trace:
        if batch not in self._plain:
            parameters = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
            state = OPTIMIZERS[self.optimizer] * parameters
            with self._mode or nullcontext(), self._substitutes():
                taken = self._step(batch).plain()
            self._plain[batch] = replace(taken, static=taken.static + state)
        plain = self._plain[batch]
        if rates is None:
            return plain
        with self._mode or nullcontext(), self._substitutes():
            return replace(self._step(batch).with_payloads(plain, rates), static=plain.static)

    def _step(self, batch: int) -> Step:
        inputs, target = (self._enlarge(part, batch) for part in self._workload.sample(1, _generator()))
        return Step(self.model, inputs, target, self._loss)

    def _substitutes(self) -> AbstractContextManager[object]:
        return AsOnCuda() if self._conditions.device == "cuda" else nullcontext()

    def _enlarge(self, sample: Tensor, batch: int) -> Tensor:
        """A batch of samples like this one: of no values where tensors are fake, else of the same ones."""
        layout = torch.channels_last if sample.dim() == 4 and self.channels_last else torch.contiguous_format
        if self._mode is None:
            return sample.expand(batch, *sample.shape[1:]).contiguous(memory_format=layout)
        return torch.empty((batch, *sample.shape[1:]), dtype=sample.dtype, memory_format=layout)

    def _loss(self, model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._conditions.precision == "bf16"):
            output: Tensor = model(inputs)
        return self._workload.score(output.float(), target)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _continue(small: Trace, large: Trace, batch: int) -> Trace:
    """What follows for ``batch`` from two smaller ones."""

    def at(first: int, second: int) -> int:
        return round(first + (second - first) * (batch - small.batch) / (large.batch - small.batch))

    def save(first: Save, second: Save) -> Save:
        return replace(first, numel=at(first.numel, second.numel), nbytes=at(first.nbytes, second.nbytes))

    def sample(one: Sample, factor: float) -> Sample:
        return replace(one, allocated=round(one.allocated * factor))

    peak = at(small.peak, large.peak)
    factor = peak / large.peak
    return Trace(
        batch=batch,
        static=at(small.static, large.static),
        saves=tuple(map(save, small.saves, large.saves)),
        held=at(small.held, large.held),
        peak=peak,
        peak_at=sample(large.peak_at, factor),
        samples=tuple(sample(one, factor) for one in large.samples),
    )
