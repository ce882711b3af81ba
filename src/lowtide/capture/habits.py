"""What the graph has taught about plain layers, so that it need not be asked again at every save.

Forward of a layer of ``torch.nn`` such as ``Conv2d`` is one op: what it saves, in which order and for which op, follows
from the layer's own state and from the tensor. So once the graph has named the saves of such a layer twice, alike,
they are named at once, without a walk [5]. Any other module, a subclass, a layer with a ``forward`` of its own or with
hooks beside ours, is looked up in the graph every time; and now and then everything is, so that a habit that no longer
holds is noticed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as globals_of

from lowtide.records import Need, TensorSpec

_PLAIN = frozenset(
    (
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.GELU,
        nn.SiLU, nn.Sigmoid, nn.Tanh,
    )
)  # fmt: skip
_EVERY = 64  # forwards: one in so many is named by the graph alone
_MOST = 1 << 14


class Save(NamedTuple):
    """The op, the field and the need of a save."""

    op: str
    field: str
    need: Need


class Habits:
    """Saves of plain layers by module path, place in the order of the layer's saves, geometry and the layer's state."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Save, int]] = {}
        self._forwards = 0
        self.is_trusted = False

    def begin(self) -> None:
        """A forward begins."""
        self._forwards += 1
        self.is_trusted = self._forwards % _EVERY != 0

    def key(self, module: nn.Module | None, path: str, number: int, spec: TensorSpec, is_leaf: bool) -> Any:
        """What a save is remembered under; None for a module that is not a plain layer."""
        if type(module) not in _PLAIN or module is None:
            return None
        if "forward" in module.__dict__ or len(module._forward_hooks) != 1 or len(module._forward_pre_hooks) != 1:
            return None
        if globals_of._global_forward_hooks or globals_of._global_forward_pre_hooks:
            return None
        weight = module._parameters.get("weight")
        return path, number, spec, is_leaf, module.training, weight is not None and weight.requires_grad

    def recall(self, key: Any) -> Save | None:
        """The save that has been seen under ``key`` often enough."""
        seen = self._seen.get(key)
        return seen[0] if seen is not None and seen[1] > 1 else None

    def learn(self, key: Any, save: Save) -> None:
        seen = self._seen.get(key)
        if len(self._seen) > _MOST:
            self._seen.clear()
        self._seen[key] = (save, seen[1] + 1 if seen is not None and seen[0] == save else 1)
