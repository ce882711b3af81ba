"""ReLU's backward with no mask in memory: what it is handed stands for one, and the gradient passes through a payload.

ReLU's backward reads its own result for one bit a value. A mask of the gradient's dtype would have to be written and
read; here the kernel that decodes the payload sets the gradient to zero where ReLU was off, which is all that backward
does. It is done when torch's op asks for it, through ``__torch_dispatch__``. Whoever asks anything else of such a
tensor (``vmap``, say) gets the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lowtide.ambient import Plainly
from lowtide.records import TensorSpec

_THRESHOLD, _DETACH = torch.ops.aten.threshold_backward.default, torch.ops.aten.detach.default
_PLAIN = (Tensor, torch.nn.Parameter)

Pass = Callable[[Tensor], Tensor]
Make = Callable[[], Tensor]


class Gate(Tensor):
    """Where ReLU was on. ``let_through(gradient)`` is its backward; ``make()`` the mask itself."""

    let_through: Pass
    make: Make

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, spec: TensorSpec, let_through: Pass, make: Make) -> Gate:
        gate: Gate = Tensor._make_wrapper_subclass(
            cls, spec.shape, strides=spec.stride, dtype=spec.dtype, device=spec.device
        )
        gate.let_through, gate.make = let_through, make
        return gate

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DETACH:
            gate = args[0]
            return cls(TensorSpec.of(gate), gate.let_through, gate.make)
        if func is _THRESHOLD and type(args[1]) is cls and fits(args[0], args[1]) and args[2] == 0:
            if not torch._C._is_any_autocast_enabled():  # which it is not, as a rule, in backward
                return args[1].let_through(args[0])
            with Plainly(args[0].device.type):
                return args[1].let_through(args[0])
        args, kwargs = tree_map(lambda x: x.make() if type(x) is cls else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def fits(gradient: Tensor, gate: Tensor) -> bool:
    """Whether the gradient lies in memory as the tensor did that the payload was made of."""
    return (
        type(gradient) in _PLAIN
        and gradient.dtype is gate.dtype
        and gradient.device == gate.device
        and gradient.shape == gate.shape
        and gradient.stride() == gate.stride()
    )


def may_stand_in() -> bool:
    """Whether who asks for a saved tensor now is backward itself, as a rule, and will not differentiate it."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling()
