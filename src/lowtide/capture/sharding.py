"""Weights that have memory only while their layers run, as under FSDP: nothing may read them at another time."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

_SHARDED = frozenset(("FSDPModule", "FullyShardedDataParallel"))


class Sharding:
    """Whether parts of a model are sharded; looked at again when the model's class has changed, as it does then."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = weakref.ref(model) if model is not None else None
        self._seen: type | None = None
        self.is_on = False

    def look(self) -> None:
        model = self._model() if self._model is not None else None
        if model is not None and type(model) is not self._seen:
            self._seen = type(model)
            self.is_on = any(is_sharded(module) for module in model.modules())


def is_sharded(module: nn.Module) -> bool:
    return not _SHARDED.isdisjoint(base.__name__ for base in type(module).__mro__)


def has_memory(tensor: Tensor) -> bool:
    """Whether its storage reaches as far as the tensor does: that of a sharded weight is empty between its uses."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes
