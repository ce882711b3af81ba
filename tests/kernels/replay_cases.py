"""Encoders whose dither is another one in each replay of a graph: what they are tried on, and what must hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from same_payload import assert_same_payload, bits, copy_to
from torch import Tensor

from lowtide import kernels
from lowtide.codecs import Codec, create
from lowtide.coding import dither
from lowtide.kernels._workspaces import Cell, Replay

Case = tuple[Codec, Tensor]
DRAWS = 7  # enough to tell a mean that settles from one that does not


def make_cases() -> Iterator[Case]:
    torch.manual_seed(0)
    maps = torch.randn(4, 8, 8, 8)
    last = maps.contiguous(memory_format=torch.channels_last)
    for width in (1, 2, 8):
        yield create("groups", bits=width), maps.flatten()[:1100]
    yield create("groups", bits=4), maps[:2].bfloat16()
    yield create("division"), torch.randn(2, 3, 14, 14)
    yield create("division", bits=4), last[:2].half()
    yield create("division"), maps[:2].permute(2, 1, 0, 3)  # a layout that is copied first
    yield create("sample_groups", bits=3), maps  # samples of whole groups
    yield create("sample_groups", bits=3), maps[:, :, :5, :7].contiguous()
    yield create("norm_groups", bits=2), last
    yield create("norm_groups", bits=3.0), maps


@contextmanager
def shifted_keys(number: int) -> Iterator[None]:
    """What a codec writes inside is what the encoders of a graph write in the replay with this number."""
    keys = dither.keys

    def shift(seed: int) -> tuple[int, int]:
        low, high = keys(seed)
        return (low + number + (1 << 31)) % (1 << 32) - (1 << 31), high

    with patch.object(dither, "keys", shift):
        yield


def check(case: Case, device: torch.device, *, kind: Any = None) -> None:
    """``kind`` is the class of the twin, where it shall not be the one that is chosen for the device."""
    codec, x = case[0], copy_to(case[1], device)
    twin: Any = kernels.twin(codec, device, x.dtype) if kind is None else kind(codec)
    assert twin.replays and twin.takes_replay, f"{codec}: no twin at work"
    cell = Cell(device)
    replay = Replay(cell)
    assert_same_payload(twin.encode(x, seed=5, replay=replay), codec.encode(x, seed=5), f"{codec}, number 0")
    decoded = []
    for _ in range(DRAWS):
        cell.advance()
        encoded = twin.encode(x, seed=5, replay=replay)
        decoded.append(twin.decode(encoded))
        if len(decoded) <= 2:  # the second number has more than 32 bits
            with shifted_keys(int(cell.number)):
                assert_same_payload(encoded, codec.encode(x, seed=5), f"{codec}, number {int(cell.number)}")
    assert not torch.equal(bits(decoded[0]), bits(decoded[1])), f"{codec}: two replays, one dither"
    errors = [(each.double() - x.double()).square().mean().sqrt() for each in decoded]
    mean = torch.stack(decoded).double().mean(0)
    error = (mean - x.double()).square().mean().sqrt()
    assert error < 0.55 * min(errors), f"{codec}: the error of {DRAWS} draws is {error:g}, of one {errors[0]:g}"
