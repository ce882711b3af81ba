"""A zoo entry: a builder, the synthetic batch its model takes, the loss, and options for a fast test.

The options of an entry are the keyword parameters of its builder, and their defaults live there alone. The sampler
names those it needs (`num_classes`, `stem`, ...) as required keywords, which `example` fills in; what the sampler has a
default for itself is an option of `example` only. So one dictionary serves both calls:

    entry = describe("resnet18")
    model = entry.build(**entry.tiny)
    inputs, target = entry.example(4, **entry.tiny)
    entry.loss(model(inputs), target).backward()
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from lowtide.app.zoo.tasks import Kind


@dataclass(frozen=True)
class ZooEntry:
    """One named model.

    Attributes:
        name: what `build` and `describe` know it by.
        kind: which task it solves.
        builder: makes the module from keyword options.
        sampler: makes an (input, target) pair; reached through `example`.
        loss: scores an output against a target, as a scalar.
        tiny: options of the builder with which a training step takes well under a second on two CPU cores.
    """

    name: str
    kind: Kind
    builder: Callable[..., nn.Module]
    sampler: Callable[..., tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    tiny: Mapping[str, object] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiny", MappingProxyType(dict(self.tiny)))

    @property
    def options(self) -> dict[str, object]:
        """The options of `build` with their defaults."""
        return _read_keywords(self.builder)

    def build(self, **options: object) -> nn.Module:
        """Make the module; its weights are drawn from torch's global generator, as `torch.nn` does."""
        self._check_options(options, known=self.options)
        return self.builder(**options)

    def example(
        self, batch: int, *, generator: torch.Generator | None = None, **options: object
    ) -> tuple[Tensor, Tensor]:
        """Make a synthetic (input, target) pair for the model that `build` makes with the same options.

        It lies on the generator's device. Without a generator it is drawn on the CPU from a new one with seed 0.
        """
        if generator is None:
            generator = torch.Generator().manual_seed(0)
        wanted = _read_keywords(self.sampler)
        defaults = {**wanted, **self.options}
        self._check_options(options, known=defaults)
        values = {**defaults, **options}
        return self.sampler(batch, generator, **{name: values[name] for name in wanted})

    def _check_options(self, options: Iterable[str], *, known: Iterable[str]) -> None:
        known = sorted(known)
        for option in options:
            if option not in known:
                raise TypeError(f"zoo model {self.name!r} has no option {option!r}; it has: {', '.join(known)}")


def _read_keywords(function: Callable[..., object]) -> dict[str, object]:
    """The keyword-only parameters of a function, with their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
