"""Keep payloads in pinned host memory, as vDNN (Rhu et al. 2016) and Layrub (Jin et al. 2018) keep whole tensors.

A payload is copied out as soon as it is made, and back shortly before backward asks for it, both on streams of their
own beside the work of the device. What is on the device of them at any time, on its way out or back, is bounded.

What was just made stays on the device until newer payloads need the room, also when it has been copied: the last
payloads of forward are the first that backward asks for, and need not come back. Only where the link falls behind by
more than ``staging`` does the device wait for it. The host never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowtide import sizes
from lowtide.records import Encoded
from lowtide.stores import Held
from lowtide.stores._lane import Lane
from lowtide.stores._link import CudaLink, Link
from lowtide.stores.device import OnDevice

__all__ = ["Host"]


@dataclass(slots=True)
class Host:
    """``staging``: bytes of payloads that are on the device at a time, at most, or one payload if that is larger.
    ``least``: buffers below so many bytes stay on the device.

    Where payloads are in host memory anyway, as on the CPU, they stay as they are.
    """

    staging: int | str = "512MiB"
    least: int | str = "64KiB"
    _lanes: dict[torch.device, Lane | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.staging = sizes.parse(self.staging, what="staging")
        self.least = sizes.parse(self.least, what="least")

    def put(self, encoded: Encoded) -> Held:
        device = encoded.spec.device
        if device not in self._lanes:
            link = link_to(device)
            self._lanes.setdefault(device, Lane(link, int(self.staging)) if link is not None else None)
        lane = self._lanes[device]
        buffers = self._large_buffers(encoded) if lane is not None else {}
        return lane.put(encoded, buffers) if lane is not None and buffers else OnDevice(encoded, encoded.nbytes)

    @property
    def staged(self) -> int:
        """Bytes of payloads that are on a device now, on their way out or back."""
        return sum(lane.nbytes_here for lane in self._lanes.values() if lane is not None)

    def _large_buffers(self, encoded: Encoded) -> dict[int, Tensor]:
        """The storages to move, whole: as long as one part of a storage is on the device, all of it is."""
        found = {}
        for part in encoded.tensors.values():
            storage = part.untyped_storage()
            if storage.nbytes() >= int(self.least) and part.device == encoded.spec.device:
                found[storage._cdata] = torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage)
        return found


def link_to(device: torch.device) -> Link | None:
    """The way to a device; None if there is nothing to cross."""
    return CudaLink.to(device) if device.type == "cuda" else None
