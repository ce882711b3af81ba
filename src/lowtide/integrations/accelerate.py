"""accelerate: attach to what ``Accelerator.prepare`` returned.

    from lowtide.integrations.accelerate import attach

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tide = attach(accelerator, model, optimizer, method="budget")

``accelerator.save_state`` and ``load_state`` then carry Lowtide's state along.
"""

from __future__ import annotations

from typing import Any

from torch import nn

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("lowtide.integrations.accelerate needs accelerate: pip install accelerate") from error

from lowtide import session
from lowtide.session import DEFAULT_METHOD, Session

__all__ = ["attach"]


def attach(
    accelerator: Accelerator, model: nn.Module, optimizer: Any = None, method: str = DEFAULT_METHOD, **options: Any
) -> Session:
    """``lowtide.attach`` on the model and the optimizer inside accelerate's wrappers; options are the same."""
    inner = getattr(optimizer, "optimizer", optimizer)
    tide = session.attach(accelerator.unwrap_model(model), method, optimizer=inner, **options)
    accelerator.register_for_checkpointing(tide)
    return tide
