"""Payloads of a lane that are told apart by their numbers, and where they are."""

from __future__ import annotations

import torch

from lowtide import codecs
from lowtide.records import Encoded
from lowtide.stores._crate import large_buffers
from lowtide.stores._lane import Lane, OnHost

SIZE = 1000  # bytes of a payload


def payload(number: int, nbytes: int = SIZE) -> Encoded:
    spec = codecs.create("identity").encode(torch.zeros(1)).spec
    return Encoded("anything", 1, spec, {}, {"raw": torch.full((nbytes,), number % 251, dtype=torch.uint8)})


def put_one(lane: Lane, number: int, nbytes: int = SIZE) -> OnHost:
    encoded = payload(number, nbytes)
    return lane.put(encoded, large_buffers(encoded, 1))


def put(lane: Lane, count: int) -> list[OnHost]:
    return [put_one(lane, number) for number in range(count)]


def is_right(item: OnHost, number: int) -> bool:
    part = item.fetch().tensors["raw"]
    return bool((part == number % 251).all())


def is_here(item: OnHost) -> bool:
    """On the device, or on its way there."""
    return item.cargo.flight is not None
