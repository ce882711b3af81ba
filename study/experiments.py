"""A table of the study: a TOML file says what is trained, by which methods, and with how many seeds.

The file has the sections of ``lowtide train`` and one of its own:

    [study]
    title = "CIFAR-10, ResNet-18"
    metric = "accuracy"         # or "loss"

    [study.methods]             # as written for lowtide compare; the first one is what the others are compared with
    plain = 5                   # seeds 0 to 4
    "budget(noise=0.1)" = 3

The path of the data is relative to the folder that the runner is given, so that it is no part of what a run is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.app.compare.runs import Run, read_method
from lowtide.app.compare.summary import METRICS
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.config import PLAIN, SECTIONS, Config, read_file
from lowtide.errors import UnknownNameError
from lowtide.registry import METHODS

_OWN = "study"
_KEYS = ("title", "metric", "methods")


@dataclass(frozen=True, slots=True)
class Variant:
    """A method with all of its options, those that were left at their defaults too: what is run, however written."""

    text: str
    name: str
    options: Mapping[str, Any]
    seeds: int

    @classmethod
    def read(cls, text: str, seeds: int) -> Variant:
        given = read_method(text)
        name, options = given["name"], dict(given["options"])
        if name != PLAIN:
            kind = METHODS.load(name)
            own = {item.name for item in dataclasses.fields(kind)}
            method = kind(**{key: value for key, value in options.items() if key in own})
            options = {**dataclasses.asdict(method), **options}
        return cls(text, name, options, seeds)

    @property
    def written_options(self) -> str:
        return json.dumps(self.options, sort_keys=True, default=str)

    def is_of(self, row: Mapping[str, str]) -> bool:
        """Whether a row is one of this variant. An option that a later version added is not in older rows."""
        if row["method"] != self.name:
            return False
        noted = json.loads(row["options"])
        mine = json.loads(self.written_options)
        return all(key in mine and mine[key] == value for key, value in noted.items())


@dataclass(frozen=True, slots=True)
class Experiment:
    """One table. ``settings`` are the sections of ``lowtide train`` as the file has them."""

    name: str
    title: str
    metric: str
    variants: Sequence[Variant]
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Experiment:
        tables = read_file(path)
        own = tables.pop(_OWN, None)
        if not isinstance(own, dict) or not isinstance(own.get("methods"), dict) or not own["methods"]:
            raise UsageError(f"{path} is no table of the study: it has no section [{_OWN}.methods]")
        for key in own:
            if key not in _KEYS:
                raise UnknownNameError(f"setting of [{_OWN}] in {path.name}", key, _KEYS)
        metric = own.get("metric", METRICS[0])
        if metric not in METRICS:
            raise UnknownNameError("metric", metric, METRICS)
        for text, seeds in own["methods"].items():
            if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
                raise UsageError(f"{path}: {text!r} is given a number of seeds, 1 or more; got {seeds!r}")
        Config.read(tables)  # what is wrong with it is said now
        variants = merge([Variant.read(text, seeds) for text, seeds in own["methods"].items()])
        return cls(path.stem, own.get("title", path.stem), metric, variants, tables)

    @property
    def key(self) -> str:
        """A name for the settings as written; not for the methods, of which more may be added, nor for [run]."""
        tables = {name: self.settings[name] for name in SECTIONS if name in self.settings and name != "run"}
        return hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:12]

    def configure(self, data: Path, device: str | None) -> Config:
        """The settings of its runs, method and seed aside, with the data in the folder ``data``."""
        config = Config.read(self.settings)
        if config.data.path:
            config = config.replace(data={"path": str((data / config.data.path).absolute())})
        return config.replace(run={"device": device} if device else {})

    def runs(self, config: Config, wanted: Iterable[str] = ()) -> list[tuple[Variant, Run]]:
        """Seed by seed, so that pairs are complete early; ``wanted`` names methods, none of them means all."""
        chosen = self._choose(wanted)
        most = max(variant.seeds for variant in chosen)
        return [
            (variant, Run(variant.text, config.replace(method=_as_settings(variant), train={"seed": seed})))
            for seed in range(most)
            for variant in chosen
            if seed < variant.seeds
        ]

    def _choose(self, wanted: Iterable[str]) -> list[Variant]:
        texts = list(wanted)
        known = [text for variant in self.variants for text in variant.text.split(" = ")]
        for text in texts:
            if text not in known:
                raise UnknownNameError(f"method of {self.name}", text, known)
        return [variant for variant in self.variants if not texts or set(variant.text.split(" = ")) & set(texts)]


def merge(variants: Iterable[Variant]) -> list[Variant]:
    """Variants that are the same, as ``budget`` and ``budget(noise=0.03)`` while that is the default, become one."""
    found: dict[tuple[str, str], Variant] = {}
    for variant in variants:
        key = variant.name, variant.written_options
        same = found.get(key)
        if same is not None:
            text, seeds = f"{same.text} = {variant.text}", max(same.seeds, variant.seeds)
            variant = dataclasses.replace(same, text=text, seeds=seeds)
        found[key] = variant
    return list(found.values())


def _as_settings(variant: Variant) -> dict[str, Any]:
    """As the method's section of a configuration: the options as written, since the rest are defaults."""
    return read_method(variant.text.split(" = ")[0])
