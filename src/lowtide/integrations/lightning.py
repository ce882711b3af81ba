"""Lightning: a callback that holds what the module saves for backward compressed while ``fit`` runs.

    from lowtide.integrations.lightning import LowtideCallback

    trainer = Trainer(callbacks=[LowtideCallback(method="budget")])

Lowtide's state travels in Lightning's checkpoints, so a run that is resumed continues as if it had never stopped.
"""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("lowtide.integrations.lightning needs Lightning: pip install lightning") from error

from lowtide.session import DEFAULT_METHOD, Session, attach

__all__ = ["LowtideCallback"]


class LowtideCallback(Callback):
    """Attaches when training begins, detaches when it ends, also by an exception.

    ``tide`` is the session, there from the beginning of the first training epoch on; it keeps its figures afterwards.
    With ``log`` the ratio and the bytes held go to the trainer's loggers as ``lowtide/ratio`` and ``lowtide/held``.
    Options are those of ``lowtide.attach``.
    """

    def __init__(self, method: str = DEFAULT_METHOD, *, log: bool = True, **options: Any) -> None:
        self.tide: Session | None = None
        self._method, self._log, self._options = method, log, options
        self._saved: dict[str, Any] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = trainer.optimizers[0] if trainer.optimizers else None
        self.tide = attach(pl_module, self._method, optimizer=optimizer, **self._options)
        if self._saved is not None:
            self.tide.load_state_dict(self._saved)
            self._saved = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._log and self.tide is not None and trainer.logger is not None:
            totals = self.tide.report().totals
            figures = {"lowtide/ratio": totals["ratio"], "lowtide/held": totals["held_nbytes_peak"]}
            pl_module.log_dict({name: float(value) for name, value in figures.items() if value is not None})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.tide is None else self.tide.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called before training begins; the session is made later."""
        self._saved = state_dict or None

    def _detach(self) -> None:
        if self.tide is not None:
            self.tide.detach()
