"""What the tests of ``recording`` share: a loss, its site, and what is left of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import lowtide

LABELS = torch.arange(64)
LOG_SOFTMAX = "(model):log_softmax.result"


def hooks_left() -> tuple[object, int]:
    return torch._C._autograd._top_saved_tensors_default_hooks(False), torch._C._len_torch_function_stack()


def sites_of(session: lowtide.Session) -> dict[str, str]:
    """Names, and the codecs that hold what is saved there."""
    return {entry.name: entry.codec for entry in session.report().sites}


def run_recorded(tide: lowtide.Session, loss_of: Callable[[], Tensor], *, backward_inside: bool) -> None:
    """A recorded loss and its backward pass, which may run inside of the block or after it."""
    with tide.recording():
        loss = loss_of()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters()]
