"""Keep payloads where they were made: on the device."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.records import Encoded

__all__ = ["Device"]


class OnDevice:
    """A payload that stays on its device."""

    __slots__ = ("encoded", "nbytes")

    def __init__(self, encoded: Encoded, nbytes: int) -> None:
        self.encoded, self.nbytes = encoded, nbytes

    def fetch(self) -> Encoded:
        return self.encoded


@dataclass(frozen=True, slots=True)
class Device:
    """The default store: no transfer, no wait."""

    def put(self, encoded: Encoded) -> OnDevice:
        return OnDevice(encoded, encoded.nbytes)
