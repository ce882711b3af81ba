"""A model zoo in plain torch, for tests, benchmarks and the training application.

The architectures are those of the papers their files name; one file per family. Every model can be built small: see
`ZooEntry.tiny`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from lowtide.app.zoo import alexnet, encoder, gpt, llama, lstm, resnet, unet, vgg, vit
from lowtide.app.zoo.entry import ZooEntry
from lowtide.app.zoo.tasks import Kind, Stem
from lowtide.errors import UnknownNameError

__all__ = ["Kind", "Stem", "ZooEntry", "build", "describe", "names"]

_FAMILIES = (alexnet, vgg, resnet, vit, gpt, llama, encoder, unet, lstm)
_ENTRIES: Mapping[str, ZooEntry] = MappingProxyType(
    {entry.name: entry for family in _FAMILIES for entry in family.ENTRIES}
)


def names() -> tuple[str, ...]:
    """The names of all models, by family."""
    return tuple(_ENTRIES)


def describe(name: str) -> ZooEntry:
    """The entry of a model: how to build it, what to feed it, how to score it.

    Raises:
        UnknownNameError: a ValueError, if there is no such model.
    """
    if name not in _ENTRIES:
        raise UnknownNameError("zoo model", name, names())
    return _ENTRIES[name]


def build(name: str, **options: object) -> nn.Module:
    """Build a model by name, with options of its builder (`describe(name).options` lists them).

    Raises:
        UnknownNameError: a ValueError, if there is no such model.
        TypeError: if the model has no such option.
    """
    return describe(name).build(**options)
