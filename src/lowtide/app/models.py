"""Models by name, fitted to a data set: the zoo's, torchvision's, timm's, transformers', or a function in a file.

What a model has to know about the data (the number of classes, the size of pictures, the vocabulary) is filled in where
its builder has an option for it and the user did not set one; the options that were really used are part of the result.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from lowtide.app import zoo
from lowtide.app.data import DataSet
from lowtide.app.data.vocabulary import PADDING
from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

_SMALL = 64  # pixels a side below which a stem that divides them by four leaves too little
_PATCHES = 8  # patches a side of a small picture
_NEAR = 8  # names that are shown of a library that has hundreds


@dataclass(frozen=True, slots=True)
class Model:
    """How to build a model. ``options`` are all that its builder is given; it draws from torch's global generator."""

    name: str
    options: Mapping[str, Any]
    make: Callable[..., nn.Module]

    def build(self) -> nn.Module:
        try:
            model = self.make(**self.options)
        except (TypeError, ValueError, AssertionError) as error:
            raise UsageError(f"model {self.name!r} cannot be built with {dict(self.options)}: {error}") from error
        if not isinstance(model, nn.Module):
            raise UsageError(f"model {self.name!r}: its function returned {type(model).__name__}, not an nn.Module")
        return model


def find_model(name: str, options: Mapping[str, Any], data: DataSet) -> Model:
    """A model that takes ``data``: ``resnet50``, ``torchvision:NAME``, ``timm:NAME``, ``hf:NAME``, ``PATH.py:NAME``."""
    source, colon, rest = name.partition(":")
    if not colon:
        return _from_zoo(name, options, data)
    if source in _LIBRARIES:
        return _LIBRARIES[source](rest, options, data)
    path, _, function = name.rpartition(":")
    if path.endswith(".py"):
        return _from_file(Path(path).expanduser(), function, options, data)
    raise UnknownNameError("source of models", source, [*_LIBRARIES, "PATH.py"])


def count_channels(model: nn.Module) -> int | None:
    """Channels of the pictures that a model takes: those of its first convolution, None if it has none."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            return module.in_channels
    return None


def _describe(data: DataSet) -> dict[str, Any]:
    """What is known about the data, under the names that builders have for it."""
    if data.kind != "image":
        facts = {"vocab_size": data.vocabulary, "context": data.length, "length": data.length}
        return facts if data.kind == "tokens" else {**facts, "num_classes": data.classes}
    channels, height, _ = data.shape
    facts = {"num_classes": data.classes, "image_size": height, "in_channels": channels}
    if height > _SMALL:
        return facts
    return {**facts, "stem": "cifar", "patch_size": max(1, height // _PATCHES)}


def _from_zoo(name: str, options: Mapping[str, Any], data: DataSet) -> Model:
    entry = zoo.describe(name)
    if entry.kind != data.kind:
        suited = [other for other in zoo.names() if zoo.describe(other).kind == data.kind]
        raise UsageError(
            f"model {name!r} is made for {_PLURALS[entry.kind]}, data set {data.name!r} has {_PLURALS[data.kind]}; "
            f"take one of {', '.join(suited)}"
        )
    for option in options:
        if option not in entry.options:
            raise UnknownNameError(f"option of model {name!r}", option, entry.options)
    facts = {key: value for key, value in _describe(data).items() if key in entry.options}
    return Model(name, {**facts, **options}, entry.build)


_PLURALS = {"image": "pictures", "tokens": "text to predict", "text": "sentences", "segmentation": "segmented pictures"}


def _from_torchvision(name: str, options: Mapping[str, Any], data: DataSet) -> Model:
    _require_images("torchvision", data)
    models = _import("torchvision.models", "torchvision")
    _check_name("torchvision model", name, models.list_models())
    facts = {"num_classes": data.classes}
    return Model(f"torchvision:{name}", {**facts, **options}, partial(models.get_model, name, weights=None))


def _from_timm(name: str, options: Mapping[str, Any], data: DataSet) -> Model:
    _require_images("timm", data)
    timm = _import("timm", "timm")
    _check_name("timm model", name, timm.list_models())
    facts = {"num_classes": data.classes, "in_chans": data.shape[0]}
    return Model(f"timm:{name}", {**facts, **options}, partial(timm.create_model, name, pretrained=False))


def _from_transformers(name: str, options: Mapping[str, Any], data: DataSet) -> Model:
    """A type of model (``gpt2``, ``bert``, ``vit``) with new weights, or a folder with a trained one."""
    transformers = _import("transformers", "transformers")
    suffix = {"image": "ForImageClassification", "tokens": "ForCausalLM", "text": "ForSequenceClassification"}
    family = getattr(transformers, f"AutoModel{suffix[data.kind]}")
    facts: dict[str, Any] = {} if data.kind == "tokens" else {"num_labels": data.classes}
    if Path(name).is_dir():
        make = partial(family.from_pretrained, name, local_files_only=True)
        return Model(f"hf:{name}", {**facts, **options}, lambda **given: Logits(make(**given)))
    _check_name("type of transformers model", name, transformers.CONFIG_MAPPING)
    if data.kind == "image":
        channels, height, _ = data.shape
        facts |= {"image_size": height, "num_channels": channels}
    else:
        facts |= {"vocab_size": data.vocabulary, "pad_token_id": PADDING}

    def build(**given: Any) -> nn.Module:
        return Logits(family.from_config(transformers.AutoConfig.for_model(name, **given)))

    return Model(f"hf:{name}", {**facts, **options}, build)


class Logits(nn.Module):
    """A transformers model that returns its logits; padding of sentences is masked."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._classifies_text = type(model).__name__.endswith("ForSequenceClassification")

    def forward(self, inputs: Tensor) -> Tensor:
        """Pictures or tokens to logits."""
        given = {"attention_mask": (inputs != PADDING).long()} if self._classifies_text else {}
        logits: Tensor = self.model(inputs, **given).logits
        return logits


def _from_file(path: Path, function: str, options: Mapping[str, Any], data: DataSet) -> Model:
    if not path.is_file():
        raise UsageError(f"there is no {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, "a file that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError(f"function of {path}", function, names)
    parameters = inspect.signature(found).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in options:
        if option not in parameters and not takes_all:
            raise UnknownNameError(f"option of {path}:{function}", option, parameters)
    facts = {key: value for key, value in _describe(data).items() if key in parameters}
    return Model(f"{path}:{function}", {**facts, **options}, found)


def _require_images(library: str, data: DataSet) -> None:
    if data.kind != "image":
        raise UsageError(f"{library}'s models take pictures, data set {data.name!r} has {_PLURALS[data.kind]}")


def _import(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a build for another torch fails in ways of its own
        raise UsageError(f"{package} cannot be imported ({error}); install it with: pip install {package}") from error


def _check_name(kind: str, name: str, known: Iterable[str]) -> None:
    names = list(known)
    if name not in names:
        raise UnknownNameError(kind, name, difflib.get_close_matches(name, names, n=_NEAR, cutoff=0.4))


_LIBRARIES: Mapping[str, Callable[[str, Mapping[str, Any], DataSet], Model]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "hf": _from_transformers,
}
