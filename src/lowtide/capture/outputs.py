"""What ops outside of modules return: of the last op of a loss no later save leads to the node.

A function mode is the one place where such outputs can be seen. It costs the host time at each op, so it is off while a
module runs, whose own output leads to all that it has saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_BACKWARD = (Tensor.backward, torch.autograd.grad)


class Watch(TorchFunctionMode):
    """Calls ``after(output)`` when an op of this thread has run, and ``before()`` when backward is about to."""

    def __init__(self, before: Callable[[], None], after: Callable[[Any], None]) -> None:
        super().__init__()
        self._before, self._after = before, after

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func in _BACKWARD:
            self._before()
        output = func(*args, **(kwargs or {}))
        self._after(output)
        return output

    def on(self, below: int | None = None) -> None:
        """With so many modes ``below``, or on top: those above it are taken off by others, from the top."""
        above = []
        while below is not None and torch._C._len_torch_function_stack() > below:
            above.append(torch._C._pop_torch_function_stack())
        for mode in (self, *reversed(above)):
            torch._C._push_on_torch_function_stack(mode)

    def is_top(self) -> bool:
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self

    def off(self) -> None:
        """Also from under modes that were put on later and are still on."""
        above = []
        while torch._C._len_torch_function_stack():
            top = torch._C._pop_torch_function_stack()
            if top is self:
                break
            above.append(top)
        for mode in reversed(above):
            torch._C._push_on_torch_function_stack(mode)
