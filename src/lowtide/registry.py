"""Names to parts: a codec, method, controller or store is one file whose name is its registry name.

A package is a registry: ``lowtide.codecs`` holds ``sz.py``, so ``Registry("lowtide.codecs", "codec").create("sz")``
imports that file on first use and builds the one class that its ``__all__`` names. Nothing else is edited to add one.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from typing import Any

from lowtide.errors import LowtideError, UnknownNameError


@dataclass(frozen=True, slots=True)
class Registry:
    """The parts of one kind, found by the files of one package."""

    package: str
    kind: str

    def names(self) -> tuple[str, ...]:
        return _modules(self.package)

    def load(self, name: str) -> type:
        """The class that the file ``name`` defines."""
        if name not in self.names():
            raise UnknownNameError(self.kind, name, self.names())
        module = importlib.import_module(f"{self.package}.{name}")
        exported = getattr(module, "__all__", [])
        if len(exported) != 1:
            raise LowtideError(f"{self.package}.{name} must name exactly one class in __all__, it names {exported}")
        part: type = getattr(module, exported[0])
        return part

    def options(self, name: str) -> tuple[str, ...]:
        """What ``create`` takes for ``name``."""
        return tuple(item.name for item in dataclasses.fields(self.load(name)) if item.init)

    def create(self, name: str, **options: Any) -> Any:
        """An instance of ``name``; an option it does not have is refused by name, and those that have it are named."""
        known = self.options(name)
        for option in options:
            if option not in known:
                owners = ", ".join(other for other in self.names() if option in self.options(other))
                elsewhere = f"{self.kind.capitalize()}s that have it: {owners}." if owners else ""
                raise UnknownNameError(f"option of {self.kind} {name!r}", option, known, elsewhere=elsewhere)
        return self.load(name)(**options)


@cache
def _modules(package: str) -> tuple[str, ...]:
    """The public files of a package (a name with a leading underscore is not a part)."""
    paths = importlib.import_module(package).__path__
    return tuple(sorted(item.name for item in pkgutil.iter_modules(paths) if not item.name.startswith("_")))


CODECS = Registry("lowtide.codecs", "codec")
KERNELS = Registry("lowtide.kernels", "kernel")
STORES = Registry("lowtide.stores", "store")
CONTROLLERS = Registry("lowtide.controllers", "controller")
METHODS = Registry("lowtide.methods", "method")
