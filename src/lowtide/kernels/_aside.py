"""A second stream inside of a captured graph, for encoders and decoders: they run beside the kernels of the step.

Memory is that of the step's own stream throughout: what a kernel on the other one reads or writes is held until the
step has waited for it. So nothing has to be told to the allocator, and no memory is set apart for the other stream.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowtide.errors import GraphError


class Aside(Protocol):
    """What ``Stream`` does; another one stands in for it where there is no GPU."""

    def begin(self) -> int: ...

    def hold(self, *tensors: Tensor) -> None: ...

    def join(self) -> None: ...

    def forget(self) -> None: ...


class Stream:
    """Work is begun one piece at a time: the next one begins when the step has waited for the last."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._held: list[tuple[Tensor, int]] = []

    def begin(self) -> int:
        """The stream to launch on, once it has waited for all that the step has launched."""
        self.join()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._stream.cuda_stream

    def hold(self, *tensors: Tensor) -> None:
        """What was launched there reads or writes these."""
        self._held += [(tensor, tensor._version) for tensor in tensors]

    def join(self) -> None:
        """The step waits for what was launched, and lets go of what was held for it."""
        if not self._held:
            return
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        held, self._held = self._held, []
        if any(tensor._version != version for tensor, version in held):
            raise GraphError(
                "a tensor was changed in place right after it had been saved for backward, while it was being encoded. "
                "Plain training refuses that in backward; in a CUDA graph use beside=False"
            )

    def forget(self) -> None:
        """The capture has failed: what was launched will never run, and nobody can wait for it."""
        self._held = []
