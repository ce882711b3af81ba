"""What a run is: sections of settings, from a TOML file, from the command line, or both.

A setting is declared once, with its type, its limits and its help; the reader of TOML, the flags and the checks all
follow from that. None means: chosen from the data and the model when the run begins (``recipe.py``). What was chosen is
written to ``config.toml`` of the run, from which the same run can be made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowtide.app.shared.specs import UsageError
from lowtide.errors import UnknownNameError

PLAIN = "plain"
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adamw", "lars")
SCHEDULES = ("onecycle", "cosine", "linear", "constant")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known about one setting beside its default. Limits are inclusive."""

    kind: type
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    def check(self, name: str, given: Any) -> Any:
        """The value, as its type; what cannot be it is refused."""
        is_whole = isinstance(given, int) and not isinstance(given, bool)
        value: Any = float(given) if self.kind is float and is_whole else given
        is_kind = is_whole if self.kind is int else isinstance(value, self.kind)
        if not is_kind:
            raise UsageError(f"{name} is {_KINDS[self.kind]}, got {given!r}")
        if self.choices and value not in self.choices:
            raise UnknownNameError(name, value, self.choices)
        if (self.low is not None and not value >= self.low) or (self.high is not None and not value <= self.high):
            limits = f"at least {self.low}" if self.high is None else f"from {self.low} to {self.high}"
            raise UsageError(f"{name} has to be {limits}, got {value}")
        return value


_KINDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}


def _setting(default: Any, kind: type, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(kind, help, **limits)})


def _about_options(help: str) -> dict[str, Setting]:
    return {"setting": Setting(dict, help)}


class Section:
    """A group of settings; checks them when it is made."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, setting in settings(type(self)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, setting.check(f"{_title(type(self))}.{name}", value))


@dataclass(frozen=True, slots=True)
class Model(Section):
    """the model"""

    name: str = _setting("", str, "resnet18 and others of the zoo, torchvision:NAME, timm:NAME, hf:NAME, PATH.py:NAME")
    options: dict[str, Any] = field(
        default_factory=dict, metadata=_about_options("an option of the model, as width=32 (may be repeated)")
    )


@dataclass(frozen=True, slots=True)
class Data(Section):
    """the data"""

    name: str = _setting(
        "", str, "digits, or NAME:PATH with mnist, fashion_mnist, cifar10, cifar100, imagefolder, text, sst2"
    )
    path: str = _setting("", str, "where its files are")
    options: dict[str, Any] = field(
        default_factory=dict, metadata=_about_options("an option of the data set, as size=32 (may be repeated)")
    )


@dataclass(frozen=True, slots=True)
class Method(Section):
    """how activations are held"""

    name: str = _setting(PLAIN, str, "a method of Lowtide, a preset (bold, careful), or plain for none")
    options: dict[str, Any] = field(
        default_factory=dict, metadata=_about_options('an option of the method, as linear="0.4 std" (may be repeated)')
    )


@dataclass(frozen=True, slots=True)
class Train(Section):
    """training"""

    epochs: int = _setting(10, int, "how often to go through the data", low=1)
    batch: int = _setting(128, int, "samples in a batch", low=1)
    precision: str = _setting("fp32", str, "of matrix products; bf16 and fp16 are autocast", choices=PRECISIONS)
    channels_last: bool = _setting(False, bool, "memory layout of conv nets")
    seed: int = _setting(0, int, "of weights, order, augmentation and dither", low=0)
    label_smoothing: float = _setting(0.0, float, "share of a label given to all classes", low=0, high=1)
    clip: float | None = _setting(None, float, "largest norm of a step's gradients", low=0)
    deterministic: bool = _setting(False, bool, "bit-equal repeats on a GPU too, at some cost")
    graph: bool = _setting(False, bool, "replay forward and backward as a CUDA graph: less work for the host")
    compile: bool = _setting(False, bool, "have torch.compile compile the model")


@dataclass(frozen=True, slots=True)
class Optimizer(Section):
    """the optimizer; what is not given is chosen from the model and the batch"""

    name: str | None = _setting(None, str, "sgd (Nesterov momentum), adamw, or lars", choices=OPTIMIZERS)
    lr: float | None = _setting(None, float, "largest learning rate", low=0)
    momentum: float = _setting(0.9, float, "of sgd and lars", low=0, high=1)
    weight_decay: float | None = _setting(None, float, "of weights; biases and norms have none", low=0)


@dataclass(frozen=True, slots=True)
class Schedule(Section):
    """the learning rate over the run"""

    name: str = _setting("onecycle", str, "its shape", choices=SCHEDULES)
    warmup: float | None = _setting(None, float, "share of the steps in which it rises", low=0, high=1)


@dataclass(frozen=True, slots=True)
class Augment(Section):
    """augmentation of pictures; what is not given is chosen from the data"""

    crop: int | None = _setting(None, int, "move a picture by up to so many pixels", low=0)
    flip: bool | None = _setting(None, bool, "mirror every second picture")
    cutout: int | None = _setting(None, int, "blank a square of so many pixels a side", low=0)
    resized_crop: float | None = _setting(
        None, float, "enlarge a part of at least this share of the area; 0: not", low=0, high=1
    )
    test_mirror: bool = _setting(False, bool, "test with the mean output for a picture and its mirror image")


@dataclass(frozen=True, slots=True)
class Run(Section):
    """where and how"""

    device: str | None = _setting(None, str, "cuda, cuda:1 or cpu (default: cuda if there is one)")
    log_every: int = _setting(20, int, "steps between two lines of metrics", low=1)
    checkpoint_every: int = _setting(0, int, "steps between checkpoints; 0: at the end of each epoch", low=0)
    checkpoints: bool = _setting(True, bool, "write them; without, only a signal makes the run write one")


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a run."""

    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    method: Method = field(default_factory=Method)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    augment: Augment = field(default_factory=Augment)
    run: Run = field(default_factory=Run)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> Config:
        """From nested tables; a section or a setting that does not exist is refused by name."""
        sections = {}
        for name, values in table.items():
            if name not in SECTIONS:
                raise UnknownNameError("section of the configuration", name, SECTIONS)
            if not isinstance(values, Mapping):
                raise UsageError(f"[{name}] is a section of the configuration, got {values!r}")
            known = [key for key, _ in settings(SECTIONS[name])]
            for key in values:
                if key not in known:
                    raise UnknownNameError(f"setting of [{name}]", key, known)
            sections[name] = SECTIONS[name](**values)
        return cls(**sections)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Nested tables of what is set."""
        return {
            section: {
                key: value for key, value in dataclasses.asdict(getattr(self, section)).items() if value is not None
            }
            for section in SECTIONS
        }

    def replace(self, **sections: Mapping[str, Any]) -> Config:
        """A copy with other values: ``config.replace(train={"seed": 3})``."""
        changed = {
            name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items() if values
        }
        return dataclasses.replace(self, **changed)

    def digest(self) -> str:
        """A name for all that the result of a run depends on: everything but [run]."""
        tables = {name: table for name, table in self.tables().items() if name != "run"}
        return hashlib.sha256(json.dumps(tables, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def differences(self, other: Config) -> list[str]:
        """Settings in which two runs differ, [run] aside, as ``train.batch 64, not 32``."""
        ours, theirs = self.tables(), other.tables()
        return [
            f"{section}.{key} is {ours[section].get(key)!r}, not {theirs[section].get(key)!r}"
            for section in SECTIONS
            if section != "run"
            for key in sorted(ours[section].keys() | theirs[section].keys())
            if ours[section].get(key) != theirs[section].get(key)
        ]


SECTIONS: Mapping[str, type[Any]] = {
    "model": Model,
    "data": Data,
    "method": Method,
    "train": Train,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "augment": Augment,
    "run": Run,
}


def settings(section: type[Any]) -> Iterator[tuple[str, Setting]]:
    for item in dataclasses.fields(section):
        yield item.name, item.metadata["setting"]


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {path} is not TOML: {error}") from error


def _title(section: type) -> str:
    return section.__name__.lower()
