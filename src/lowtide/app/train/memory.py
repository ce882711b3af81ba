"""What a step holds for backward, and the peak of the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.session import Session


class Meter:
    """Bytes saved for backward, in plain training (``raw``) and as they are held, and the peak of the device.

    With a session its ledger has both. Plain training is counted in its first step, with hooks that change nothing.
    """

    def __init__(self, model: nn.Module, session: Session | None, device: torch.device) -> None:
        self._model, self._session, self._device = model, session, device
        self.raw: int | None = None
        self.held: int | None = None
        self.static: int | None = None
        self.peak: int | None = None

    @contextlib.contextmanager
    def forward(self, inputs: Tensor) -> Iterator[None]:
        """Around the forward pass of the model and the loss."""
        if self._session is not None or self.raw is not None:
            yield
            return
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        for others in (inputs, *self._model.parameters(), *self._model.buffers()):
            storages.pop(others.untyped_storage()._cdata, None)
        self.raw = self.held = sum(storages.values())

    def after_forward(self) -> None:
        """The loss is there, nothing is released yet."""
        if self._session is not None:
            self.raw, self.held = self._session.ledger.raw, self._session.ledger.held

    def begin(self) -> None:
        """Before the first step: what is there without one."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self.static = torch.cuda.memory_allocated(self._device)

    def read(self) -> dict[str, Any]:
        """The figures for a log line; the peak is that of the interval that ends here."""
        peak = None
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self.peak = max(self.peak or 0, peak)
        return {"raw_nbytes": self.raw, "held_nbytes": self.held, "ratio": self.ratio, "peak_nbytes": peak}

    def state_dict(self) -> dict[str, int | None]:
        """For a run that is resumed when nothing is left to do but to write its result."""
        return {"raw": self.raw, "held": self.held, "static": self.static, "peak": self.peak}

    def load_state_dict(self, state: dict[str, int | None]) -> None:
        self.raw, self.held, self.static, self.peak = (state[name] for name in ("raw", "held", "static", "peak"))

    @property
    def ratio(self) -> float | None:
        return self.raw / self.held if self.raw and self.held else None
