"""Tensors to code: drawn at random, or taken from a net in training.

``relu`` is what a convolution reads behind a ReLU, with one bound for the tensor; ``norm`` is what a batch norm reads,
with a bound for each channel.

Drawn: ``relu`` is max(z, 0), z standard normal, so half of it is zero; ``norm`` is scale * (z + mean), where log(scale)
and 2 * mean of a channel are standard normal. The shape is (n, 64, 56, 56), with smaller planes where that is too much.

Real: a model trains for some steps on new batches; then it runs forward over further new batches, in training mode,
and the input of one layer is copied until the tensor is full. Every sample comes from an input of its own. float32 is
from a net that trains in TF32, bfloat16 from one under autocast, each in the layout that the net works in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.app.shared import workload
from lowtide.app.shared.specs import UsageError
from lowtide.records import Kind, Need, Per

NAMES = ("relu", "norm")
PRECISION_OF = {torch.float32: "tf32", torch.bfloat16: "bf16"}
_CHANNELS, _SIDE = 64, 56
_NEEDS = {
    "relu": Need(Kind.VALUES, "", family="linear"),
    "norm": Need(Kind.VALUES, "", family="norm", per=Per.CHANNEL),
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of one dtype that can be made when it is needed. ``origin`` is "drawn", or model and layer."""

    name: str
    origin: str
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def need(self) -> Need:
        return _NEEDS[self.name]


def draw(name: str, dtype: torch.dtype, device: torch.device, *, nbytes: int, seed: int, channels_last: bool) -> Source:
    """A random tensor of at most ``nbytes``."""

    def make() -> Tensor:
        side = max(1, min(_SIDE, math.isqrt(nbytes // (dtype.itemsize * _CHANNELS))))
        count = max(1, nbytes // (dtype.itemsize * _CHANNELS * side**2))
        x = _empty((count, _CHANNELS, side, side), dtype, device, channels_last=channels_last)
        generator = torch.Generator(device).manual_seed(seed)
        x.normal_(generator=generator)
        if name == "relu":
            return x.relu_()
        log_scale, mean = torch.randn(2, 1, _CHANNELS, 1, 1, generator=generator, device=device)
        return x.add_(mean.div(2).to(dtype)).mul_(log_scale.exp().to(dtype))

    return Source(name, "drawn", dtype, make)


class Net:
    """A model that trains when an activation is first asked for, and the layers that it can be taken from."""

    def __init__(
        self,
        load: workload.Workload,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch: int,
        steps: int,
        seed: int,
        channels_last: bool,
    ) -> None:
        if dtype not in PRECISION_OF:
            raise UsageError(f"real activations come as float32 or bfloat16, not as {_short(dtype)}")
        self.name, self.dtype, self.steps = load.name, dtype, steps
        self._make = lambda: workload.Task(
            load, PRECISION_OF[dtype], batch=batch, device=device, seed=seed, channels_last=channels_last
        )

    @cached_property
    def task(self) -> workload.Task:
        """Trained."""
        task = self._make()
        with workload.applied(task.precision):
            for _ in range(self.steps):
                task.inputs, task.target = task.draw()
                task.step()
        task.optimizer.zero_grad(set_to_none=True)
        return task

    @cached_property
    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Per source and layer, the shape of one sample: found by a forward of two samples, before training."""
        task = self._make()
        task.inputs = task.inputs[:2]
        found: dict[str, dict[str, tuple[int, ...]]] = {name: {} for name in NAMES}
        rectified: list[Tensor] = []

        def look(path: str, module: nn.Module, x: Tensor) -> None:
            if isinstance(module, _NORMS):
                name = "norm"
            elif any(x is output for output in rectified):
                name = "relu"
            else:
                return
            if x.dtype == self.dtype and path not in found[name]:
                found[name][path] = tuple(x.shape[1:])

        handles: list[Any] = []
        for path, module in task.model.named_modules():
            if isinstance(module, nn.ReLU):
                handles.append(module.register_forward_hook(lambda m, args, output: rectified.append(output)))
            elif isinstance(module, _CONVOLUTIONS + _NORMS):
                handles.append(module.register_forward_pre_hook(lambda m, args, path=path: look(path, m, args[0])))
        with torch.no_grad():
            task.forward()
        for handle in handles:
            handle.remove()
        return found

    def sources(self, name: str, *, layers: int, nbytes: int) -> Iterator[Source]:
        """The layers with the largest inputs, one of each shape."""
        found = self._shapes[name]
        if not found:
            raise UsageError(
                f"{self.name} has no {'convolution behind a ReLU' if name == 'relu' else 'batch norm'} that reads "
                f"{_short(self.dtype)}: nothing to take {name!r} from"
            )
        first_of = {shape: path for path, shape in reversed(found.items())}
        for shape in sorted(first_of, key=math.prod, reverse=True)[:layers]:
            path = first_of[shape]
            make = lambda path=path: self.gather(path, nbytes)  # noqa: E731
            yield Source(name, f"{self.name}:{path}", self.dtype, make)

    def gather(self, path: str, nbytes: int) -> Tensor:
        """At most ``nbytes`` of what the layer reads, over as many batches as it takes."""
        task, parts = self.task, _Filler(nbytes)
        with parts.watching(task.model.get_submodule(path)), torch.no_grad(), workload.applied(task.precision):
            while not parts.is_full:
                task.inputs, task.target = task.draw()
                task.forward()
        assert parts.out is not None
        return parts.out


class _Filler:
    """Copies what a layer reads into one tensor, sample by sample, until it is full."""

    def __init__(self, nbytes: int) -> None:
        self.out: Tensor | None = None
        self._nbytes, self._filled = nbytes, 0

    @property
    def is_full(self) -> bool:
        return self.out is not None and self._filled == len(self.out)

    @contextmanager
    def watching(self, layer: nn.Module) -> Iterator[None]:
        handle = layer.register_forward_pre_hook(lambda module, args: self._take(args[0]))
        try:
            yield
        finally:
            handle.remove()

    def _take(self, x: Tensor) -> None:
        if self.out is None:
            count = max(1, self._nbytes // (x[0].numel() * x.itemsize))
            channels_last = x.dim() == 4 and not x.is_contiguous()
            self.out = _empty((count, *x.shape[1:]), x.dtype, x.device, channels_last=channels_last)
        count = min(len(x), len(self.out) - self._filled)
        self.out[self._filled : self._filled + count].copy_(x[:count])
        self._filled += count


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, channels_last: bool) -> Tensor:
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
