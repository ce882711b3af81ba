"""Keep payloads where they were made: on the device."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.records import Encoded

__all__ = ["Device"]


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A payload that stays on its device."""

    encoded: Encoded
    nbytes: int

    def fetch(self) -> Encoded:
        return self.encoded


@dataclass(frozen=True, slots=True)
class Device:
    """The default store: no transfer, no wait."""

    def put(self, encoded: Encoded) -> OnDevice:
        return OnDevice(encoded, encoded.nbytes)
