"""What the graph has taught about plain layers, so that it need not be asked again at every save.

Forward of a layer of ``torch.nn`` such as ``Conv2d`` is one op: what it saves, in which order and for which op, follows
from the layer's own state and from the tensor. So once the graph has named the saves of such a layer twice, alike,
they are named at once, without a walk [5]. Any other module, a subclass, a layer with a ``forward`` of its own or with
hooks beside ours, is looked up in the graph every time; and now and then everything is, so that a habit that no longer
holds is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module as globals_of

from lowtide.capture import needs
from lowtide.capture.handles import extent_of
from lowtide.records import Need, Site, TensorSpec

_PLAIN = frozenset(
    (
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
        nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.ReLU, nn.LeakyReLU,
        nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh,
    )
)  # fmt: skip
_IN_PLACE: dict[type, str] = {nn.ReLU: "Relu", nn.LeakyReLU: "LeakyRelu"}  # their ops save the result alone, for a bit
_EVERY = 64  # forwards: one in so many is named by the graph alone
_MOST = 1 << 14


class Save(NamedTuple):
    """The op, the field and the need of a save."""

    op: str
    field: str
    need: Need


class Habit:
    """A save that is known beforehand: what the tensor looked like last time at this place, and how it was named."""

    __slots__ = ("_looks", "_module", "_state", "extent", "is_leaf", "key", "module", "need", "site", "spec")

    def __init__(self, module: nn.Module, spec: TensorSpec, is_leaf: bool, site: Site, need: Need) -> None:
        self._module, self._state = module, state_of(module)
        self._looks = (spec.shape, spec.stride, spec.dtype, spec.device, is_leaf, False)
        self.spec, self.is_leaf, self.site, self.need = spec, is_leaf, site, need
        self.extent = extent_of(spec)
        self.key = (site.path, site.op, site.field)
        self.module = type(module).__name__

    def fits(self, module: nn.Module, tensor: Tensor) -> bool:
        """Whether another save of the same layer, at the same place in its order, is of the same kind."""
        if module is not self._module or type(tensor) is not Tensor:
            return False
        looks = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_leaf, tensor.is_neg())
        return looks == self._looks and state_of(module) == self._state

    def site_of(self, call: int) -> Site:
        site = self.site
        return site if site.call == call else site_of(site.path, site.op, site.field, call, site.module)


class Habits:
    """Saves of plain layers by module path, place in the order of the layer's saves, geometry and the layer's state."""

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[Save, int]] = {}
        self._forwards = 0
        self.is_trusted = False
        self.latest: dict[tuple[str, int], Habit] = {}  # by module path and place

    def begin(self) -> None:
        """A forward begins."""
        self._forwards += 1
        self.is_trusted = self._forwards % _EVERY != 0

    def key(self, module: nn.Module | None, path: str, number: int, spec: TensorSpec, is_leaf: bool) -> Any:
        """What a save is remembered under; None for a module that is not a plain layer."""
        state = state_of(module) if module is not None else None
        return (path, number, spec, is_leaf, state) if state is not None else None

    def recall(self, key: Any) -> Save | None:
        """The save that has been seen under ``key`` often enough."""
        seen = self._seen.get(key)
        return seen[0] if seen is not None and seen[1] > 1 else None

    def learn(self, key: Any, save: Save) -> None:
        seen = self._seen.get(key)
        if len(self._seen) > _MOST:
            self._seen.clear()
            self.latest.clear()
        self._seen[key] = (save, seen[1] + 1 if seen is not None and seen[0] == save else 1)


def state_of(module: nn.Module) -> tuple[bool, bool] | None:
    """What the saves of a plain layer depend on: whether it is in training, whether its weight is trained.

    None for any other module: forward is more than one op of torch, or may be, or there are hooks around it besides
    ours.
    """
    own = module.__dict__
    if (
        type(module) not in _PLAIN
        or "forward" in own
        or len(own["_forward_hooks"]) != 1
        or len(own["_forward_pre_hooks"]) != 1
        or globals_of._global_forward_hooks
        or globals_of._global_forward_pre_hooks
    ):
        return None
    weight = own["_parameters"].get("weight")
    return own["training"], weight is not None and weight.requires_grad


def of_changed_view(module: nn.Module | None, tensor: Tensor) -> Save | None:
    """The save of a layer that has changed a view in place, as ReLU does with what an instance norm made.

    The layer's node is then inside of another one, through which no path leads [5].
    """
    if module is None or tensor._base is None or type(module) not in _IN_PLACE:
        return None
    above = tensor.grad_fn.next_functions if tensor.grad_fn is not None else ()
    if not module.inplace or state_of(module) is None or not above or type(above[0][0]).__name__ != "CopySlices":
        return None
    op = _IN_PLACE[type(module)]
    row = needs.TABLE[op]
    assert isinstance(row, Mapping), "what they save is read alike, whatever they are told"
    return Save(needs.snake(op), "result", row["result"])


def has_state(module: nn.Module) -> bool:
    """Whether a leaf that the module saves may be its own parameter, or a cast of one, or a buffer."""
    return bool(module._parameters or module._buffers)


site_of = lru_cache(maxsize=1 << 14)(Site)  # the same from step to step
