"""What a user leaves open, chosen from the data and the model, so that one command without numbers trains well.

- sgd where the model has batch norms or no layer norms, else adamw;
- sgd: lr 0.1 for a batch of 128 and in proportion to the batch (the linear scaling rule of Goyal et al., 2017), a tenth
  of that without batch norm; weight decay 5e-4;
- adamw: lr 1e-3 and weight decay 0.05, whatever the batch;
- lars: weight decay 5e-4; its learning rate is for the user to say, there is no rule that serves all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import nn

from lowtide.app.data import DataSet
from lowtide.app.models import Model
from lowtide.app.shared.specs import UsageError
from lowtide.app.shared.variants import find_method
from lowtide.app.train.config import PLAIN, Augment, Config
from lowtide.app.train.schedules import WARMUPS

_LR_SGD, _LR_ADAMW, _REFERENCE_BATCH = 0.1, 1e-3, 128
_DECAY = {"sgd": 5e-4, "adamw": 0.05, "lars": 5e-4}
_RESERVED = ("optimizer", "seed", "compile")  # options of a session that the trainer sets itself


def resolve(config: Config, data: DataSet, model: Model, module: nn.Module) -> Config:
    """The configuration with nothing left open; one that is complete comes back as it is."""
    method, method_options = resolve_method(config.method.name, config.method.options)
    optimizer = config.optimizer.name or _choose_optimizer(module)
    lr = config.optimizer.lr
    decay = config.optimizer.weight_decay
    warmup = config.schedule.warmup
    return config.replace(
        model={"name": model.name, "options": dict(model.options)},
        method={"name": method, "options": method_options},
        optimizer={
            "name": optimizer,
            "lr": _choose_rate(optimizer, module, config.train.batch) if lr is None else lr,
            "weight_decay": _DECAY[optimizer] if decay is None else decay,
        },
        schedule={"warmup": WARMUPS[config.schedule.name] if warmup is None else warmup},
        augment=_choose_augment(config.augment, data),
    )


def resolve_method(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A method of Lowtide with its options, or plain; presets become the method they stand for.

    Options that it does not have are refused here, before anything is loaded or built.
    """
    if name == PLAIN:
        if options:
            raise UsageError(f"plain training has no options, got {', '.join(options)}")
        return PLAIN, {}
    given = {key: value for key, value in options.items() if value is not None}
    return find_method(name, given, reserved=_RESERVED, others=[PLAIN], what=f"method {name!r}")


def _has(module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(part, kind) for part in module.modules())


def _choose_optimizer(module: nn.Module) -> str:
    recurrent = (nn.LSTM, nn.GRU, nn.RNN, nn.Embedding)
    needs_adam = _has(module, (nn.LayerNorm, *recurrent)) and not _has(module, nn.BatchNorm2d)
    return "adamw" if needs_adam else "sgd"


def _choose_rate(optimizer: str, module: nn.Module, batch: int) -> float:
    if optimizer == "adamw":
        return _LR_ADAMW
    if optimizer == "lars":
        raise UsageError("lars scales the learning rate by layer, and none serves all models: say --lr, such as 5")
    rate = _LR_SGD * batch / _REFERENCE_BATCH
    return rate if _has(module, nn.BatchNorm2d) else rate / 10


def _choose_augment(augment: Augment, data: DataSet) -> dict[str, Any]:
    given = {key: value for key, value in asdict(augment).items() if value is not None}
    if data.kind != "image":
        if any(given.values()):
            raise UsageError(f"augmentation is for pictures, data set {data.name!r} has none")
        return {}
    nothing = {"crop": 0, "flip": False, "cutout": 0, "resized_crop": 0.0}
    return {**nothing, **data.augment, **given}
