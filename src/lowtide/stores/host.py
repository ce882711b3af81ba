"""Keep payloads in pinned host memory, as vDNN (Rhu et al. 2016) and Layrub (Jin et al. 2018) keep whole tensors.

A payload is copied out while newer ones are made, and back shortly before backward asks for it, both on streams of
their own beside the work of the device. What is on the device of them at any time is bounded by ``staging``.

The newest payloads, ``keep`` bytes of them, are not copied at all: the last ones of forward are the first that backward
asks for. Only where the link falls behind by more than the rest of ``staging`` does the device wait for it. The host
never does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lowtide import sizes
from lowtide.errors import SizeError
from lowtide.records import Encoded
from lowtide.stores import Held
from lowtide.stores._crate import large_buffers
from lowtide.stores._lane import Lane
from lowtide.stores._link import CudaLink, Link
from lowtide.stores.device import OnDevice

__all__ = ["Host"]


@dataclass(slots=True)
class Host:
    """``staging``: bytes of payloads that are on the device at a time, at most, or one payload if that is larger.
    ``least``: buffers below so many bytes stay on the device.
    ``keep``: bytes of ``staging`` for the newest payloads, which are not copied; by default three quarters of it.

    Where payloads are in host memory anyway, as on the CPU, they stay as they are.
    """

    staging: int | str = "1GiB"
    least: int | str = "64KiB"
    keep: int | str | None = None
    _lanes: dict[torch.device, Lane | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.staging = sizes.parse(self.staging, what="staging")
        self.least = sizes.parse(self.least, what="least")
        if self.keep is None:
            self.keep = self.staging * 3 // 4
        elif self.keep != 0:
            self.keep = sizes.parse(self.keep, what="keep")
        if self.keep > self.staging:
            raise SizeError(f"keep is a part of staging, {self.staging} bytes at most; got {self.keep}")

    def put(self, encoded: Encoded) -> Held:
        device = encoded.spec.device
        try:
            lane = self._lanes[device]
        except KeyError:
            lane = self._open(device)
        if lane is not None:
            buffers = large_buffers(encoded, self.least)  # type: ignore[arg-type]
            if buffers:
                return lane.put(encoded, buffers)
        return OnDevice(encoded, encoded.nbytes)

    def _open(self, device: torch.device) -> Lane | None:
        link = link_to(device)
        lane = Lane(link, int(self.staging), int(self.keep or 0)) if link is not None else None
        return self._lanes.setdefault(device, lane)

    @property
    def staged(self) -> int:
        """Bytes of payloads that are on a device now, kept there or on their way."""
        return sum(lane.nbytes_here for lane in self._lanes.values() if lane is not None)


def link_to(device: torch.device) -> Link | None:
    """The way to a device; None if there is nothing to cross."""
    return CudaLink(device) if device.type == "cuda" else None
