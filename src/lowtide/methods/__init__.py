"""Named presets: a method is a codec for values, the options that go with it, and a controller."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from lowtide.codecs import Codec
from lowtide.controllers import Controller
from lowtide.registry import METHODS


class Method(Protocol):
    """What a named method brings together. It is a frozen dataclass of its options.

    Four things more a method may have, for where ``attach`` is not told otherwise. ``store()`` makes the store for its
    payloads; without it they wait on the device. ``regions()`` says which modules are run again in backward.
    ``remakes`` says that tensors may be made again from others that are held under the same rules: True by default.
    ``remakes_products`` says that linear layers may be run again for that: its bounds follow what that does to errors.
    ``joins`` says that two tensors may share a payload; without it, where ``attach`` is given ``remake=True``.
    """

    def values(self) -> Codec | None:
        """The codec for error-bounded values; None keeps them as they are."""
        ...

    def controller(self) -> Controller:
        """A new controller, which will choose the bounds."""
        ...


def options_of(method: Any, part: type) -> dict[str, Any]:
    """The options of a method that are also those of ``part``, a dataclass, to build it with."""
    return {item.name: getattr(method, item.name) for item in fields(part) if item.init and hasattr(method, item.name)}


def create(name: str, **options: Any) -> Method:
    """A method by its name; options that it does not have are refused by name."""
    method: Method = METHODS.create(name, **options)
    return method
