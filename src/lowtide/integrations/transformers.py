"""transformers: a callback for ``Trainer``.

    from lowtide.integrations.transformers import LowtideCallback

    trainer = Trainer(model, args, train_dataset=..., callbacks=[LowtideCallback(method="budget")])

Lowtide's state is written beside each checkpoint, as ``lowtide.pt``, and read when the trainer resumes from it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("lowtide.integrations.transformers needs transformers: pip install transformers") from error

from lowtide.errors import LowtideWarning
from lowtide.session import DEFAULT_METHOD, Session, attach

__all__ = ["LowtideCallback"]

_FILE = "lowtide.pt"


class LowtideCallback(TrainerCallback):
    """Attaches when training begins and detaches when it ends.

    ``tide`` is the session; it keeps its figures afterwards. Options are those of ``lowtide.attach``.
    """

    def __init__(self, method: str = DEFAULT_METHOD, **options: Any) -> None:
        self.tide: Session | None = None
        self._method, self._options = method, options

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # accelerate wraps the optimizer; hooks are registered with, and momentum is read from, the one inside.
        optimizer = kwargs.get("optimizer")
        inner = getattr(optimizer, "optimizer", optimizer)
        self.tide = attach(kwargs["model"], self._method, optimizer=inner, **self._options)
        if state.global_step:
            self._resume(_folder(args, state) / _FILE)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = _folder(args, state)
        if self.tide is not None and args.should_save and folder.is_dir():  # one process writes, all read when resuming
            torch.save(self.tide.state_dict(), folder / _FILE)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.tide is not None:
            self.tide.detach()

    def _resume(self, path: Path) -> None:
        assert self.tide is not None
        if path.is_file():
            self.tide.load_state_dict(torch.load(path, weights_only=True))
            return
        warnings.warn(
            f"the run is resumed without Lowtide's state, since there is no {path}: bounds are found anew",
            LowtideWarning,
            stacklevel=2,
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir), f"checkpoint-{state.global_step}")
