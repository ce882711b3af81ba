"""Numbers on their way from the device to the host: one copy, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Parcel:
    """Sends small tensors off when it is made; ``open`` hands them over, and waits if they are still under way."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._sizes = [tensor.numel() for tensor in tensors]
        self._order: dict[torch.device, list[int]] = {}
        for index, tensor in enumerate(tensors):
            self._order.setdefault(tensor.device, []).append(index)
        self._sent = {device: _send([tensors[index] for index in order]) for device, order in self._order.items()}

    def open(self) -> list[list[float]]:
        """The numbers of each tensor, in the order in which they were sent."""
        parts: list[list[float]] = [[]] * len(self._sizes)
        for device, order in self._order.items():
            numbers, arrived = self._sent[device]
            if arrived is not None:
                arrived.synchronize()
            found, start = numbers.tolist(), 0  # at once: hundreds of tensors of one number take longer than a copy
            for index in order:
                parts[index] = found[start : start + self._sizes[index]]
                start += self._sizes[index]
        return parts


def _send(tensors: list[Tensor]) -> tuple[Tensor, torch.cuda.Event | None]:
    if all(tensor.dim() == 0 for tensor in tensors):  # as a rule: one call, where each reshape would be one more
        numbers = torch.stack(tensors).double()
    else:
        numbers = torch.cat([tensor.reshape(-1) for tensor in tensors]).double()
    if not numbers.is_cuda:
        return numbers.cpu(), None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(numbers.device))
    return host, arrived
