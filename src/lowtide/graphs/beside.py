"""Backward's tensors decoded one ahead: while the step's own kernels use one, the next is written beside them.

Which one comes next is seen in the rehearsal of a graph. Whoever asks for another one gets it all the same. What passes
through a gate (``lowtide.gates``) is not known before, and waits for nothing that is written ahead; nor do pairs, whose
kernels write what is used at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.kernels._aside import Aside
from lowtide.payloads import Payload, Unfolded

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

    def gate(self, payload: Payload, gradient: Tensor) -> Tensor:
        return payload.let_through(gradient)

    def unfold(self, payload: Payload, table: Tensor, dtype: torch.dtype, **options: Any) -> Unfolded | None:
        return payload.take_apart(table, dtype, **options)


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
        self._ready.clear()
        self._begin(self._at)
        return tensor

    def gate(self, payload: Payload, gradient: Tensor) -> Tensor:
        self._catch_up()
        return payload.let_through(gradient)

    def unfold(self, payload: Payload, table: Tensor, dtype: torch.dtype, **options: Any) -> Unfolded | None:
        self._catch_up()
        return payload.take_apart(table, dtype, **options)

    def _catch_up(self) -> None:
        """Where nothing was written ahead yet, the tensor that is asked for may be the one that was encoded last."""
        if not self._ready:
            self._aside.join()

    def _begin(self, place: int) -> None:
        ask = self._order[place] if place < len(self._order) else None
        payload = self._payloads[ask[0]]() if ask is not None and ask[0] < len(self._payloads) else None
        if ask is None or payload is None or not hasattr(payload.codec, "decode_aside"):
            return
        codec: Any = payload.codec
        self._ready[ask] = codec.decode_aside(payload.fetch(), self._aside, mask=ask[1])

    def finish(self) -> None:
        """The step has ended: nothing is left beside it."""
        self._ready.clear()
        self._aside.join()
