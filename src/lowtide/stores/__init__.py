"""Where payloads wait for backward."""

from __future__ import annotations

from typing import Protocol

from lowtide.records import Encoded


class Held(Protocol):
    """A payload in a store's keeping. Dropping the last reference to it frees the payload."""

    @property
    def nbytes(self) -> int:
        """Bytes held on the device that training runs on."""
        ...

    def fetch(self) -> Encoded:
        """The payload, ready to decode; may be asked for more than once."""
        ...


class Store(Protocol):
    """Takes payloads in, gives them back."""

    def put(self, encoded: Encoded) -> Held: ...
