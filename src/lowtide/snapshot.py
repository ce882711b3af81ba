"""What a training step changes, copied to the host, to be put back after steps that were only a trial.

Tensors are put back in place: parameters, buffers and the optimizer's state are the same objects as before, in the same
dtype (an optimizer's own ``load_state_dict`` casts its state to the dtype of the parameters). State that a trial has
added, such as the momentum that the first step makes, is gone again.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide.errors import StateError

Restore = Callable[[], Any]


class Snapshot:
    """The state of modules, optimizers and whatever has a state dict, and of all random generators.

    ``restore`` may be called any number of times. It sets gradients to None. Of a module it covers parameters, all
    buffers (those that are not in its state dict too) and its extra state.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        self._tensors: dict[int, Restore] = {}
        self._restores = [restore for part in parts for restore in self._save_part(part)]
        self._restores.append(_save_generators())

    def restore(self) -> None:
        with torch.no_grad():
            for restore in self._restores:
                restore()

    def _save_part(self, part: Any) -> Iterable[Restore]:
        if isinstance(part, nn.Module):
            for module in part.modules():
                yield self._save(module._parameters)
                yield self._save(module._buffers)
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    yield _save_extra_state(module)
        elif isinstance(part, Optimizer):
            yield self._save(part.param_groups)
            yield self._save(part.state)
        elif hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
            state = copy.deepcopy(part.state_dict())
            yield lambda: part.load_state_dict(copy.deepcopy(state))
        else:
            raise StateError(
                "state is a list of modules, optimizers and other objects with state_dict() and load_state_dict(); "
                f"it has {type(part).__name__}"
            )

    def _save(self, value: Any) -> Restore:
        """Something that gives ``value`` back as it is now: containers and tensors as the same objects."""
        if isinstance(value, Tensor):
            return self._save_tensor(value)
        if isinstance(value, dict):
            items = {key: self._save(item) for key, item in value.items()}
            return lambda: _refill(value, {key: restore() for key, restore in items.items()})
        if isinstance(value, list):
            parts = [self._save(item) for item in value]
            return lambda: _refill(value, [restore() for restore in parts])
        kept = copy.deepcopy(value)
        return lambda: copy.deepcopy(kept)

    def _save_tensor(self, tensor: Tensor) -> Restore:
        if id(tensor) not in self._tensors:  # shared weights; parameters that the optimizer has too
            self._tensors[id(tensor)] = _save_elements(tensor)
        return self._tensors[id(tensor)]


def _save_elements(tensor: Tensor) -> Restore:
    elements = tensor.detach().to("cpu", copy=True)
    # Torch refuses to write to a tensor whose elements share memory: it cannot have changed either.
    is_expanded = any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))

    def restore() -> Tensor:
        if not is_expanded:
            tensor.copy_(elements)
        if tensor.is_leaf:
            tensor.grad = None
        return tensor

    return restore


def _refill(container: Any, content: Any) -> Any:
    container.clear()
    if isinstance(container, dict):
        container.update(content)
    else:
        container.extend(content)
    return container


def _save_extra_state(module: nn.Module) -> Restore:
    state = copy.deepcopy(module.get_extra_state())
    return lambda: module.set_extra_state(copy.deepcopy(state))


def _save_generators() -> Restore:
    """Torch's on the CPU and on all GPUs, Python's, and NumPy's if the program uses it."""
    cpu, python = torch.get_rng_state(), random.getstate()
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)
        if numpy is not None:
            numpy.random.set_state(arrays)

    return restore
