"""Data sets by name, each read from the files it is distributed as; nothing is downloaded.

Options of a set are the keyword parameters of its loader. A set that lies in files is written ``NAME:PATH``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lowtide.app.data import cifar, digits, idx, imagefolder, sentences, text
from lowtide.app.data.archive import DataError
from lowtide.app.data.splits import DataSet, Kind, Split, Stream, Table
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

__all__ = ["LOADERS", "DataError", "DataSet", "Kind", "Split", "Stream", "Table", "load", "parse"]

LOADERS: Mapping[str, Callable[..., DataSet]] = MappingProxyType(
    {
        "digits": digits.load,
        "mnist": partial(idx.load, "mnist"),
        "fashion_mnist": partial(idx.load, "fashion_mnist"),
        "cifar10": partial(cifar.load, "cifar10"),
        "cifar100": partial(cifar.load, "cifar100"),
        "imagefolder": imagefolder.load,
        "text": text.load,
        "sst2": sentences.load,
    }
)
_LIMITS = ("train", "test")  # options of every set: how many samples of each part to use


def parse(written: str) -> tuple[str, str]:
    """``"cifar10:PATH"`` to name and path; a set that comes with Lowtide has none."""
    name, _, path = written.partition(":")
    if name not in LOADERS:
        raise UnknownNameError("data set", name, LOADERS)
    if _takes_path(name) != bool(path):
        raise UsageError(
            f"data set {name!r} lies in files: write {name}:PATH"
            if not path
            else f"data set {name!r} comes with Lowtide and has no path, got {path!r}"
        )
    return name, path


def load(name: str, path: str = "", **options: Any) -> DataSet:
    """A data set; ``train=`` and ``test=`` limit how many of its samples are used."""
    parse(f"{name}:{path}" if path else name)
    known = [*_options(name), *_LIMITS]
    for option in options:
        if option not in known:
            raise UnknownNameError(f"option of data set {name!r}", option, known)
    limits = [options.pop(part, None) for part in _LIMITS]
    for part, limit in zip(_LIMITS, limits, strict=True):
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UsageError(f"{part} is a number of samples, 1 or more; got {limit!r}")
    try:
        found = LOADERS[name](*([Path(path).expanduser()] if path else []), **options)
    except TypeError as error:
        raise UsageError(f"data set {name!r} cannot be loaded with the options {options}: {error}") from error
    return found.limited(*limits)


def _takes_path(name: str) -> bool:
    return "path" in inspect.signature(LOADERS[name]).parameters


def _options(name: str) -> list[str]:
    parameters = inspect.signature(LOADERS[name]).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
