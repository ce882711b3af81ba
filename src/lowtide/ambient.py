"""Ambient state while codecs run: grad mode and autocast are off (docs/dataflow.md, rule 13)."""

from __future__ import annotations

import torch


class Plainly:
    """Grad mode and autocast are off inside, and afterwards what they were.

    Does what ``torch.no_grad`` and ``torch.autocast(enabled=False)`` do, at a tenth of their cost: this is entered for
    every save.
    """

    __slots__ = ("_autocast", "_device", "_grad")

    def __init__(self, device: str) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._autocast = torch.is_autocast_enabled(self._device)
        if self._grad:
            torch._C._set_grad_enabled(False)
        if self._autocast:
            torch.set_autocast_enabled(self._device, False)

    def __exit__(self, *_: object) -> None:
        if self._autocast:
            torch.set_autocast_enabled(self._device, True)
        if self._grad:
            torch._C._set_grad_enabled(True)
