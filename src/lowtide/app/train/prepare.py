"""From settings to what a run needs: data, a model that fits them, and a configuration with nothing left open."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.app import data
from lowtide.app.data import DataSet
from lowtide.app.models import find_model
from lowtide.app.shared import arguments
from lowtide.app.shared.specs import UsageError
from lowtide.app.train.config import Config
from lowtide.app.train.recipe import resolve, resolve_method


def understand(config: Config) -> tuple[Config, DataSet, nn.Module]:
    """The complete configuration, the data, and the model with the weights of its seed, on the CPU."""
    require_names(config)
    resolve_method(config.method.name, config.method.options)  # what is wrong here is said before data are read
    found = data.load(config.data.name, config.data.path, **config.data.options)
    model = find_model(config.model.name, config.model.options, found)
    torch.manual_seed(config.train.seed)
    module = model.build()
    return resolve(config, found, model, module), found, module.train()


def require_names(config: Config) -> None:
    for name, section in (("model", config.model), ("data", config.data)):
        if not section.name:
            raise UsageError(f"no {name} given; name one with --{name}")


def name_run(config: Config) -> str:
    """``resnet18-digits``."""
    return f"{Path(config.model.name.replace(':', '-')).name}-{config.data.name}"


def find_device(written: str | None) -> torch.device:
    return arguments.find_device(argparse.Namespace(device=written))


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables over tables; what is set later wins."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
