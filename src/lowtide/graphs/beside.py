"""Backward's tensors decoded one ahead: while the step's own kernels use one, the next is written beside them.

Which one comes next is seen in the rehearsal of a graph. Whoever asks for another one gets it all the same. Values
whose mask is asked for right after them (the input of a convolution, then the ReLU that made it) come with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.kernels._aside import Aside
from lowtide.payloads import Payload

Ask = tuple[int, bool]  # the number of a payload in the order of saving, and whether only its mask was asked for


class Listener:
    """Takes down in which order the payloads of a step are asked for."""

    def __init__(self) -> None:
        self.asked: list[Ask] = []
        self._numbers: weakref.WeakKeyDictionary[Payload, int] = weakref.WeakKeyDictionary()
        self._count = 0

    def enlist(self, payload: Payload) -> None:
        """The next payload of the step."""
        self._numbers[payload] = self._count
        self._count += 1
        payload.decoder = self

    def decode(self, payload: Payload, *, mask: bool) -> Tensor:
        self.asked.append((self._numbers[payload], mask))
        return payload.restore(mask=mask)


class Ahead:
    """Decodes the payloads of a graph, each while the one asked for before it is in use."""

    def __init__(self, order: Sequence[Ask], aside: Aside) -> None:
        self._order = order
        self._places: dict[Ask, list[int]] = {}
        for place, ask in enumerate(order):
            self._places.setdefault(ask, []).append(place)
        self._at = 0  # in the order: all before it has been asked for
        self._aside = aside
        self._payloads: list[weakref.ref[Payload]] = []
        self._numbers: weakref.WeakKeyDictionary[Payload, int] = weakref.WeakKeyDictionary()
        self._ready: dict[Ask, Tensor] = {}

    def enlist(self, payload: Payload) -> None:
        """The next payload of the step."""
        self._numbers[payload] = len(self._payloads)
        self._payloads.append(weakref.ref(payload))
        payload.decoder = self

    def decode(self, payload: Payload, *, mask: bool) -> Tensor:
        ask = (self._numbers[payload], mask)
        self._aside.join()  # for what was written ahead, and for what was encoded last
        tensor = self._ready.pop(ask, None)
        if tensor is None:
            tensor = payload.restore(mask=mask)
        place = next((place for place in self._places.get(ask, ()) if place >= self._at), None)
        if place is None:
            self._ready.clear()
            return tensor
        self._at = place + 1
        coming = self._coming(self._at)
        if coming == (ask[0], True) and coming in self._ready:  # it came with its values, which are in use now
            self._begin(self._at + 1)
        elif coming not in self._ready:
            self._ready.clear()
            self._begin(self._at)
        return tensor

    def _coming(self, place: int) -> Ask | None:
        return self._order[place] if place < len(self._order) else None

    def _begin(self, place: int) -> None:
        ask = self._coming(place)
        payload = self._payloads[ask[0]]() if ask is not None and ask[0] < len(self._payloads) else None
        if ask is None or payload is None or not hasattr(payload.codec, "decode_aside"):
            return
        (number, mask), encoded = ask, payload.fetch()
        codec: Any = payload.codec
        if not mask and self._coming(place + 1) == (number, True):
            both = codec.decode_both(encoded, self._aside)
            if both is not None:
                self._ready[number, False], self._ready[number, True] = both
                return
        self._ready[ask] = codec.decode_aside(encoded, self._aside, mask=mask)

    def finish(self) -> None:
        """The step has ended: nothing is left beside it."""
        self._ready.clear()
        self._aside.join()
