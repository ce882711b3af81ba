"""A model on fake tensors: shapes, dtypes and storages without memory behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


def build_shapes(build: Callable[[], nn.Module]) -> nn.Module:
    """The model on the meta device, or for real where its initialisation wants values."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # whatever an initialisation says
        return build()


def make_fake(model: nn.Module, mode: FakeTensorMode, *, channels_last: bool) -> nn.Module:
    """The model itself with fake parameters and buffers, on a CPU that has no memory to fill.

    They are replaced one by one: ``Module.to`` does not know how to make fakes.
    """
    replaced: dict[int, Tensor] = {}
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = replaced.setdefault(id(tensor), _fake(tensor, mode, channels_last))
    return model


def _fake(tensor: Tensor, mode: FakeTensorMode, channels_last: bool) -> Tensor:
    with mode:
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        if channels_last and blank.dim() == 4:
            blank = blank.contiguous(memory_format=torch.channels_last)
        return nn.Parameter(blank, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else blank


class AsOnCuda(TorchFunctionMode):
    """Ops that keep something else on a CUDA device than on a CPU, as they are there.

    Dropout keeps booleans instead of floats. Attention with dropout stays fused, and keeps a seed instead of matrices.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args, kwargs["dropout_p"] = args[:4], 0.0
        elif func in (F.dropout, torch.dropout) and _drops(*args, **kwargs):
            input, p = _chance(*args, **kwargs)
            return torch.native_dropout(input, p, True)[0]
        return func(*args, **kwargs)


def _chance(input: Tensor, p: float = 0.5, *_: Any, **__: Any) -> tuple[Tensor, float]:
    return input, p


def _drops(input: Tensor, p: float = 0.5, training: bool = True, *_: Any, train: bool = True, **__: Any) -> bool:
    """Whether anything is dropped; ``torch.dropout`` calls ``train`` what ``F.dropout`` calls ``training``."""
    return training and train and 0 < p < 1
